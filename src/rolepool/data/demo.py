"""The embedded demo: a task, a tokenizer and a small transformer with random weights, created
offline on first use.

The task is next letters: a prompt is a few letters, and the answer is the next letter of each: `c a
h b =` asks for `d b a c`. The reward is the fraction of correct letters, so that even a random
policy earns something it can learn from; the best answer that ignores the prompt earns 1 in 8.
Validation prompts do not occur in training.

Owns the folders that it writes. A folder is complete or does not exist. Its content depends only on
this file and the files in `demo_model`.
"""

import itertools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.utils import logging as transformers_logging

from rolepool.config.sources import DEMO_MARKER
from rolepool.errors import ConfigError

SEED = 1
LETTERS = "abcdefgh"
NUM_LETTERS_PER_PROMPT = 4
NUM_VAL_PROMPTS = 256
DATA_SOURCE = "position_match/next_letter"
MODEL_FILES = Path(__file__).with_name("demo_model")
"""The config of the models, which learn twice as fast with this initializer_range as with the usual
0.02, and their tokenizer: one token for each letter. `?` stands for any other word; it is a normal
token, not a special one."""


class Demo:
    """The paths of the demo's files: model and reward model, each with the tokenizer, and the
    prompts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.reward_model = folder / "reward_model"
        self.train_file = folder / "train.jsonl"
        self.val_file = folder / "val.jsonl"


def make_demo(folder: str | os.PathLike[str]) -> Demo:
    """The demo in this folder. Creates it if it does not exist, in a temporary folder that is then
    renamed."""
    demo = Demo(Path(folder))
    place = demo.folder
    marker = demo.folder / DEMO_MARKER
    if marker.exists():
        return demo
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(
            f"{place}: exists and was not made by rolepool; move it, or name another folder for the demo"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{place.name}.", suffix=".tmp", dir=place.parent
    ) as temporary:
        new = Demo(Path(temporary) / "new")
        new.folder.mkdir()
        _write(new)
        try:
            new.folder.rename(place)
        except OSError:
            if not marker.exists():  # otherwise another process has made the same folder
                raise
    return demo


def next_letters(letters: str) -> str:
    """The correct answer to letters separated by spaces."""
    answer: list[str] = []
    for letter in letters.split():
        place = LETTERS.index(letter) + 1
        answer.append(LETTERS[place % len(LETTERS)])
    return " ".join(answer)


def _write(demo: Demo) -> None:
    prompts: list[str] = []
    for letters in itertools.product(LETTERS, repeat=NUM_LETTERS_PER_PROMPT):
        prompts.append(" ".join(reversed(letters)))
    random.Random(SEED).shuffle(prompts)
    val_prompts = prompts[:NUM_VAL_PROMPTS]
    train_prompts = prompts[NUM_VAL_PROMPTS:]
    _write_rows(demo.val_file, val_prompts)
    _write_rows(demo.train_file, train_prompts)
    _write_model(demo.model, LlamaForCausalLM)
    _write_model(demo.reward_model, LlamaForSequenceClassification, num_labels=1)
    marker = demo.folder / DEMO_MARKER
    marker.write_text("{}\n", encoding="utf-8")


def _write_rows(file: Path, prompts: Sequence[str]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        for index, letters in enumerate(prompts):
            message = {"role": "user", "content": letters}
            truth = next_letters(letters)
            row = {
                "data_source": DATA_SOURCE,
                "prompt": [message],
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": file.stem, "index": index},
            }
            lines.write(json.dumps(row) + "\n")


def _write_model(folder: Path, model_class: Any, **config_keys: Any) -> None:
    folder.mkdir()
    for file in MODEL_FILES.iterdir():
        # Without its permissions, because an installed file may be read-only.
        shutil.copyfile(file, folder / file.name)
    config = LlamaConfig.from_pretrained(folder, **config_keys)
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):  # the caller's random state does not change
        torch.manual_seed(SEED)
        model_class(config).save_pretrained(folder)
