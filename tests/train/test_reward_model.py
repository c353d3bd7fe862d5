"""The reward-model path: training on the scores of a Hugging Face sequence classifier, from the
demo's own recipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rolepool.config import LoadedConfig, load_config
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.data.demo import Demo
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import ConfigError, DataError
from rolepool.placement import Role
from rolepool.protocol import DataProto, ragged
from rolepool.roles.reward_model import RewardModel
from rolepool.roles.setups import RewardModelSetup
from rolepool.trainer.loop import Trainer
from rolepool.trainer.step import StepCalls, ppo_step

RECIPE = str(Path(__file__).parent.parent.parent / "recipes" / "demo_reward_model.yaml")
NUM_STEPS = 10
FLOAT_NOISE = 1e-5


class Scored(NamedTuple):
    """The texts of one step, prompt and response as one, and the scores that advantages were
    estimated from."""

    texts: list[str]
    scores: torch.Tensor


class Course(NamedTuple):
    """What a run did: its placement, what it scored in each step, and its rows of metrics."""

    pool_of: dict[Role, str]
    steps: list[Scored]
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def tokenizer(demo: Demo) -> PreTrainedTokenizerBase:
    return load_tokenizer(PolicyModelConfig(path=str(demo.model)))


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
    """What the classifier gives for each text (or for its last tokens), called as anyone would, a
    text at a time. The score is at the last token, even if the policy has written a pad token
    there."""
    model = AutoModelForSequenceClassification.from_pretrained(demo.reward_model)
    model.config.pad_token_id = None
    all_ids = [
        tokenizer(text, return_tensors="pt")["input_ids"][:, -(last or 0) :] for text in texts
    ]
    with torch.no_grad():
        return torch.stack([model(ids).logits[0, 0] for ids in all_ids])


WATCHED: list[tuple[Any, torch.Tensor]] = []
"""The token ids and scores of each step, which `watched_step` adds."""


def watched_step(*arguments: Any) -> StepCalls:
    """A step that a user writes as one function."""
    step = ppo_step(*arguments)
    rollouts: Any = step.generation
    scores = step.estimated.tensors["token_level_scores"].sum(dim=1)
    WATCHED.append((rollouts.get(keys=["input_ids"]).batch, scores))
    return step


@pytest.fixture(scope="module")
def course(
    demo: Demo,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
    one_ray: None,
) -> Course:
    folder = tmp_path_factory.mktemp("run")
    keys = [
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.default_local_dir={folder}",
        "trainer.save_freq=-1",
    ]
    loaded = recipe(demo, *keys, f"trainer.step={__name__}:watched_step")
    trainer = Trainer(loaded)
    WATCHED.clear()
    trainer.run()
    steps = [Scored(texts_of(batch, tokenizer), scores) for batch, scores in WATCHED]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Course(dict(trainer.parts.plan.roles), steps, metrics)


def test_the_recipe_puts_critic_and_reward_model_on_the_second_pool(course: Course) -> None:
    assert (
        course.pool_of[Role.RewardModel]
        == course.pool_of[Role.Critic]
        != course.pool_of[Role.Actor]
    )


def test_the_scores_in_training_are_those_of_the_classifier_called_directly(
    course: Course, demo: Demo, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert len(course.steps) == NUM_STEPS
    for step, row in zip(course.steps, course.metrics, strict=True):
        assert len(set(step.texts)) > len(step.texts) // 2
        assert row["critic/score/mean"] == pytest.approx(float(step.scores.mean()), abs=FLOAT_NOISE)
    for step in (course.steps[0], course.steps[-1]):
        torch.testing.assert_close(
            step.scores, direct_scores(step.texts, demo, tokenizer), rtol=0, atol=FLOAT_NOISE
        )


def test_training_raises_the_score_of_the_reward_model(course: Course) -> None:
    """By more than half of how far the scores of one batch are spread at first; seeds differ, and
    give 1.0 to 1.4."""
    first, last = course.steps[0].scores, course.steps[-1].scores
    assert last.mean() > first.mean() + first.std() / 2


# The role alone


PROMPT, RESPONSE, ROWS = 8, 6, 12

CUTS = {
    "one pass": [],
    "passes of one row": ["reward_model.micro_batch_size_per_gpu=1"],
    "passes of five rows": ["reward_model.micro_batch_size_per_gpu=5"],
    "passes by tokens": [
        "reward_model.use_dynamic_bsz=true",
        "critic.ppo_max_token_len_per_gpu=20",
    ],
}


def ragged_batch() -> DataProto:
    """Prompts and responses of many lengths."""
    num_prompt, num_response = (
        1 + torch.arange(ROWS) % PROMPT,
        1 + torch.arange(ROWS) * 5 % RESPONSE,
    )
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
    role = RewardModel(
        recipe(demo, *CUTS[cut], *limit).config,
        RewardModelSetup(pad_token_id=tokenizer.pad_token_id),
    )
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


# A reward model with a tokenizer of its own


OWN_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> {% endfor %}"
OWN_WORDS = ["<end>", "?", "<user>", "<assistant>", "=", *reversed("abcdefgh"), "x", "y", "z"]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model in which words have other numbers. Its chats end with the token that it pads
    with."""
    folder = tmp_path_factory.mktemp("other") / "reward_model"
    words = Tokenizer(
        WordLevel({word: number for number, word in enumerate(OWN_WORDS)}, unk_token="?")
    )
    words.pre_tokenizer = WhitespaceSplit()
    own = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    own.chat_template = OWN_TEMPLATE
    own.save_pretrained(folder)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(OWN_WORDS), num_labels=1, max_position_embeddings=64, pad_token_id=0, **sizes
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def scores_of_texts(folder: Path, texts: list[str], last: int) -> torch.Tensor:
    """Text, tokenizer, model: one text at a time, so that nothing is padded and the last token is
    scored."""
    own, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForSequenceClassification.from_pretrained(folder),
    )
    model.config.pad_token_id = None
    with torch.no_grad():
        all_ids = [
            own(text, return_tensors="pt", add_special_tokens=False)["input_ids"][:, -last:]
            for text in texts
        ]
        return torch.stack([model(ids).logits[0, 0] for ids in all_ids])


ANSWERS = ["d b", "a", "h h h <eos>", "c <eos>"]
PLAIN = ["a b =", "c =", "a a a =", "b ="]


@pytest.mark.parametrize("max_length", [None, 4])
@pytest.mark.parametrize("rows_at_once", ["null", "1", "3"])
def test_texts_are_tokenized_again_for_a_reward_model_with_another_tokenizer(
    demo: Demo,
    tokenizer: PreTrainedTokenizerBase,
    other_model: Path,
    rows_at_once: str,
    max_length: int | None,
) -> None:
    chats = [[{"role": "user", "content": prompt.removesuffix(" =")}] for prompt in PLAIN]
    all_ids = [
        (tokenizer(prompt)["input_ids"], tokenizer(answer)["input_ids"])
        for prompt, answer in zip(PLAIN, ANSWERS, strict=True)
    ] * 2
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in all_ids])
    ids = torch.tensor([one for halves in all_ids for half in halves for one in half])
    batch = DataProto.from_dict(
        {
            "input_ids": ragged(ids, lengths),
            "num_prompt_tokens": torch.tensor([len(prompt) for prompt, _ in all_ids]),
        },
        non_tensors={"raw_prompt": [*chats, *PLAIN], "origin": [f"line {row}" for row in range(8)]},
    )
    limit = [] if max_length is None else [f"reward_model.max_length={max_length}"]
    keys = [
        f"reward_model.model.path={other_model}",
        f"reward_model.micro_batch_size_per_gpu={rows_at_once}",
        *limit,
    ]
    scores = (
        RewardModel(recipe(demo, *keys).config, RewardModelSetup(pad_token_id=0))
        .compute_scores(batch)
        .batch["scores"]
    )
    answers = [answer.removesuffix(" <eos>") for answer in ANSWERS]
    texts = [
        f"<user> {p.removesuffix(' =')} <end> <assistant> {a} <end>"
        for p, a in zip(PLAIN, answers, strict=True)
    ]
    texts += [f"{prompt} {answer}" for prompt, answer in zip(PLAIN, answers, strict=True)]
    expected = scores_of_texts(other_model, texts, last=max_length or 12)
    torch.testing.assert_close(scores, expected, rtol=0, atol=FLOAT_NOISE)


def test_what_the_reward_model_cannot_read_is_one_line_before_the_start(
    demo: Demo, other_model: Path, tmp_path: Path
) -> None:
    def problem(folder: Path, *keys: str) -> str:
        with pytest.raises((ConfigError, DataError)) as caught:
            Trainer(recipe(demo, f"reward_model.model.path={folder}", *keys))
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    bare, small, mute = (
        shutil.copytree(other_model, tmp_path / name) for name in ("bare", "small", "mute")
    )
    for file in bare.glob("tokenizer*"):
        file.unlink()
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    LlamaForSequenceClassification(
        LlamaConfig(vocab_size=5, num_labels=1, **sizes)
    ).save_pretrained(small)
    Trainer(recipe(demo, f"reward_model.model.path={bare}"))  # it has more tokens than the policy
    as_is = "reward_model.model.input_tokenizer=null"
    start = f"reward_model.model.path={small}: it has 5 tokens, fewer than the policy (12)"
    said = problem(small, as_is)
    assert said.startswith(start) and said.endswith(
        "; do not set reward_model.model.input_tokenizer=null"
    )
    for file in small.glob("tokenizer*"):
        file.unlink()
    said = problem(small)
    assert said.startswith(start) and said.endswith("; add its tokenizer to its folder")
    for file in mute.glob("chat_template*"):
        file.unlink()
    assert f"the chat template of {mute} cannot write this chat" in problem(mute)


@pytest.mark.slow
def test_training_with_another_tokenizer_scores_whole_chats_and_writes_all_samples(
    demo: Demo, other_model: Path, tmp_path: Path
) -> None:
    folders = {"rollout": tmp_path / "deep" / "rollouts", "validation": tmp_path / "validation"}
    keys = [
        f"reward_model.model.path={other_model}",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        f"data.val_files={demo.val_file}",
        "data.val_max_samples=80",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=2",
        "trainer.log_val_generations=3",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        *(f"trainer.{name}_data_dir={folder}" for name, folder in folders.items()),
    ]
    Trainer(recipe(demo, *keys)).run()
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    means = {row["step"]: row["critic/score/mean"] for row in metrics if "critic/score/mean" in row}
    assert {
        name: sorted(file.name for file in folder.iterdir()) for name, folder in folders.items()
    } == {
        "rollout": ["1.jsonl", "2.jsonl"],
        "validation": ["0.jsonl", "2.jsonl"],
    }
    for step in (1, 2):
        lines = (folders["rollout"] / f"{step}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == 16
        assert all(
            {"input", "output", "gts", "score", "step"} <= {*one} and one["step"] == step
            for one in samples
        )
        texts = [
            f"<user> {one['input'].removesuffix(' =')} <end> <assistant> {one['output']} <end>"
            for one in samples
        ]
        expected = scores_of_texts(other_model, texts, last=12)
        torch.testing.assert_close(
            torch.tensor([one["score"] for one in samples]), expected, rtol=0, atol=FLOAT_NOISE
        )
        assert means[step] == pytest.approx(float(expected.mean()), abs=FLOAT_NOISE)
    assert len((folders["validation"] / "2.jsonl").read_text().splitlines()) == 80
    recorded = (tmp_path / "run" / "validation" / "step_000002.jsonl").read_text().splitlines()
    assert len(recorded) == 64 and {*json.loads(recorded[0])} == {
        "prompt",
        "response",
        "ground_truth",
        "score",
        "data_source",
    }
