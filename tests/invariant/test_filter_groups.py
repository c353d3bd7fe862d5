"""Dynamic sampling with responses that are generated ahead: no placement changes a number."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_staleness import STILL, TOLERANCE, Rows, Runs, one_ray

from rolepool.data.demo import Demo

__all__ = ["one_ray"]
NUM_STEPS = 3


class FilteredRuns(Runs):
    """Runs that filter groups."""

    def _keys(self, k: int, placement: str) -> list[str]:
        more = ["algorithm.filter_groups.enable=true", "data.gen_batch_size=12"]
        return [*super()._keys(k, placement), *more, f"trainer.total_training_steps={NUM_STEPS}"]


@pytest.mark.timeout(200)
@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1])
def test_the_groups_are_the_same_under_every_placement(k: int, demo: Demo, tmp_path: Path) -> None:
    runs = FilteredRuns(demo, tmp_path)
    expected: Rows = runs.rows(k, "one rank")
    found = runs.rows(k, "rollout alone")
    assert list(found) == list(expected) == list(range(1, NUM_STEPS + 1))
    for step, row in expected.items():
        assert row["train/num_gen_batches"] >= 2, "nothing was replaced"
        assert row["training/staleness/max"] == min(k, step - 1)
        for name, value in row.items():
            if not name.startswith(STILL):
                assert abs(found[step][name] - value) <= TOLERANCE, (step, name)
