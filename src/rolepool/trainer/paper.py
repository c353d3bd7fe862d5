"""A step on paper: the pipeline, with roles that compute nothing and only record the calls.

Owns finding the step, and the graph of its calls. Their names come from the recorder, as those of a
run do. Imports neither torch nor ray, so that `plan` can use it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

from rolepool.config import Config
from rolepool.config.functions import ADV_ESTIMATORS, Needs, import_object
from rolepool.config.schema import all_keys
from rolepool.errors import ConfigError, logger
from rolepool.placement.built_in_roles import ADV
from rolepool.placement.plan import NEXT_STEP, Schedule, ScheduledCall
from rolepool.placement.roles import Role, needed_roles
from rolepool.trainer.pipeline import Pipeline
from rolepool.trainer.recorder import CallRecorder, NotedCall
from rolepool.trainer.step import Roles, Step, in_one_function, ppo_step, remax_step

MAX_EPOCHS = 3
"""The largest number of epochs in a schedule. Further epochs make the graph larger, but add no
overlap."""


def step_of(config: Config, needs: Needs | None = None) -> Step[Any]:
    """The step that the config names, or else the one for an advantage estimator with these needs.
    None means what is known without importing the estimator."""
    if config.trainer.step is not None:
        named = import_object("trainer.step", config.trainer.step)
        if isinstance(named, Step):
            return named
        max_staleness = config.algorithm.max_staleness
        fix = "write it as a Step with two phases (docs/extending.md)"
        is_one = f"trainer.step={config.trainer.step} is one; {fix}"
        if max_staleness:
            what = "a step that is one function cannot generate ahead"
            raise ConfigError(
                f"algorithm.max_staleness={max_staleness}: {what}, and {is_one}, or use 0"
            )
        if config.algorithm.filter_groups.enable:
            what = "a step that is one function cannot generate further prompts"
            raise ConfigError(
                f"algorithm.filter_groups.enable=true: {what}, and {is_one}, or use false"
            )
        return in_one_function(named)
    if needs is None:
        needs = ADV_ESTIMATORS.get(config.algorithm.adv_estimator, ())
    return remax_step if "reward_baselines" in needs else ppo_step


def check_step(config: Config) -> None:
    """Raise ConfigError if the step cannot generate ahead, or several batches, and the config asks
    for it. A step of the user may do more than can be run on paper; then its first generation
    tells."""
    needs_two_phases = config.algorithm.max_staleness > 0 or config.algorithm.filter_groups.enable
    if config.trainer.step is None or not needs_two_phases:
        return
    try:
        schedule_of(config)
    except ConfigError:
        raise
    except Exception as error:
        logger.debug("trainer.step=%s cannot be run on paper: %s", config.trainer.step, error)


def schedule_of(config: Config) -> Schedule:
    """The schedule of a step in which every role that is trained updates, up to the generation that
    begins the next step.

    With `algorithm.max_staleness=k`, it begins with the generation of the step that is k steps
    later.
    """
    for key in all_keys():
        if key.endswith(".ppo_epochs"):
            num_epochs = min(MAX_EPOCHS, config.at(key))
            config = config.with_value(key, num_epochs)
    graph = _Graph()
    proxies: dict[str, Any] = {}
    needed, _ = needed_roles(config)
    for role in (*needed, Role.RewardModel):
        proxies[role] = _PaperRole(graph, role)
    roles = Roles(proxies, _PaperWeights(graph))
    estimator: Any = _PaperEstimator(graph, roles.recorder)
    pipeline = Pipeline(step_of(config), estimator, _PaperPrompts(), lambda *_: _PaperGroups(graph))

    number = config.trainer.critic_warmup + 1  # the first step that trains the actor
    names: dict[int, str] = {}
    first_position = 0
    # The first step generates for several steps. The last one learns from what the second one has
    # generated, so all its calls are those of every later step, too.
    num_steps = config.algorithm.max_staleness + 2 if config.algorithm.max_staleness else 1
    for later in range(num_steps):
        first_position = len(graph.calls)
        pipeline.fill(config, roles, number + later, _NO_LAST_STEP)
        names.update(_names_of(pipeline.queue[-1].calls))
        names.update(_names_of(_learned(pipeline, config, roles)))
    num_calls = len(graph.calls)
    # The next step begins, too, because its first call ends this one.
    pipeline.fill(config, roles, number + num_steps, _NO_LAST_STEP)
    following: Sequence[NotedCall] = pipeline.queue[-1].calls
    if not following:  # a step in one function makes all its calls in the second phase
        following = _learned(pipeline, config, roles)
    name_of_next = _names_of(following)[num_calls]
    names[num_calls] = f"{NEXT_STEP}{name_of_next}"

    calls_per_step = num_calls - first_position
    # Calls of the first step have no place in the steps before the last one.
    earliest = first_position - config.algorithm.max_staleness * calls_per_step
    scheduled: list[ScheduledCall] = []
    for position in range(first_position, num_calls + 1):
        call = graph.calls[position]
        after = {earlier - first_position for earlier in call.after if earlier >= earliest}
        scheduled.append(ScheduledCall(names[position], call.roles, frozenset(after)))
    return Schedule(tuple(scheduled))


_NO_LAST_STEP = 2**62
"""On paper a run does not end."""


def _learned(pipeline: Pipeline, config: Config, roles: Roles) -> list[NotedCall]:
    """Make the second phase of a step. Returns the calls of both phases."""
    step = pipeline.learn(config, roles)
    noted: list[NotedCall] = []
    for operation, futures in step.calls.calls.items():
        for future in futures:
            noted.append(NotedCall(operation, future))
    # Calls that a step of a user makes after `learn` are not in what it returns.
    return [*noted, *roles.recorder.take()]


def _names_of(noted: Iterable[NotedCall]) -> dict[int, str]:
    """The operation of each call, by its position."""
    names: dict[int, str] = {}
    for operation, future in noted:
        for position in future.calls:
            names[position] = operation
    return names


class _PaperPrompts:
    """Prompts without data."""

    epoch = 0
    num_batches_per_epoch = 1

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


class _Node(NamedTuple):
    """A call in the graph."""

    roles: frozenset[Role]
    """The roles that compute it; none if the driver does."""
    after: frozenset[int]
    """The positions of the calls that end before it starts."""


class _Graph:
    """The calls that were made, by position."""

    def __init__(self) -> None:
        self.calls: list[_Node] = []
        self._last_of: dict[Role, int] = {}
        """The last call of each role."""
        self._waited_for: set[int] = set()
        """The calls that the driver has waited for."""

    def add(self, roles: Sequence[Role], *inputs: object) -> PaperBatch:
        """Add a call of these roles. It begins after its inputs and after the last calls of its
        roles. If the driver has waited for a result, it begins after that, too."""
        after = set(self._waited_for)
        for batch in inputs:
            if isinstance(batch, PaperBatch):
                after |= batch.calls
        position = len(self.calls)
        for role in roles:
            if role in self._last_of:
                after.add(self._last_of[role])
            self._last_of[role] = position
        node = _Node(frozenset(roles), frozenset(after))
        self.calls.append(node)
        return PaperBatch(frozenset({position}))

    def wait_for(self, batch: PaperBatch) -> None:
        """The driver waits for a result, so all later calls do."""
        self._waited_for |= batch.calls


@dataclass(frozen=True)
class _PaperEstimator:
    """Replaces the estimator, which waits for all that it is given."""

    graph: _Graph
    recorder: CallRecorder

    def estimate(self, *inputs: object) -> SimpleNamespace:
        batch = self.graph.add((), *inputs)
        self.graph.wait_for(batch)
        self.recorder.note(ADV.name, batch)
        return SimpleNamespace(batch=batch, lengths=())


@dataclass
class _PaperGroups:
    """On paper the first batch of a step has enough groups. The driver waits for its scores."""

    graph: _Graph
    are_enough = True
    chosen: Any = None
    _generated: Any = None

    def add(self, generated: Any) -> None:
        self.graph.wait_for(generated.scores)
        self._generated = generated

    def check_limit(self) -> None:
        """There is none."""

    def joined(self) -> Any:
        return self._generated


@dataclass(frozen=True)
class _PaperWeights:
    """A transfer of weights that is one call of both roles."""

    graph: _Graph
    needs_send = True
    sent: list[PaperBatch] = field(default_factory=list)

    def send(self, version: int) -> Any:
        self.sent.append(self.graph.add((Role.Actor, Role.Rollout)))
        return [self.sent[-1]]

    def check(self) -> None:
        """The driver waits for the last transfer before it makes another call."""
        while self.sent:
            self.graph.wait_for(self.sent.pop())


@dataclass(frozen=True)
class _PaperRole:
    """A role whose methods only add a call to the graph."""

    graph: _Graph
    role: Role
    dp_size: int = 1

    def __getattr__(self, method: str) -> Callable[..., PaperBatch]:
        def call(*args: object, **kwargs: object) -> PaperBatch:
            return self.graph.add((self.role,), *args, *kwargs.values())

        return call
