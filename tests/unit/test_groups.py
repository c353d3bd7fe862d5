"""Dynamic sampling: which groups a step learns from, and with which weights they are generated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rolepool.config import Config, load_config
from rolepool.errors import ConfigError, DataError
from rolepool.protocol import DataProto, DataProtoFuture
from rolepool.protocol.batches import Rollouts, Scores
from rolepool.protocol.columns import ragged
from rolepool.protocol.futures import Stripe
from rolepool.trainer.groups import GroupsOfStep, metric_values, mixed_groups, rows_of_groups
from rolepool.trainer.paper import check_step, schedule_of
from rolepool.trainer.pipeline import Pipeline
from rolepool.trainer.queue import StoredBatch
from rolepool.trainer.recorder import CallRecorder
from rolepool.trainer.state import FilteredGroups, TrainState
from rolepool.trainer.step import Generated, Step

NUM_SAMPLES = 2
LAST_STEP = 6
FILTERED = [
    "algorithm.filter_groups.enable=true",
    f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
    "data.train_batch_size=3",
    "data.gen_batch_size=4",
]


def config_with(*words: str) -> Config:
    return load_config([], [*FILTERED, *words]).config


# The choice


def test_a_group_is_mixed_if_its_values_are_not_all_equal() -> None:
    values = np.array([1, 1, 1, 0, 0.1, 0.1, 0.1, 0.1 + 1e-9, -1, 2])
    assert mixed_groups(values, 2) == [1, 3, 4]
    assert mixed_groups(values, 5) == [0, 1]
    # The standard deviation of equal numbers may be above 0, because their mean is rounded.
    equal = np.full(3, 0.1)
    assert equal.std() > 0
    assert mixed_groups(equal, 3) == []


def test_the_rows_of_a_group_are_next_to_each_other() -> None:
    assert rows_of_groups([0, 2], 3).tolist() == [0, 1, 2, 6, 7, 8]


def scored(scores: Sequence[float], numbers: Sequence[Mapping[str, float]] = ()) -> DataProto:
    column: Any = None
    if numbers:
        column = np.empty(len(numbers), dtype=object)
        column[:] = numbers
    return Scores(scores=torch.tensor(scores), reward_numbers=column).to_proto()


@pytest.mark.parametrize("metric", [None, "score", "reward", "seq_reward", "seq_final_reward"])
def test_the_metric_is_the_score(metric: str | None) -> None:
    assert metric_values(scored([1.0, 0.5]), metric).tolist() == [1, 0.5]


def test_the_metric_is_a_number_of_the_reward_function() -> None:
    batch = scored([1.0, 0.5, 0.0], [{"acc": 1.0}, {"acc": 0.0}, {"failed": 1.0}])
    assert metric_values(batch, "acc").tolist() == [1, 0, 0], "a failed response has the score 0"


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ([], "the reward has no such number, only score; use one of them"),
        ([{"f1": 1.0}] * 2, "the reward has no such number, only score and f1; use one of them"),
        ([{"acc": 1.0}, {}], "1 of 2 responses have no such number; return it for all"),
    ],
)
def test_a_metric_that_responses_do_not_have_is_an_error(
    numbers: list[dict[str, float]], problem: str
) -> None:
    with pytest.raises(DataError, match=re.escape(f"filter_groups.metric=acc: {problem}")):
        metric_values(scored([1.0, 0.5], numbers), "acc")


# Several batches


def future(batch: DataProto) -> DataProtoFuture:
    return DataProtoFuture((), [Stripe(batch)])


def generated(number: int, first: int, scores: Sequence[float], version: int = 0) -> Generated:
    """Responses to prompts whose only token is their number."""
    num_rows = len(scores)
    tokens = np.repeat(np.arange(first, first + num_rows // NUM_SAMPLES), NUM_SAMPLES)
    ones = torch.ones(num_rows, dtype=torch.int64)
    rollouts = Rollouts(
        input_ids=ragged(torch.tensor(np.stack([tokens, tokens]).T.ravel()), 2 * ones),
        num_prompt_tokens=ones,
        num_response_tokens=ones,
        weights_version=version * ones,
    )
    once = torch.tensor(tokens[::NUM_SAMPLES], dtype=torch.float32)
    return Generated(
        number,
        DataProto.from_dict(non_tensors={"token": tokens}),
        future(rollouts.to_proto()),
        future(scored(scores)),
        future(Scores(scores=once).to_proto()),
        calls={"own": (first,)},  # type: ignore[dict-item]
    )


def test_a_step_learns_from_the_first_mixed_groups_of_its_batches() -> None:
    groups = GroupsOfStep(config_with(), number=7, num_batches_per_epoch=9)
    groups.add(generated(7, 0, [0, 0, 0, 1, 1, 1, 0, 0]))
    assert not groups.are_enough
    groups.check_limit()
    groups.add(generated(7, 4, [0, 1, 1, 1, 0, 1, 1, 0]))
    assert groups.are_enough
    joined = groups.joined()
    tokens = [1, 1, 4, 4, 6, 6]
    assert joined.prompts.non_tensor_batch["token"].tolist() == tokens
    rollouts = Rollouts.of(joined.rollouts.get())
    assert rollouts.input_ids.values()[::2].tolist() == tokens
    assert Scores.of(joined.scores.get()).scores.tolist() == [0, 1, 0, 1, 0, 1]
    assert joined.baselines is not None
    assert Scores.of(joined.baselines.get()).scores.tolist() == [1, 4, 6]
    assert joined.calls == {"own": [0, 4]}
    chosen = FilteredGroups(gen_batch_size=4, num_batches=2, num_filtered=4, kept=(1, 4, 6))
    assert groups.chosen == chosen
    assert chosen.num_surplus == 1


def test_too_many_batches_are_one_line_with_the_keys_and_counts() -> None:
    config = config_with("algorithm.filter_groups.max_num_gen_batches=2")
    groups = GroupsOfStep(config, number=7, num_batches_per_epoch=1)
    groups.add(generated(7, 0, [0, 0, 0, 1, 1, 1, 0, 0]))
    groups.check_limit()
    groups.add(generated(7, 4, [0] * 8))
    with pytest.raises(DataError) as caught:
        groups.check_limit()
    assert str(caught.value) == (
        "step 7 has 1 of data.train_batch_size=3 groups after 2 batches of data.gen_batch_size=4 "
        "prompts (algorithm.filter_groups.max_num_gen_batches=2): all responses to the other 7 "
        "have the same score; set 0 (no limit) or a larger max_num_gen_batches, or choose prompts "
        "that are neither too easy nor too difficult"
    )


def test_without_a_limit_an_epoch_without_a_mixed_group_ends_the_run() -> None:
    groups = GroupsOfStep(config_with(), number=7, num_batches_per_epoch=2)
    for scores in ([0.0] * 8, [0.0] * 7 + [1.0], [0.0] * 8):
        groups.add(generated(7, 0, scores))
        groups.check_limit()
    groups.add(generated(7, 0, [1.0] * 8))
    with pytest.raises(DataError, match="max_num_gen_batches=0: the last 2 batches, an epoch, had"):
        groups.check_limit()


@pytest.mark.parametrize("kept", [(), (1, 1), (2, 1), (-1,), (8,), (0, 1, 2, 3, 4, 5)])
def test_impossible_groups_of_a_damaged_state_are_refused(kept: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="groups"):
        FilteredGroups(gen_batch_size=4, num_batches=2, num_filtered=3, kept=kept)


# The weights


class Prompts:
    """Prompts that are the numbers from 0; 40 of them are an epoch."""

    def __init__(self) -> None:
        self.next = 0

    @property
    def epoch(self) -> int:
        return self.next // 40

    num_batches_per_epoch = 10

    def next_batch(self) -> DataProto:
        tokens = np.repeat(np.arange(self.next, self.next + 4), NUM_SAMPLES)
        self.next += 4
        return DataProto.from_dict(non_tensors={"token": tokens})

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class FakeRoles:
    """A rollout whose weights change when they are sent, or already with the updates."""

    before_new_weights: Any = None

    def __init__(self, *, in_one_process: bool) -> None:
        self.recorder = CallRecorder()
        self.can_generate_behind_updates = not in_one_process
        self.version = 0
        self.story: list[str] = []

    def generate(self, config: Any, roles: Any, prompts: DataProto, number: int) -> Generated:
        tokens = prompts.non_tensor_batch["token"]
        first = int(tokens[0])
        # Two of five prompts have responses with different scores.
        scores = [float(token % 5 < 2 and row % 2) for row, token in enumerate(tokens)]
        self.story.append(f"generate {number}")
        made = generated(number, first, scores, self.version)
        return Generated(number, prompts, made.rollouts, made.scores)

    def learn(self, config: Any, roles: Any, estimator: Any, batch: Generated) -> Any:
        self.story.append(f"update {batch.number}")
        if not self.can_generate_behind_updates:
            self.version = batch.number
        if batch.number > 1:  # the first step trains only the critic, and sends no weights
            if self.before_new_weights is not None:
                self.before_new_weights()
            self.story.append(f"send {batch.number}")
            self.version = batch.number
        versions = set(batch.rollouts.get().batch["weights_version"].tolist())
        tokens = batch.prompts.non_tensor_batch["token"][::NUM_SAMPLES].tolist()
        return batch.number, versions, tokens


def pipeline_of(roles: FakeRoles) -> Pipeline:
    controller = SimpleNamespace(value=0.5, restore=lambda value: None)
    estimator: Any = SimpleNamespace(kl_controller=controller, needs=())
    return Pipeline(Step(roles.generate, roles.learn), estimator, Prompts())


def steps_of(pipeline: Pipeline, roles: Any, config: Config, numbers: Sequence[int]) -> list[Any]:
    learned = []
    for number in numbers:
        pipeline.fill(config, roles, number, LAST_STEP)
        step = pipeline.learn(config, roles)
        assert roles.before_new_weights is None
        assert step.groups is not None
        learned.append((step.calls, step.groups, step.epoch))
    return learned


@pytest.mark.parametrize("in_one_process", [True, False])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_all_batches_of_a_step_have_the_same_weights(k: int, in_one_process: bool) -> None:
    roles = FakeRoles(in_one_process=in_one_process)
    config = config_with(f"algorithm.max_staleness={k}")
    learned = steps_of(pipeline_of(roles), roles, config, range(1, LAST_STEP + 1))
    mixed = [0, 1, 5, 6, 10, 11, 15, 16, 20, 21]
    first = 0
    for number, ((step, versions, tokens), groups, epoch) in enumerate(learned, start=1):
        assert step == number
        version = max(0, number - 1 - k)
        # The first step sends no weights, but in one process the rollout has them.
        known = version if in_one_process or version > 1 else 0
        assert versions == {known}
        position = first % 5
        wanted = [first - position + token for token in mixed if token >= position]
        assert tokens == wanted[:3]
        size = 4 * groups.num_batches
        assert first + size - 4 <= tokens[-1] < first + size
        assert groups.num_filtered + groups.num_surplus + 3 == size
        assert epoch == first // 40
        first += size


def test_with_another_pool_the_updates_of_a_step_are_queued_before_scores_are_waited_for() -> None:
    config = config_with("algorithm.max_staleness=1")
    stories = []
    for in_one_process in (False, True):
        roles = FakeRoles(in_one_process=in_one_process)
        steps_of(pipeline_of(roles), roles, config, [1, 2])
        stories.append(roles.story[roles.story.index("update 1") + 1 :])
    apart, together = stories
    assert apart[-4:] == ["generate 3", "update 2", "generate 3", "send 2"]
    assert together[-4:] == ["generate 3", "generate 3", "update 2", "send 2"]


# The state


def saved(config: Config) -> tuple[TrainState, list[StoredBatch], list[Any]]:
    """The state after step 2, and what the steps after it learn from."""
    roles = FakeRoles(in_one_process=False)
    pipeline = pipeline_of(roles)
    steps_of(pipeline, roles, config, [1, 2])
    stored = [batch.hold() for batch in pipeline.queue]
    state = TrainState.model_validate_json(pipeline.state_after(2).to_json())
    return state, stored, steps_of(pipeline, roles, config, range(3, LAST_STEP + 1))


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_restored_run_learns_from_the_same_groups(k: int) -> None:
    config = config_with(f"algorithm.max_staleness={k}")
    state, stored, expected = saved(config)
    assert len(state.queue) == k
    for queued in state.queue:
        assert queued.groups is not None and queued.groups.num_batches > 1
    roles = FakeRoles(in_one_process=False)
    roles.version = 2
    pipeline = pipeline_of(roles)
    pipeline.restore(config, state, stored, LAST_STEP)
    assert pipeline.notice is None
    assert pipeline.state_after(2) == state
    assert steps_of(pipeline, roles, config, range(3, LAST_STEP + 1)) == expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["algorithm.filter_groups.enable=false", "data.gen_batch_size=null"], "are filtered"),
        (["data.gen_batch_size=8"], "data.gen_batch_size was 4"),
        (["data.train_batch_size=2"], "they have 3 groups, and a step has 2"),
    ],
)
def test_groups_that_do_not_fit_the_keys_are_generated_again(words: list[str], reason: str) -> None:
    k = "algorithm.max_staleness=1"
    state, stored, _ = saved(config_with(k))
    pipeline = pipeline_of(FakeRoles(in_one_process=False))
    pipeline.restore(config_with(k, *words), state, stored, LAST_STEP)
    assert pipeline.queue == ()
    assert pipeline.state_after(2).data == state.queue[0].data
    assert pipeline.notice is not None and reason in pipeline.notice


def test_batches_that_were_not_filtered_are_generated_again() -> None:
    config = config_with("algorithm.max_staleness=1")
    state, (batch,), _ = saved(config)
    plain = batch.queued.model_copy(update={"groups": None})
    pipeline = pipeline_of(FakeRoles(in_one_process=False))
    pipeline.restore(config, state, [StoredBatch(plain, batch.results)], LAST_STEP)
    assert pipeline.queue == ()
    assert pipeline.notice is not None and "their groups are not filtered" in pipeline.notice


# Keys, plan and paper


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["actor_rollout_ref.rollout.n=1"], "a group has one response and no differences"),
        (
            ["algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"],
            "use seq_reward, the score without it",
        ),
        (
            ["algorithm.filter_groups.enable=false"],
            "data.gen_batch_size=4: without algorithm.filter_groups.enable=true",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_one_line(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(*words)
    (line,) = caught.value.problems
    assert problem in line


def one_function(*arguments: Any) -> Any:
    """A step that cannot be divided."""


def test_a_step_in_one_function_is_refused() -> None:
    step = f"trainer.step={__name__}:one_function"
    with pytest.raises(ConfigError, match="one function cannot generate further prompts"):
        check_step(config_with(step))


@pytest.mark.parametrize("k", [0, 1])
def test_on_paper_the_driver_waits_for_the_scores_of_one_batch(k: int) -> None:
    config = config_with(f"algorithm.max_staleness={k}")
    calls = schedule_of(config).calls
    names = [call.operation for call in calls]
    reward = names.index("reward")
    # Without staleness, nothing else of the step begins before. With it, only the weights wait.
    waits = {name for name, call in zip(names, calls, strict=True) if reward in call.after}
    assert ("values" in waits) == (k == 0)
    assert {"update_weights", "next_gen"} <= waits
