"""A step on paper: the pipeline, with roles that compute nothing and only record the calls.

Owns finding the step, and turning the recorded calls into a graph. Imports neither torch nor ray,
so that `plan` can use it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from rolepool.config import Config
from rolepool.config.functions import ADV_ESTIMATORS, Needs, import_object
from rolepool.config.schema import all_keys
from rolepool.placement.plan import NEXT_STEP, Schedule, ScheduledCall
from rolepool.placement.roles import Role, needed_roles
from rolepool.trainer.pipeline import Pipeline
from rolepool.trainer.step import Roles, Step, in_one_function, ppo_step, remax_step

UNNAMED = "adv"
"""The operation of calls that the step does not name: what the driver does."""
MAX_EPOCHS = 3
"""The largest number of epochs in a schedule. Further epochs make the graph larger, but add no
overlap."""


def step_of(config: Config, needs: Needs | None = None) -> Step[Any]:
    """The step that the config names, or else the one for an advantage estimator with these needs.
    None means what is known without importing the estimator."""
    if config.trainer.step is not None:
        named = import_object("trainer.step", config.trainer.step)
        return named if isinstance(named, Step) else in_one_function(named)
    known = ADV_ESTIMATORS.get(config.algorithm.adv_estimator, ()) if needs is None else needs
    return remax_step if "reward_baselines" in known else ppo_step


def schedule_of(config: Config) -> Schedule:
    """The schedule of a step in which every role that is trained updates, up to the next step's
    generation."""
    for key in (key for key in all_keys() if key.endswith(".ppo_epochs")):
        config = config.with_value(key, min(MAX_EPOCHS, config.at(key)))
    notes = _Notes()
    names_of_roles = (*needed_roles(config)[0], Role.RewardModel)
    roles = Roles({role: _PaperRole(notes, role) for role in names_of_roles}, _PaperWeights(notes))
    recorder: Any = notes  # in place of the estimator
    pipeline = Pipeline(step_of(config), recorder, _PaperPrompts())
    number = config.trainer.critic_warmup + 1
    names = _make_step(pipeline, config, roles, number)
    num_calls = len(notes.made)
    # The next step is made, too, because its first call ends this one.
    names_of_next = _make_step(pipeline, config, roles, number + 1)
    names[num_calls] = f"{NEXT_STEP}{names_of_next.get(num_calls, UNNAMED)}"
    scheduled = []
    for position, call in enumerate(notes.made[: num_calls + 1]):
        scheduled.append(ScheduledCall(names.get(position, UNNAMED), *call))
    return Schedule(tuple(scheduled))


def _make_step(pipeline: Pipeline, config: Config, roles: Roles, number: int) -> dict[int, str]:
    """Make both phases of a step. Returns the operation of each call, by its position."""
    pipeline.generate(config, roles, number)
    step = pipeline.learn(config, roles)
    calls: Mapping[str, Any] = step.calls.calls
    names: dict[int, str] = {}
    for operation, batches in calls.items():
        for batch in batches:
            for position in batch.calls:
                names[position] = operation
    return names


class _PaperPrompts:
    """Prompts without data."""

    epoch = 0

    def next_batch(self) -> Any:
        return PaperBatch()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is no position to go to."""


@dataclass(frozen=True)
class PaperBatch:
    """A batch, or a future of one, that holds no data: only which calls it comes from."""

    calls: frozenset[int] = frozenset()

    def union(self, other: Self) -> Self:
        return replace(self, calls=self.calls | other.calls)

    def reorder(self, order: object) -> Self:
        return self

    select = __getitem__ = reorder  # some rows or columns come from the same calls


@dataclass
class _Notes:
    """The calls that were made, by position: the roles of each, and the calls that end before it
    starts."""

    made: list[tuple[frozenset[Role], frozenset[int]]] = field(default_factory=list)
    last_of: dict[Role, int] = field(default_factory=dict)
    """The last call of each role."""
    waited_for: set[int] = field(default_factory=set)
    """The calls that the driver has waited for."""

    def call(self, roles: tuple[Role, ...], /, *args: Any, **kwargs: Any) -> PaperBatch:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, PaperBatch)]
        after = {call for batch in given for call in batch.calls} | self.waited_for
        after.update(self.last_of[role] for role in roles if role in self.last_of)
        position = len(self.made)
        self.made.append((frozenset(roles), frozenset(after)))
        self.last_of.update(dict.fromkeys(roles, position))
        return PaperBatch(frozenset({position}))

    def estimate(self, *given: Any) -> SimpleNamespace:
        """Replaces the estimator: the driver waits for all that it is given."""
        batch = self.call((), *given)
        self.waited_for |= batch.calls
        return SimpleNamespace(batch=batch, lengths=())


@dataclass(frozen=True)
class _PaperWeights:
    """A transfer of weights that is one call of both roles."""

    notes: _Notes

    def send(self, version: int) -> Any:
        return [self.notes.call((Role.Actor, Role.Rollout))]

    def check(self) -> None:
        """Nothing was sent."""


@dataclass(frozen=True)
class _PaperRole:
    """A role whose methods only record the call."""

    notes: _Notes
    role: Role
    dp_size: int = 1

    def __getattr__(self, method: str) -> Callable[..., PaperBatch]:
        return partial(self.notes.call, (self.role,))
