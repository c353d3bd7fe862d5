"""Which keys `rolepool train` acts on. A key that is not built is refused when it is set, and never ignored."""

from __future__ import annotations

from collections.abc import Iterable

from rolepool.config.schema import all_keys

BUILT = (
    "placement.strategy",
    "placement.split",
    "placement.pools",
    "placement.roles",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)


def is_built(path: str) -> bool:
    """Whether training acts on a key."""
    return any(path == built or path.startswith(f"{built}.") for built in BUILT)


def not_built(paths: Iterable[str]) -> list[str]:
    """Those of the keys that training does not act on, in the order of the schema."""
    wanted = set(paths)
    return [path for path in all_keys() if path in wanted and not is_built(path)]
