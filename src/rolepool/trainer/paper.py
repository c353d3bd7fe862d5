"""A step on paper: the step function itself, called with roles that compute nothing and note what they were asked.

Owns turning those notes into a graph. Imports neither torch nor ray, so that `plan` can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rolepool.config import Config
from rolepool.config.functions import ADV_ESTIMATORS, Needs
from rolepool.placement.roles import Role, needed_roles
from rolepool.placement.schedule import NEXT_STEP, Schedule, ScheduledCall
from rolepool.trainer.calls import Roles
from rolepool.trainer.remax import remax_step
from rolepool.trainer.step import StepCalls, ppo_step

if TYPE_CHECKING:
    from rolepool.protocol import DataProto

Step = Callable[..., StepCalls]


def step_of(needs: Needs) -> Step:
    """The step function for an advantage estimator that needs these arguments."""
    return remax_step if "reward_baselines" in needs else ppo_step


def schedule_of(config: Config, step: Step | None = None) -> Schedule:
    """The schedule of a step in which every role that is trained updates, up to the next step's generation."""
    notes = _Notes()
    run = step or step_of(ADV_ESTIMATORS.get(config.algorithm.adv_estimator, ()))
    number = config.trainer.critic_warmup + 1
    needed, _ = needed_roles(config)
    paper: dict[Role, Any] = {role: _PaperRole(notes, role) for role in (*needed, Role.RewardModel)}

    def sync(version: int) -> Any:
        return [notes.call((Role.Actor, Role.Rollout), ())]

    roles = Roles(
        actor=paper[Role.Actor],
        rollout=paper[Role.Rollout],
        reward=paper[Role.RewardModel],
        critic=paper.get(Role.Critic),
        ref=paper.get(Role.RefPolicy),
        sync_weights=sync,
    )
    made: Any = run(config, roles, notes, PaperBatch(), number)
    names = {call: name for name, batches in made.calls.items() for batch in batches for call in batch.calls}
    num_calls = len(notes.made)
    run(config, roles, notes, PaperBatch(), number + 1)
    calls = [
        ScheduledCall(names.get(position, "adv"), frozenset(workers), frozenset(after))
        for position, (workers, after) in enumerate(notes.made[:num_calls])
    ]
    workers, after = notes.made[num_calls]
    return Schedule((*calls, ScheduledCall(f"{NEXT_STEP}gen", frozenset(workers), frozenset(after))))


@dataclass(frozen=True)
class PaperBatch:
    """A batch, or a future of one, that holds no data: only which calls it comes from."""

    calls: frozenset[int] = frozenset()

    def union(self, other: PaperBatch) -> PaperBatch:
        return PaperBatch(self.calls | other.calls)

    def reorder(self, order: object) -> PaperBatch:
        return self

    def select(self, keys: object) -> PaperBatch:
        return self

    def __getitem__(self, rows: object) -> PaperBatch:
        return self


@dataclass(frozen=True)
class _PaperEstimated:
    batch: PaperBatch
    lengths: tuple[int, ...] = ()


@dataclass
class _Notes:
    """The calls that were made, by position: who works on each, and after which calls it starts."""

    made: list[tuple[tuple[Role, ...], set[int]]] = field(default_factory=list)
    last_of: dict[Role, int] = field(default_factory=dict)
    """The last call of each role."""
    waited_for: set[int] = field(default_factory=set)
    """The calls that the driver has waited for."""

    def call(self, roles: tuple[Role, ...], given: Iterable[PaperBatch]) -> PaperBatch:
        after = {call for batch in given for call in batch.calls} | self.waited_for
        after.update(self.last_of[role] for role in roles if role in self.last_of)
        position = len(self.made)
        self.made.append((roles, after))
        self.last_of.update(dict.fromkeys(roles, position))
        return PaperBatch(frozenset({position}))

    def estimate(self, prompts: DataProto, *given: Any) -> Any:
        """In place of the estimator: the driver waits for all that it is given."""
        batches = [one for value in given for one in (value if isinstance(value, list) else [value]) if one is not None]
        estimated = self.call((), batches)
        self.waited_for |= estimated.calls
        return _PaperEstimated(estimated)


@dataclass(frozen=True)
class _PaperRole:
    """A role whose every method notes the call."""

    notes: _Notes
    role: Role
    dp_size: int = 1

    def __getattr__(self, method: str) -> Callable[..., PaperBatch]:
        def call(*args: Any, **kwargs: Any) -> PaperBatch:
            return self.notes.call((self.role,), [value for value in args if isinstance(value, PaperBatch)])

        return call
