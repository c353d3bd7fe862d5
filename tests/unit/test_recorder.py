"""The operation of a call: from the table of roles, or from the step, when the call is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rolepool.config import Config, load_config
from rolepool.placement.roles import Role
from rolepool.trainer.paper import PaperBatch
from rolepool.trainer.pipeline import Pipeline
from rolepool.trainer.recorder import CallRecorder
from rolepool.trainer.step import Roles, Step, in_one_function, learn, ppo_step, remax_step

REMAX = "algorithm.adv_estimator=remax actor_rollout_ref.actor.ppo_epochs=2"


class Calls:
    """The proxy of a role. Each call returns another future, and nothing is computed."""

    dp_size = 1

    def __init__(self, made: list[str], role: str) -> None:
        self._made = made
        self._role = role

    def __getattr__(self, method: str) -> Any:
        def call(*args: object, **kwargs: object) -> PaperBatch:
            self._made.append(f"{self._role}.{method}")
            return PaperBatch(frozenset({len(self._made) - 1}))

        return call


class Weights:
    def __init__(self, made: list[str]) -> None:
        self._made = made

    def send(self, version: int) -> Any:
        self._made.append("weights")
        return [PaperBatch(frozenset({len(self._made) - 1}))]

    def check(self) -> None: ...


class Prompts:
    epoch = 0

    def next_batch(self) -> Any:
        return PaperBatch()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: object) -> None: ...


def estimate(*inputs: object) -> SimpleNamespace:
    return SimpleNamespace(batch=PaperBatch(), lengths=())


ESTIMATOR: Any = SimpleNamespace(estimate=estimate)


@pytest.fixture
def made() -> list[str]:
    """All calls, as role and method."""
    return []


@pytest.fixture
def roles(made: list[str]) -> Roles:
    names = (Role.Actor, Role.Rollout, Role.Critic, Role.RewardModel)
    proxies: dict[str, Any] = {name: Calls(made, name) for name in names}
    return Roles(proxies, Weights(made))


def config_of(words: str = "") -> Config:
    return load_config([], words.split()).config


def calls_of(
    step: Step[Any], roles: Roles, made: list[str], words: str = ""
) -> dict[str, list[str]]:
    """The calls of a step by operation, as role and method."""
    pipeline = Pipeline(step, ESTIMATOR, Prompts())
    pipeline.generate(config_of(words), roles, 1)
    step_calls: Any = pipeline.learn(config_of(words), roles).calls
    calls: dict[str, list[str]] = {}
    for operation, futures in step_calls.calls.items():
        calls[operation] = [made[position] for future in futures for position in future.calls]
    return calls


def test_each_call_of_a_step_has_the_operation_of_its_role_and_method(
    roles: Roles, made: list[str]
) -> None:
    assert calls_of(ppo_step, roles, made) == {
        "gen": ["rollout.generate_sequences"],
        "reward": ["reward_model.compute_scores"],
        "values": ["critic.compute_values"],
        "old_log_prob": ["actor.compute_log_prob"],
        "update_critic": ["critic.update_critic"],
        "update_actor": ["actor.update_actor"],
        "update_weights": ["weights"],
    }


def test_the_step_says_which_calls_are_the_baseline_and_each_epoch_is_a_call(
    roles: Roles, made: list[str]
) -> None:
    calls = calls_of(remax_step, roles, made, REMAX)
    assert calls["gen"] == ["rollout.generate_sequences"]
    assert calls["baseline"] == ["rollout.generate_sequences", "reward_model.compute_scores"]
    assert calls["update_actor"] == ["actor.update_actor"] * 2


def test_a_step_in_one_function_may_name_calls_and_a_method_without_a_name_is_one(
    roles: Roles, made: list[str]
) -> None:
    def step(config: Any, roles: Any, estimator: Any, prompts: Any, number: int) -> Any:
        rollouts = roles.rollout.generate_sequences(prompts)
        roles.reward.compute_scores(rollouts)
        again = roles.reward.compute_scores(rollouts)
        roles.by_name["critic"].look_at(rollouts)
        return learn(
            config, roles, estimator, prompts, number, rollouts, again, calls={"style": [again]}
        )

    calls = calls_of(in_one_function(step), roles, made)
    assert calls["reward"] == ["reward_model.compute_scores"]
    assert calls["style"] == ["reward_model.compute_scores"]
    assert calls["look_at"] == ["critic.look_at"]


def test_a_call_that_was_not_noted_gets_the_name_that_the_step_gives_it(
    roles: Roles, made: list[str]
) -> None:
    elsewhere: Any = PaperBatch(frozenset({-1}))

    def step(config: Any, roles: Any, estimator: Any, prompts: Any, number: int) -> Any:
        rollouts = roles.rollout.generate_sequences(prompts)
        calls = {"archive": [elsewhere]}
        return learn(config, roles, estimator, prompts, number, rollouts, rollouts, calls=calls)

    pipeline = Pipeline(in_one_function(step), ESTIMATOR, Prompts())
    pipeline.generate(config_of(), roles, 1)
    calls = pipeline.learn(config_of(), roles).calls.calls
    assert [*calls["archive"]] == [elsewhere]


def test_calls_between_two_steps_belong_to_none(roles: Roles, made: list[str]) -> None:
    prompts: Any = PaperBatch()
    roles.rollout.generate_sequences(prompts, purpose="validate")
    roles.reward.compute_scores(prompts)
    calls = calls_of(ppo_step, roles, made)
    assert len(calls["gen"]) == len(calls["reward"]) == 1
    assert len(made) == 2 + sum(map(len, calls.values()))


def test_calls_of_a_step_that_waits_in_the_queue_stay_with_it(
    roles: Roles, made: list[str]
) -> None:
    pipeline = Pipeline(ppo_step, ESTIMATOR, Prompts())
    for number in (1, 2):
        pipeline.generate(config_of(), roles, number)
    steps: list[Any] = [pipeline.learn(config_of(), roles).calls for _ in range(2)]
    assert [[*step.calls["gen"][0].calls] for step in steps] == [[0], [2]]
    assert [len(step.calls["gen"]) for step in steps] == [1, 1]


def test_attributes_of_a_role_that_are_no_calls_are_its_own(roles: Roles) -> None:
    assert roles.actor.dp_size == 1
    recorder = CallRecorder()
    recorder.note("wait", 7)
    assert recorder.take() == []
