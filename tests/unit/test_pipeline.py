"""The queue between the two phases of a step, and what of it is in the state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rolepool.config import load_config
from rolepool.trainer.pipeline import Pipeline
from rolepool.trainer.recorder import CallRecorder
from rolepool.trainer.step import Step

CONFIG = load_config([]).config


class Numbers:
    """Prompts that are numbers; two of them are an epoch."""

    def __init__(self) -> None:
        self.next = 0

    @property
    def epoch(self) -> int:
        return self.next // 2

    def next_batch(self) -> Any:
        self.next += 1
        return self.next

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class KLController:
    value = 0.5

    def restore(self, value: float) -> None:
        self.value = value


@pytest.fixture
def calls() -> list[str]:
    """What the phases of steps have done."""
    return []


@pytest.fixture
def pipeline(calls: list[str]) -> Pipeline:
    def generate(config: Any, roles: Any, prompts: Any, number: int) -> int:
        calls.append(f"generate {number} from {prompts}")
        return number

    def learn(config: Any, roles: Any, estimator: Any, number: int) -> Any:
        calls.append(f"learn {number}")
        estimator.kl_controller.value += 1
        return number

    estimator: Any = SimpleNamespace(kl_controller=KLController())
    step: Step[Any] = Step(generate, learn)
    return Pipeline(step, estimator, Numbers())


ROLES: Any = SimpleNamespace(recorder=CallRecorder())


def test_learn_takes_the_oldest_batch_with_the_epoch_it_was_drawn_in(
    pipeline: Pipeline, calls: list[str]
) -> None:
    for number in (1, 2, 3):
        pipeline.generate(CONFIG, ROLES, number)
    running = [pipeline.learn(CONFIG, ROLES) for _ in range(3)]
    assert calls[3:] == ["learn 1", "learn 2", "learn 3"]
    assert [step.epoch for step in running] == [0, 0, 1]
    assert [step.prompts for step in running] == [1, 2, 3]


def test_what_waits_in_the_queue_is_generated_again_after_a_restore(
    pipeline: Pipeline, calls: list[str]
) -> None:
    pipeline.generate(CONFIG, ROLES, 1)
    pipeline.generate(CONFIG, ROLES, 2)
    pipeline.learn(CONFIG, ROLES)
    state = pipeline.state_after(1)
    assert state.data == {"next": 1}, "the second batch was not learned from"
    assert state.kl_controller == {"value": 1.5}
    pipeline.learn(CONFIG, ROLES)
    pipeline.generate(CONFIG, ROLES, 3)

    pipeline.restore(state)
    calls.clear()
    pipeline.generate(CONFIG, ROLES, 2)
    pipeline.learn(CONFIG, ROLES)
    assert calls == ["generate 2 from 2", "learn 2"]
    assert pipeline.state_after(2).kl_controller == {"value": 2.5}


def test_with_an_empty_queue_the_position_is_that_of_the_next_batch(pipeline: Pipeline) -> None:
    pipeline.generate(CONFIG, ROLES, 1)
    pipeline.learn(CONFIG, ROLES)
    assert pipeline.state_after(1).data == {"next": 1}
