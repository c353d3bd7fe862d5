"""All metrics of a real run: they are documented, and a validation with several responses has
verl's names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from train_helpers import SPLIT, small_keys, train

from rolepool.config import load_config
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.data.demo import Demo
from rolepool.data.rewards import NUMBERS, PRED
from rolepool.data.tokenizer import load_tokenizer
from rolepool.protocol import DataProto, ragged
from rolepool.roles.rule_reward import RuleReward
from rolepool.roles.setups import RuleRewardSetup

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    letters = solution_str.split()
    is_right = letters[:1] == ground_truth.split()[:1]
    return {"score": 2.0 * is_right - 1, "acc": is_right, "pred": letters[0] if letters else None}
"""


def documented(root: Path) -> list[re.Pattern[str]]:
    """The names in the table of docs/training.md. `{a,b}` is a choice, NAME any text, and @N a
    number."""
    section = (
        (root / "docs" / "training.md")
        .read_text(encoding="utf-8")
        .split("\n## Metrics\n")[1]
        .split("\n## ")[0]
    )
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [
        re.compile(form)
        for cell in cells
        for name in re.findall("`([^`]+)`", cell)
        for form in forms(name)
    ]


def forms(name: str) -> Iterator[str]:
    parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", name)]
    for choice in product(*parts):
        yield re.sub("SOURCE|NAME", ".+", re.sub("@[nN]", r"@\\d+", "".join(choice)))


@pytest.mark.slow
def test_every_metric_of_a_run_is_documented(demo: Demo, tmp_path: Path, root: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
    keys = [
        f"custom_reward_function.path={tmp_path / 'mine.py'}",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
    ]
    train(demo, tmp_path / "run", *SPLIT, *keys)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    names = {name for row in rows for name in row} - {"step"}
    known = documented(root)
    assert sorted(name for name in names if not any(form.fullmatch(name) for form in known)) == []
    of_step = next(row for row in rows if "timing_s/step" in row)
    assert of_step["timing_per_token_ms/gen"] == pytest.approx(
        of_step["timing_s/gen"] * 1000 / (32 * of_step["response_length/mean"])
    )
    assert (
        of_step["global_seqlen/mean"] == of_step["perf/total_num_tokens"]
    )  # the actor has one rank
    memory = [of_step[f"perf/{name}_gb"] for name in ("max_memory_reserved", "cpu_memory_used")]
    assert all(0.01 < number < 10_000 for number in memory)

    validation = next(row for row in rows if "timing_s/testing" in row)
    matches = {
        re.fullmatch("val-core/(.+)/acc/mean@4", name): value for name, value in validation.items()
    }
    ((source, mean),) = [(match[1], value) for match, value in matches.items() if match]
    core = {
        name.removeprefix(f"val-core/{source}/acc/")
        for name in validation
        if name.startswith("val-core/")
    }
    assert core == {"mean@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std"}
    aux = {
        f"acc/{kind}@2/{what}" for kind, what in product(("best", "worst", "maj"), ("mean", "std"))
    }
    aux |= {f"acc/worst@4/{what}" for what in ("mean", "std")} | {"acc/std@4"}
    found = {
        name.removeprefix(f"val-aux/{source}/")
        for name in validation
        if name.startswith("val-aux/")
    }
    assert aux | {"reward/mean@4", "reward/best@4/mean"} <= found
    assert validation[f"val-aux/{source}/reward/mean@4"] == pytest.approx(2 * mean - 1)
    best = [
        validation[f"{where}/{source}/acc/best@{n}/mean"]
        for n, where in ((2, "val-aux"), (4, "val-core"))
    ]
    assert mean <= best[0] <= best[1]


def test_rows_with_different_numbers_can_be_scored_by_different_processes(
    demo: Demo, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        REWARD.replace("    return {", "    return letters == [] or {"), encoding="utf-8"
    )
    config = load_config(
        [], small_keys(demo, tmp_path, f"custom_reward_function.path={tmp_path / 'mine.py'}")
    ).config
    letter = load_tokenizer(PolicyModelConfig(path=str(demo.model))).encode(
        "b", add_special_tokens=False
    )
    role = RuleReward(config, RuleRewardSetup())
    scored = []
    for response in (letter, []):
        tokens = {
            "input_ids": ragged(
                torch.tensor([*letter, *response]), torch.tensor([1 + len(response)])
            )
        }
        sizes = {
            "num_prompt_tokens": torch.tensor([1]),
            "num_response_tokens": torch.tensor([len(response)]),
        }
        names = {
            "data_source": "demo",
            "reward_model": {"ground_truth": "b"},
            "extra_info": {},
            "origin": "",
            "uid": "",
            "raw_prompt": "b",
        }
        columns = {name: np.fromiter([value], object) for name, value in names.items()}
        scored.append(
            role.compute_scores(DataProto.from_dict({**tokens, **sizes}, non_tensors=columns))
        )
    joined = DataProto.concat(scored)
    assert joined.batch["scores"].tolist() == [1, 1]
    assert joined.non_tensor_batch[NUMBERS].tolist() == [{"acc": 1}, {}]
    assert joined.non_tensor_batch[PRED].tolist() == ["b", None]
