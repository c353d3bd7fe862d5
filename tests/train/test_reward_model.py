"""The reward-model path: training on the scores of a Hugging Face sequence classifier, from the demo's own recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from rolepool.config import LoadedConfig, load_config
from rolepool.data.demo import Demo, make_demo
from rolepool.data.prompts import load_tokenizer
from rolepool.placement import Role
from rolepool.protocol import DataProto, ragged
from rolepool.roles.model_role import Setup
from rolepool.roles.reward_model import RewardModel
from rolepool.trainer.loop import Trainer
from rolepool.trainer.step import StepCalls, ppo_step

RECIPE = str(Path(__file__).parent.parent.parent / "recipes" / "demo_reward_model.yaml")
NUM_STEPS = 10
FLOAT_NOISE = 1e-5


class Scored(NamedTuple):
    """The texts of one step, prompt and response as one, and the scores that advantages were estimated from."""

    texts: list[str]
    scores: torch.Tensor


class Course(NamedTuple):
    """What a run did: its placement, what it scored in each step, and its rows of metrics."""

    pool_of: dict[Role, str]
    steps: list[Scored]
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return make_demo(tmp_path_factory.mktemp("demo") / "data")


@pytest.fixture(scope="module")
def tokenizer(demo: Demo) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(demo.model))


def recipe(demo: Demo, *overrides: str) -> LoadedConfig:
    """The recipe on this demo's files."""
    files = [
        f"data.train_files={demo.train_file}",
        "data.val_files=[]",
        "trainer.test_freq=-1",
        f"actor_rollout_ref.model.path={demo.model}",
        f"reward_model.model.path={demo.reward_model}",
    ]
    return load_config([RECIPE], [*files, *overrides])


def texts_of(batch: Any, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [tokenizer.decode(ids) for ids in batch["input_ids"].unbind()]


def direct_scores(
    texts: list[str], demo: Demo, tokenizer: PreTrainedTokenizerBase, last: int | None = None
) -> torch.Tensor:
    """What the classifier gives for each text (or for its last tokens), called as anyone would, a text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(demo.reward_model)
    all_ids = [tokenizer(text, return_tensors="pt")["input_ids"][:, -(last or 0) :] for text in texts]
    with torch.no_grad():
        return torch.stack([model(ids).logits[0, 0] for ids in all_ids])


@pytest.fixture(scope="module")
def course(demo: Demo, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("run")
    steps: list[Scored] = []

    def watched_step(*arguments: Any) -> StepCalls:
        step = ppo_step(*arguments)
        rollouts = step.calls["gen"][0].get(keys=["input_ids"])
        scores = step.estimated.tensors["token_level_scores"].sum(dim=1)
        steps.append(Scored(texts_of(rollouts.batch, tokenizer), scores))
        return step

    keys = [f"trainer.total_training_steps={NUM_STEPS}", f"trainer.default_local_dir={folder}", "trainer.save_freq=-1"]
    loaded = recipe(demo, *keys)
    trainer = Trainer(loaded)
    trainer.step = watched_step
    trainer.run()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Course(dict(trainer.plan.roles), steps, metrics)


def test_the_recipe_puts_critic_and_reward_model_on_the_second_pool(course: Course) -> None:
    assert course.pool_of[Role.RewardModel] == course.pool_of[Role.Critic] != course.pool_of[Role.Actor]


def test_the_scores_in_training_are_those_of_the_classifier_called_directly(
    course: Course, demo: Demo, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert len(course.steps) == NUM_STEPS
    for step, row in zip(course.steps, course.metrics, strict=True):
        assert len(set(step.texts)) > len(step.texts) // 2
        torch.testing.assert_close(step.scores, direct_scores(step.texts, demo, tokenizer), rtol=0, atol=FLOAT_NOISE)
        assert row["critic/score/mean"] == pytest.approx(float(step.scores.mean()), abs=FLOAT_NOISE)


def test_training_raises_the_score_of_the_reward_model(course: Course) -> None:
    """By more than half of how far the scores of one batch are spread at first; seeds differ, and give 1.0 to 1.4."""
    first, last = course.steps[0].scores, course.steps[-1].scores
    assert last.mean() > first.mean() + first.std() / 2


# The role alone


PROMPT, RESPONSE, ROWS = 8, 6, 12

CUTS = {
    "one pass": [],
    "passes of one row": ["reward_model.micro_batch_size_per_gpu=1"],
    "passes of five rows": ["reward_model.micro_batch_size_per_gpu=5"],
    "passes by tokens": ["reward_model.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=20"],
}


def ragged_batch() -> DataProto:
    """Prompts and responses of many lengths."""
    num_prompt, num_response = 1 + torch.arange(ROWS) % PROMPT, 1 + torch.arange(ROWS) * 5 % RESPONSE
    lengths = num_prompt + num_response
    ids = torch.randint(4, 12, (int(lengths.sum()),), generator=torch.Generator().manual_seed(3))
    return DataProto.from_dict({"input_ids": ragged(ids, lengths), "num_prompt_tokens": num_prompt})


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("max_length", [None, 5])
def test_scores_do_not_depend_on_how_passes_are_cut(
    demo: Demo, tokenizer: PreTrainedTokenizerBase, cut: str, max_length: int | None
) -> None:
    limit = [] if max_length is None else [f"reward_model.max_length={max_length}"]
    assert tokenizer.pad_token_id is not None
    role = RewardModel(recipe(demo, *CUTS[cut], *limit).config, Setup(pad_token_id=tokenizer.pad_token_id))
    batch = ragged_batch()
    expected = direct_scores(texts_of(batch.batch, tokenizer), demo, tokenizer, last=max_length)
    scores = role.compute_scores(batch).batch["scores"]
    torch.testing.assert_close(scores, expected, rtol=0, atol=FLOAT_NOISE)


def test_a_limit_on_length_changes_scores(demo: Demo, tokenizer: PreTrainedTokenizerBase) -> None:
    """Else the test above would not see whether it is acted on."""
    texts = texts_of(ragged_batch().batch, tokenizer)
    whole, short = (direct_scores(texts, demo, tokenizer, last=last) for last in (None, 5))
    longer = torch.tensor([len(text.split()) > 5 for text in texts])
    assert ((whole - short).abs() > FLOAT_NOISE).eq(longer).all()
