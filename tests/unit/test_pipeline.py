"""The queue between the two phases of a step, and what of it is in the state of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rolepool.config import Config, load_config
from rolepool.errors import ConfigError, WorkerError
from rolepool.protocol import DataProto, DataProtoFuture
from rolepool.protocol.batches import Rollouts, Scores
from rolepool.protocol.columns import ragged
from rolepool.protocol.futures import Stripe
from rolepool.trainer import queue
from rolepool.trainer.paper import check_step, step_of
from rolepool.trainer.pipeline import Pipeline
from rolepool.trainer.queue import StoredBatch
from rolepool.trainer.recorder import CallRecorder
from rolepool.trainer.results import Results
from rolepool.trainer.state import QueuedStep
from rolepool.trainer.step import Generated, Step, generate, in_one_function, learn_from

NUM_ROWS = 2
LAST_STEP = 6


def config_with(max_staleness: int, *more: str) -> Config:
    return load_config([], [f"algorithm.max_staleness={max_staleness}", *more]).config


class Numbers:
    """Prompts whose tokens are the number of the batch; two batches are an epoch."""

    def __init__(self) -> None:
        self.next = 0

    @property
    def epoch(self) -> int:
        return self.next // 2

    @property
    def num_batches_per_epoch(self) -> int:
        return 2

    def next_batch(self) -> DataProto:
        self.next += 1
        return DataProto.from_dict(non_tensors={"raw_prompt_ids": [[self.next]] * NUM_ROWS})

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


def batch_number(prompts: DataProto) -> int:
    number: int = prompts.non_tensor_batch["raw_prompt_ids"][0][0]
    return number


class KLController:
    value = 0.5

    def restore(self, value: float) -> None:
        self.value = value


class FakeCall:
    """A call that ends when the test says so."""

    def __init__(self) -> None:
        self.has = False

    def has_ended(self, within_s: float) -> bool:
        return self.has


class FakeFuture(DataProtoFuture):
    """The result of a call that the test ends."""

    call: Any

    def __init__(self, batch: DataProto) -> None:
        super().__init__((), [Stripe(batch)])
        self.call = FakeCall()
        self.sources = [self.call]


class Rollout:
    """The weights that a rollout has, and what it generates with them."""

    def __init__(self) -> None:
        self.version = 0

    def generate(self, config: Any, roles: Any, prompts: DataProto, number: int) -> Generated:
        rollouts = rollouts_of(batch_number(prompts), self.version)
        scores = Scores(scores=torch.full((NUM_ROWS,), float(number))).to_proto()
        return Generated(number, prompts, FakeFuture(rollouts), FakeFuture(scores))

    def learn(self, config: Any, roles: Any, estimator: Any, generated: Generated) -> Any:
        estimator.kl_controller.value += 1
        # The next weights arrive behind all generations that were queued before.
        self.version = generated.number
        rollouts = generated.rollouts.get().batch
        return generated.number, int(rollouts["weights_version"][0])


def rollouts_of(token: int, version: int) -> DataProto:
    """A prompt and a response of a token each."""
    ones = torch.ones(NUM_ROWS, dtype=torch.int64)
    return Rollouts(
        input_ids=ragged(torch.tensor([token, 5] * NUM_ROWS), 2 * ones),
        num_prompt_tokens=ones,
        num_response_tokens=ones,
        weights_version=version * ones,
    ).to_proto()


ROLES: Any = SimpleNamespace(recorder=CallRecorder())


def make_pipeline(rollout: Rollout | None = None) -> Pipeline:
    rollout = rollout or Rollout()
    estimator: Any = SimpleNamespace(kl_controller=KLController(), needs=())
    step: Step[Any] = Step(rollout.generate, rollout.learn)
    return Pipeline(step, estimator, Numbers())


def make_steps(pipeline: Pipeline, config: Config, steps: Sequence[int]) -> list[Any]:
    """The number of each step, and the version of the weights that generated its rows."""
    learned = []
    for number in steps:
        pipeline.fill(config, ROLES, number, LAST_STEP)
        learned.append(pipeline.learn(config, ROLES).calls)
    return learned


# The rule


@pytest.mark.parametrize("k", [0, 1, 2, 5, 9])
def test_the_generation_of_step_n_uses_the_weights_after_step_n_minus_1_minus_k(k: int) -> None:
    pipeline = make_pipeline()
    steps = range(1, LAST_STEP + 1)
    learned = make_steps(pipeline, config_with(k), steps)
    assert learned == [(number, max(0, number - 1 - k)) for number in steps]
    assert pipeline.queue == ()


@pytest.mark.parametrize("k", [0, 1, 2, 9])
def test_between_two_steps_k_batches_wait_and_none_is_generated_beyond_the_last_step(
    k: int,
) -> None:
    pipeline = make_pipeline()
    for number in range(1, LAST_STEP + 1):
        make_steps(pipeline, config_with(k), [number])
        end = min(number + k, LAST_STEP)
        assert [batch.number for batch in pipeline.queue] == list(range(number + 1, end + 1))


def test_learn_takes_the_oldest_batch_with_the_epoch_it_was_drawn_in() -> None:
    pipeline = make_pipeline()
    config = config_with(2)
    running = []
    for number in (1, 2, 3):
        pipeline.fill(config, ROLES, number, LAST_STEP)
        running.append(pipeline.learn(config, ROLES))
    assert [step.epoch for step in running] == [0, 0, 1]
    assert [batch_number(step.prompts) for step in running] == [1, 2, 3]
    assert [[batch.number for batch in step.ahead] for step in running] == [[2, 3], [3, 4], [4, 5]]


# States


def stored(pipeline: Pipeline) -> list[StoredBatch]:
    return [batch.hold() for batch in pipeline.queue]


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("saved_step", [1, 3, 5])
def test_a_run_that_is_restored_learns_from_what_the_undisturbed_one_learns_from(
    k: int, saved_step: int
) -> None:
    config = config_with(k)
    expected = make_steps(make_pipeline(), config, range(1, LAST_STEP + 1))

    rollout = Rollout()
    pipeline = make_pipeline(rollout)
    make_steps(pipeline, config, range(1, saved_step + 1))
    state, batches = pipeline.state_after(saved_step), stored(pipeline)
    assert [queued.step for queued in state.queue] == [batch.queued.step for batch in batches]
    if saved_step < LAST_STEP - 1:  # what comes after the state is lost
        make_steps(pipeline, config, [saved_step + 1])

    rollout.version = saved_step  # what `Deployment.restore` sends
    pipeline.restore(config, state, batches, LAST_STEP)
    assert pipeline.notice is None
    assert pipeline.state_after(saved_step) == state
    later = make_steps(pipeline, config, range(saved_step + 1, LAST_STEP + 1))
    assert later == expected[saved_step:]
    assert pipeline.state_after(LAST_STEP).kl_controller == {"value": 0.5 + LAST_STEP}


def test_without_staleness_the_state_is_the_one_that_older_versions_read() -> None:
    pipeline = make_pipeline()
    make_steps(pipeline, config_with(0), [1])
    state = pipeline.state_after(1)
    assert state.data == {"next": 1}
    assert "queue" not in state.to_json()


def restored(k_before: int, k: int, *more: str) -> tuple[Pipeline, list[Any]]:
    """A pipeline that goes on with k after step 2, and what it learns from."""
    rollout = Rollout()
    pipeline = make_pipeline(rollout)
    make_steps(pipeline, config_with(k_before), [1, 2])
    state, batches = pipeline.state_after(2), stored(pipeline)
    rollout.version = 2
    config = config_with(k, *more)
    if config.algorithm.adv_estimator == "remax":
        pipeline._estimator.needs = ("reward_baselines",)
    pipeline.restore(config, state, batches, LAST_STEP)
    return pipeline, make_steps(pipeline, config, range(3, LAST_STEP + 1))


def test_a_larger_k_generates_what_is_missing_with_the_weights_that_exist() -> None:
    pipeline, learned = restored(1, 2)
    assert learned == [(3, 1), (4, 2), (5, 2), (6, 3)]
    assert pipeline.notice == (
        "the state after step 2 has responses for 1 later steps, and algorithm.max_staleness=2: "
        "those up to step 5 are generated with its weights"
    )


@pytest.mark.parametrize("k", [1, 2])
def test_a_smaller_k_learns_from_what_is_there_first(k: int) -> None:
    pipeline, learned = restored(3, k)
    assert [step for step, _ in learned] == [3, 4, 5, 6]
    assert learned[:3] == [(3, 0), (4, 0), (5, 1)]
    assert learned[3] == (6, 5 - k)
    assert pipeline.notice is not None and "learns from these responses first" in pipeline.notice


def test_synchronous_training_does_not_compare_log_probs_of_older_weights() -> None:
    """The rows lose the column that the parity check needs. The metric still knows it."""
    rollout = Rollout()
    pipeline = make_pipeline(rollout)
    make_steps(pipeline, config_with(1), [1, 2])
    pipeline.restore(config_with(0), pipeline.state_after(2), stored(pipeline), LAST_STEP)
    (batch,) = pipeline.queue
    assert "weights_version" not in batch.generated.rollouts.get().batch
    assert batch.results is not None
    assert batch.results.rollouts.batch["weights_version"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["algorithm.rollout_correction.bypass_mode=true"], "they have no old_log_probs"),
        (["actor_rollout_ref.rollout.calculate_log_probs=true"], "they have no rollout_log_probs"),
        (["algorithm.adv_estimator=remax"], "they have no baselines"),
    ],
)
def test_what_does_not_fit_the_keys_is_generated_again(more: list[str], reason: str) -> None:
    pipeline, learned = restored(1, 1, *more)
    assert learned == [(3, 2), (4, 2), (5, 3), (6, 4)]
    assert pipeline.notice is not None and reason in pipeline.notice


def test_a_batch_of_another_size_is_not_learned_from() -> None:
    config = config_with(1)
    rollout = Rollout()
    pipeline = make_pipeline(rollout)
    make_steps(pipeline, config, [1, 2])
    (batch,) = stored(pipeline)
    results = Results(batch.results.rollouts[:1], batch.results.scores[:1])
    rollout.version = 2
    other = StoredBatch(batch.queued, results)
    pipeline.restore(config, pipeline.state_after(2), [other], LAST_STEP)
    assert pipeline.notice == (
        "the responses of step 3 and later ones are generated again with the weights after step 2: "
        "they are 1, and a step has 2"
    )
    assert make_steps(pipeline, config, [3, 4]) == [(3, 2), (4, 2)]


def test_a_batch_is_held_without_waiting_only_if_all_its_calls_have_ended() -> None:
    pipeline = make_pipeline()
    pipeline.fill(config_with(1), ROLES, 1, LAST_STEP)
    batch = pipeline.queue[0]
    assert not batch.can_be_held()
    batch.generated.rollouts.call.has = True
    assert not batch.can_be_held(), "its scores are missing"
    batch.generated.scores.call.has = True
    assert batch.can_be_held()
    assert batch.hold().results.scores.batch["scores"].tolist() == [1.0, 1.0]


class SlowFuture(FakeFuture):
    """The result of a call that does not end."""

    def get(self, timeout_s: float | None = None, keys: Any = None) -> Any:
        raise WorkerError(f"reward.compute_scores on pool has not ended after {timeout_s:g} s")


def test_waiting_for_a_queue_ends_with_a_line_that_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = make_pipeline()
    pipeline.fill(config_with(1), ROLES, 1, LAST_STEP)
    batch = pipeline.queue[1]
    batch.generated = replace(batch.generated, scores=SlowFuture(batch.prompts))
    monkeypatch.setattr(queue, "HOLD_TIMEOUT_S", 0.0)
    with pytest.raises(WorkerError) as caught:
        batch.hold()
    assert caught.value.problems == (
        "the responses and scores of step 2 belong to a state that is saved, and "
        "reward.compute_scores on pool has not ended after 0 s",
    )


def test_a_lost_result_is_no_error_as_long_as_nobody_needs_it() -> None:
    pipeline = make_pipeline()
    pipeline.fill(config_with(0), ROLES, 1, LAST_STEP)
    (batch,) = pipeline.queue
    slow = SlowFuture(batch.prompts)
    slow.call.has = batch.generated.rollouts.call.has = True
    batch.generated = replace(batch.generated, scores=slow)
    assert not batch.can_be_held()


def test_a_state_whose_queue_has_gaps_is_refused() -> None:
    pipeline = make_pipeline()
    make_steps(pipeline, config_with(1), [1, 2])
    state = pipeline.state_after(2)
    content = state.model_dump()
    content["queue"] = [QueuedStep(step=4, data={}).model_dump()]
    with pytest.raises(ValueError, match="does not begin with the next step"):
        type(state).model_validate(content)
    content["queue"] = [{"step": 3, "data": {}}, {"step": 5, "data": {}}]
    with pytest.raises(ValueError, match="do not follow each other"):
        type(state).model_validate(content)


# Steps of the user


def one_function(*arguments: Any) -> Any:
    """A step that cannot be divided."""


def learned_from_pair(config: Any, roles: Any, estimator: Any, pair: Any) -> Any:
    return learn_from(config, roles, estimator, pair[0])


pair_step: Step[Any] = Step(lambda *arguments: (generate(*arguments), 1), learned_from_pair)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("one_function", "a step that is one function cannot generate ahead"),
        ("pair_step", "its first phase returns a tuple, and algorithm.max_staleness=1 needs a"),
    ],
)
def test_a_step_that_cannot_generate_ahead_is_refused_on_paper(name: str, problem: str) -> None:
    step = f"trainer.step={__name__}:{name}"
    with pytest.raises(ConfigError, match=re.escape(problem)):
        check_step(config_with(1, step))
    check_step(config_with(0, step))


def test_a_step_whose_prompts_are_not_those_of_the_data_is_refused() -> None:
    rollout = Rollout()

    def generate_from_others(config: Any, roles: Any, prompts: DataProto, number: int) -> Any:
        return rollout.generate(config, roles, prompts.select(), number)

    step: Step[Any] = Step(generate_from_others, rollout.learn)
    pipeline = Pipeline(step, make_pipeline()._estimator, Numbers())
    with pytest.raises(ConfigError, match="its first phase returns other prompts than it got"):
        pipeline.fill(config_with(1), ROLES, 1, LAST_STEP)
    pipeline.fill(config_with(0), ROLES, 1, LAST_STEP)


def test_a_synchronous_step_in_one_function_generates_what_waits_again() -> None:
    pipeline = make_pipeline()
    make_steps(pipeline, config_with(1), [1, 2])
    state, batches = pipeline.state_after(2), stored(pipeline)
    undivided = Pipeline(in_one_function(one_function), pipeline._estimator, pipeline._prompts)
    undivided.restore(config_with(0), state, batches, LAST_STEP)
    assert undivided.queue == ()
    assert undivided.state_after(2).data == {"next": 2}
    assert undivided.notice is not None and "in one function" in undivided.notice


def test_the_built_in_steps_can_generate_ahead() -> None:
    for words in ("", "algorithm.adv_estimator=remax"):
        config = config_with(2, *words.split())
        assert step_of(config).has_two_phases
        check_step(config)
