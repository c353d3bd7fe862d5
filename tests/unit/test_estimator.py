"""What the driver waits for between scoring and updating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolepool.config import load_config
from rolepool.protocol import DataProto, pad_ragged, ragged, unpad
from rolepool.protocol.columns import lengths_of
from rolepool.trainer.advantages import Estimated, Estimator, describe

ROWS, LENGTH, PROMPT = 4, 3, 2
LENGTHS = [3, 1, 3, 2]


class Future:
    """A result that is there, and notes that it was asked for."""

    calls = ()

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.batch = DataProto.from_dict(tensors)
        self.was_fetched = False

    def get(self, keys: Any = None) -> DataProto:
        self.was_fetched = True
        return (
            self.batch
            if keys is None
            else self.batch.select([key for key in keys if key in self.batch.batch])
        )


def estimated(
    tmp_path: Path, *words: str, baselines: torch.Tensor | None = None
) -> tuple[Estimated, dict[str, Future]]:
    file = tmp_path / "empty.yaml"
    file.write_text("")
    widths = ["data.max_prompt_length=4", f"data.max_response_length={LENGTH}"]
    config = load_config([str(file)], [*widths, *words]).config
    numbers = torch.arange(ROWS * LENGTH, dtype=torch.float32).view(ROWS, LENGTH)
    lengths = torch.tensor(LENGTHS)
    futures = {
        "rollouts": Future(
            {"num_prompt_tokens": torch.full((ROWS,), PROMPT), "num_response_tokens": lengths}
        ),
        "scores": Future({"scores": numbers[:, 0]}),
        "values": Future({"values": unpad(numbers / 10, lengths)}),
        "old": Future(
            {"old_log_probs": unpad(-numbers, lengths), "entropy_sums": numbers.sum(dim=1)}
        ),
        "ref": Future({"ref_log_prob": unpad(-2 * numbers, lengths)}),
    }
    prompts = DataProto.from_dict(non_tensors={"uid": np.arange(ROWS)})
    of_greedy = Future({"scores": baselines}) if baselines is not None else None
    made = Estimator(config).estimate(
        prompts,
        futures["rollouts"],  # type: ignore[arg-type]
        futures["scores"],  # type: ignore[arg-type]
        of_greedy,  # type: ignore[arg-type]
        futures["values"],  # type: ignore[arg-type]
        *([futures["old"], futures["ref"]] if config.algorithm.use_kl_in_reward else []),  # type: ignore[arg-type]
    )
    return made, futures


@pytest.mark.parametrize("with_penalty", [False, True])
def test_a_kl_penalty_changes_the_rewards_and_is_reported(
    with_penalty: bool, tmp_path: Path
) -> None:
    result, futures = estimated(tmp_path, f"algorithm.use_kl_in_reward={str(with_penalty).lower()}")
    assert futures["old"].was_fetched == with_penalty
    is_penalized = not torch.equal(
        result.tensors["token_level_rewards"], result.tensors["token_level_scores"]
    )
    assert is_penalized == with_penalty
    assert ("actor/reward_kl_penalty" in result.metrics) == with_penalty


def test_a_batch_is_described_by_what_was_estimated_and_its_entropies(tmp_path: Path) -> None:
    result, futures = estimated(tmp_path)
    metrics = describe(result, futures["old"].get())
    assert metrics["actor/entropy"] == pytest.approx(66 / sum(LENGTHS))
    assert metrics["critic/score/mean"] == pytest.approx((0 + 3 + 6 + 9) / ROWS)
    assert metrics["critic/values/max"] == pytest.approx(1.0)
    assert metrics["perf/total_num_tokens"] == ROWS * PROMPT + sum(LENGTHS)
    assert (metrics["response_length/mean"], metrics["prompt_length/mean"]) == (
        sum(LENGTHS) / ROWS,
        PROMPT,
    )
    assert (metrics["response_length/clip_ratio"], metrics["prompt_length/clip_ratio"]) == (
        0.5,
        0.0,
    )
    assert result.lengths == [PROMPT + length for length in LENGTHS]
    assert "training/rollout_probs_diff_mean" not in metrics


def test_scores_stand_at_the_last_token_and_what_updates_read_is_ragged(tmp_path: Path) -> None:
    result, _ = estimated(tmp_path)
    expected = torch.zeros(ROWS, LENGTH)
    expected[torch.arange(ROWS), torch.tensor(LENGTHS) - 1] = torch.tensor([0.0, 3.0, 6.0, 9.0])
    assert torch.equal(result.tensors["token_level_scores"], expected)
    for key in ("advantages", "returns"):
        assert lengths_of(result.batch.batch[key]).tolist() == LENGTHS
        assert torch.equal(pad_ragged(result.batch.batch[key]), result.tensors[key])


def test_probabilities_of_rollout_and_actor_are_compared_over_all_response_tokens(
    tmp_path: Path,
) -> None:
    result, futures = estimated(tmp_path)
    scored = futures["old"].get()
    actor = torch.tensor([0.5, 0.25, 0.5, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5])
    apart = torch.tensor([0.25, -0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    for key, probabilities in (("old_log_probs", actor), ("rollout_log_probs", actor + apart)):
        scored.batch[key] = ragged(probabilities.log(), torch.tensor(LENGTHS))
    metrics = describe(result, scored)
    found = {
        name: metrics[f"training/rollout_probs_diff_{name}"] for name in ("mean", "max", "std")
    }
    assert found == pytest.approx({"mean": 0.5 / 9, "max": 0.25, "std": float(apart.abs().std())})


def test_the_greedy_score_of_a_prompt_is_the_baseline_of_all_its_samples(tmp_path: Path) -> None:
    of_two_prompts = torch.tensor([10.0, 20.0])
    result, _ = estimated(tmp_path, "algorithm.adv_estimator=remax", baselines=of_two_prompts)
    taken_off = result.tensors["returns"] - result.tensors["advantages"]
    assert taken_off[:, 0].tolist() == [10, 10, 20, 20]
