"""Functions that a key chooses by name: which names there are, without importing the functions (they need torch).

A key holds a registered name, or `module:function`. `rolepool.algorithm` adds the names that plugins register.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

Needs = tuple[str, ...]
"""Arguments that a function must get. `values` need a critic, `reward_baselines` need greedy responses."""

ADV_ESTIMATORS: dict[str, Needs] = {
    "gae": ("values",),
    "grpo": ("index",),
    "rloo": ("index",),
    "remax": ("reward_baselines",),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": ("index",),
}
POLICY_LOSSES: dict[str, Needs] = {"vanilla": ()}

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_name(known: Mapping[str, Needs], name: str) -> str:
    """The name, if it is known or has the form `module:function`."""
    if name not in known and not _REFERENCE.fullmatch(name):
        raise ValueError(f"must be one of {', '.join(known)}, or a function of your own as module:function")
    return name


AdvEstimatorName = Annotated[str, AfterValidator(partial(check_name, ADV_ESTIMATORS))]
PolicyLossName = Annotated[str, AfterValidator(partial(check_name, POLICY_LOSSES))]
