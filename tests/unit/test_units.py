"""Amounts are shown in the unit that fits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolepool.units import show_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 * 2**20 + 2**19, "5.5 MiB"),
        (GIB - 1, "1.0 GiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (299.5 * GIB, "299.5 GiB"),
        (2**70, "1024.0 EiB"),
    ],
)
def test_an_amount_is_shown_in_its_largest_unit(num_bytes: float, shown: str) -> None:
    assert show_bytes(num_bytes) == shown


@given(st.integers(1, 2**69))
def test_an_amount_is_never_shown_as_zero_or_as_a_thousand_of_a_unit(num_bytes: int) -> None:
    matched = re.fullmatch(r"([\d.]+) (B|[KMGTPE]iB)", show_bytes(num_bytes))
    assert matched is not None
    assert 1 <= float(matched[1]) < 1024
