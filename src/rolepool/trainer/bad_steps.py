"""Bad steps: those that must not be saved, and the error that ends a run whose training has
diverged."""

from collections.abc import Mapping

from rolepool.config import LoadedConfig, show
from rolepool.errors import DivergedError, logger
from rolepool.placement.roles import ROLE_SPECS, Role, trained_roles
from rolepool.trainer.checkpoint import Checkpoints


class BadSteps:
    """The number of bad steps in a row of each trained role.

    A step is bad for a role that skipped all its updates of the step, because no gradient was
    finite. A step in which no response has a token makes no update either, but says nothing about
    gradients: it does not count.
    """

    def __init__(self, loaded: LoadedConfig, checkpoints: Checkpoints) -> None:
        self._loaded = loaded
        self._checkpoints = checkpoints
        self._num_in_a_row = dict.fromkeys(trained_roles(), 0)

    @property
    def reason(self) -> str | None:
        """Why the last step must not be saved; None if it was not bad."""
        roles = [role for role, number in self._num_in_a_row.items() if number]
        if not roles:
            return None
        names = " and ".join(roles)
        return f"{names} made no finite update in it"

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a step by its row of metrics. Raises DivergedError after too many bad steps in a
        row."""
        skipped = []
        for role in self._num_in_a_row:
            if f"{role}/updates" not in metrics:  # the actor, while the critic warms up
                continue
            num_made = int(metrics[f"{role}/updates"])
            num_skipped = int(metrics[f"{role}/skipped_updates"])
            if num_made:
                self._num_in_a_row[role] = 0
            elif num_skipped:
                self._num_in_a_row[role] += 1
            if num_skipped:
                skipped.append(f"{num_skipped} of {num_made + num_skipped} updates of {role}")
        if skipped:
            logger.warning(
                "step %d: skipped %s because the gradients are not finite",
                step,
                " and ".join(skipped),
            )
        limit = self._loaded.config.trainer.max_bad_steps
        diverged = [role for role, number in self._num_in_a_row.items() if number >= limit]
        if diverged:
            raise self._divergence(diverged, step, limit)

    def _divergence(self, roles: list[Role], step: int, limit: int) -> DivergedError:
        """The error about roles that made no finite update for too many steps."""
        settings = []
        for role in roles:
            for name in ("optim.lr", "grad_clip"):
                key = f"{ROLE_SPECS[role].section}.{name}"
                value = self._loaded.value_of(key)
                settings.append(f"{key}={show(value)}")
        names = " and ".join(roles)
        what = (
            f"{names} made no finite update in the last {limit} steps, "
            f"up to step {step} (trainer.max_bad_steps={limit})"
        )
        to_lower = " or ".join(settings)
        fix = (
            f"lower {to_lower}, or look for rewards that are too large; "
            f"{self._checkpoints.newest_in_words}"
        )
        return DivergedError(f"{what}: training has diverged; {fix}")
