"""One colour for each operation, role and kind of waiting, in every plot and on every page.

The eight colours are those of Okabe and Ito, which colour-blind readers can tell apart; the rest are greys and a tint.
"""

from __future__ import annotations

from collections.abc import Iterable

from rolepool.placement.roles import OPERATIONS

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
SERIES_COLORS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, YELLOW)
"""Colours of other lines (runs, pools, GPUs), used in this order and then repeated."""

OPERATION_COLORS = {name: operation.color for name, operation in OPERATIONS.items()}
"""In the order of a step, which is also the order of legends and stacks."""

WAIT_COLORS = {"imbalance": "#F2C9B0", "data": "#C9DDF0", "turn": "#E0E0E0", "nothing": "#F5F5F5"}

DARK = {GREEN, BLUE, VERMILLION, BLACK, "#595959", "#8C8C8C"}
"""Colours on which white text is easier to read than black text."""


def in_step_order(operations: Iterable[str]) -> list[str]:
    """Known operations in the order of a step, then the others by name."""
    known = list(OPERATION_COLORS)
    return sorted(operations, key=lambda name: (known.index(name) if name in known else len(known), name))


def colors_for(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: the operation's own colour, or the next of `SERIES_COLORS`."""
    names = list(names)
    others = [name for name in names if not OPERATION_COLORS.get(name)]
    turns = {name: SERIES_COLORS[index % len(SERIES_COLORS)] for index, name in enumerate(others)}
    return {name: OPERATION_COLORS.get(name) or turns[name] for name in names}
