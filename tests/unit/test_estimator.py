"""What the driver waits for between scoring and updating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolepool.config import load_config
from rolepool.protocol import DataProto
from rolepool.trainer.advantages import Estimated, Estimator, describe

ROWS, LENGTH = 4, 3


class Future:
    """A result that is there, and notes that it was asked for."""

    calls = ()

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.batch = DataProto.from_dict(tensors)
        self.was_fetched = False

    def get(self, keys: Any = None) -> DataProto:
        self.was_fetched = True
        return self.batch


def estimated(
    tmp_path: Path, *words: str, baselines: torch.Tensor | None = None
) -> tuple[Estimated, dict[str, Future]]:
    file = tmp_path / "empty.yaml"
    file.write_text("")
    config = load_config([str(file)], list(words)).config
    numbers = torch.arange(ROWS * LENGTH, dtype=torch.float32).view(ROWS, LENGTH)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    futures = {
        "rollouts": Future({"response_mask": mask, "attention_mask": torch.cat([mask, mask], dim=1)}),
        "scores": Future({"token_level_scores": numbers}),
        "values": Future({"values": numbers / 10}),
        "old": Future({"old_log_probs": -numbers, "entropys": numbers}),
        "ref": Future({"ref_log_prob": -2 * numbers}),
    }
    prompts = DataProto.from_dict(non_tensors={"uid": np.arange(ROWS)})
    of_greedy = Future({"token_level_scores": baselines}) if baselines is not None else None
    made = Estimator(config).estimate(
        prompts,
        futures["rollouts"],  # type: ignore[arg-type]
        futures["scores"],  # type: ignore[arg-type]
        futures["values"],  # type: ignore[arg-type]
        [futures["old"], futures["ref"]] if config.algorithm.use_kl_in_reward else [],  # type: ignore[list-item]
        of_greedy,  # type: ignore[arg-type]
    )
    return made, futures


@pytest.mark.parametrize("with_penalty", [False, True])
def test_a_kl_penalty_changes_the_rewards_and_is_reported(with_penalty: bool, tmp_path: Path) -> None:
    result, futures = estimated(tmp_path, f"algorithm.use_kl_in_reward={str(with_penalty).lower()}")
    assert futures["old"].was_fetched == with_penalty
    is_penalized = not torch.equal(result.batch.batch["token_level_rewards"], result.batch.batch["token_level_scores"])
    assert is_penalized == with_penalty
    assert ("actor/reward_kl_penalty" in result.metrics) == with_penalty


def test_a_batch_is_described_by_what_was_estimated_and_its_entropies(tmp_path: Path) -> None:
    result, futures = estimated(tmp_path)
    metrics = describe(result, futures["old"].get().batch["entropys"])
    assert metrics["actor/entropy"] == pytest.approx(5.5)
    assert metrics["critic/score/mean"] == pytest.approx(66 / ROWS)
    assert metrics["critic/values/max"] == pytest.approx(1.1)
    assert metrics["perf/total_num_tokens"] == 2 * ROWS * LENGTH
    assert result.lengths == [2 * LENGTH] * ROWS


def test_the_greedy_score_of_a_prompt_is_the_baseline_of_all_its_samples(tmp_path: Path) -> None:
    of_two_prompts = torch.tensor([[0.0, 10.0, 0.0], [0.0, 0.0, 20.0]])
    result, _ = estimated(tmp_path, "algorithm.adv_estimator=remax", baselines=of_two_prompts)
    taken_off = result.batch.batch["returns"] - result.batch.batch["advantages"]
    assert taken_off[:, 0].tolist() == [10, 10, 20, 20]
