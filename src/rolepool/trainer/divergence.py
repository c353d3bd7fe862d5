"""Training that has diverged: the steps in which a trained role made no finite update.

Owns what a bad step is, the warning about skipped updates, and the error that ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rolepool.config import LoadedConfig
from rolepool.config.loading import show
from rolepool.errors import DivergedError
from rolepool.placement.roles import ROLE_SPECS, trained_roles
from rolepool.trainer.checkpoint import Checkpoints

logger = logging.getLogger(__name__)

SECTIONS = {str(role): ROLE_SPECS[role].section for role in trained_roles()}
"""The keys of each trained role."""


class BadSteps:
    """Bad steps in a row, for each trained role.

    A step is bad for a role that had updates to make in it and skipped all of them, because no gradient was finite.
    """

    def __init__(self, loaded: LoadedConfig, checkpoints: Checkpoints) -> None:
        self._loaded, self._checkpoints = loaded, checkpoints
        self._num_in_a_row = dict.fromkeys(SECTIONS, 0)

    @property
    def reason(self) -> str | None:
        """Why the last step is not to be saved, if it was bad."""
        roles = [role for role, number in self._num_in_a_row.items() if number]
        return f"{' and '.join(roles)} made no finite update in it" if roles else None

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a step by its row of metrics; raise after too many bad ones in a row."""
        skipped = []
        for role in SECTIONS:
            if f"{role}/updates" not in metrics:  # the actor, while the critic warms up
                continue
            num_made, num_skipped = int(metrics[f"{role}/updates"]), int(metrics[f"{role}/skipped_updates"])
            self._num_in_a_row[role] = 0 if num_made else self._num_in_a_row[role] + 1
            if num_skipped:
                skipped.append(f"{num_skipped} of {num_made + num_skipped} updates of {role}")
        if skipped:
            logger.warning("step %d: skipped %s because the gradients are not finite", step, " and ".join(skipped))
        limit = self._loaded.config.trainer.max_bad_steps
        diverged = [role for role, number in self._num_in_a_row.items() if number >= limit]
        if diverged:
            keys = [f"{SECTIONS[role]}.{name}" for role in diverged for name in ("optim.lr", "grad_clip")]
            values = " or ".join(f"{key}={show(self._loaded.value_of(key))}" for key in keys)
            raise DivergedError(
                f"{' and '.join(diverged)} made no finite update in the last {limit} steps, up to step {step} "
                f"(trainer.max_bad_steps={limit}): training has diverged; lower {values}, or look for rewards that are "
                f"too large; {self._checkpoints.newest_in_words}"
            )
