"""What each metric of a step and of a validation means: a table of definitions, each computed here
in float64."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolepool.config import load_config
from rolepool.data.rewards import NUMBERS, PRED
from rolepool.metrics.row_text import validation_score
from rolepool.metrics.spans import Recorded, Span
from rolepool.models.micro_batches import rank_order
from rolepool.placement import ResourcePoolManager, Role
from rolepool.placement.plan import place
from rolepool.protocol import DataProto, unpad
from rolepool.trainer.advantages import Estimator
from rolepool.trainer.rows import length_metrics, staleness_metrics, step_row
from rolepool.trainer.samples import ScoredResponse
from rolepool.trainer.step import StepCalls
from rolepool.trainer.validation_metrics import validation_metrics

# A step of four rows. The third response is aborted: it has no tokens.

PROMPTS, RESPONSES = [2, 4, 3, 1], [3, 1, 0, 2]
MAX_PROMPT, MAX_RESPONSE = 4, 3
SCORES = [1.0, -2.0, 50.0, 0.25]
VALUES = [[0.5, 1.5, -1.0], [2.0], [], [0.0, 1.0]]
ENTROPY_SUMS = [1.5, 0.25, 0.0, 3.0]
LEVELS = [{"level": 3.0}, {}, {"level": 1.0}, {"level": 2.0}]
TOKENS = sum(PROMPTS) + sum(RESPONSES)
SECONDS = {
    "gen": 2.0,
    "values": 0.5,
    "ref": 0.25,
    "old_log_prob": 1.0,
    "update_critic": 4.0,
    "update_actor": 3.0,
}
STEP_S, ADV_S = 8.0, 0.125


def flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": sum(values) / len(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }


def lengths(name: str, values: Sequence[int], limit: int) -> dict[str, float]:
    return {
        **spread(name, values),
        f"{name}/clip_ratio": sum(value >= limit for value in values) / len(values),
    }


class Future:
    """A result that is there."""

    calls = ()

    def __init__(self, batch: DataProto) -> None:
        self.batch = batch

    def get(self, keys: Any = None) -> DataProto:
        return (
            self.batch
            if keys is None
            else self.batch.select([key for key in keys if key in self.batch.batch])
        )


def config_with(folder: Path, *words: str) -> Any:
    file = folder / "empty.yaml"
    file.write_text("")
    keys = [f"data.max_prompt_length={MAX_PROMPT}", f"data.max_response_length={MAX_RESPONSE}"]
    return load_config([str(file)], [*keys, *words]).config


def row_of(folder: Path, *words: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The row of metrics of the step, and the tensors that were estimated."""
    sizes = torch.tensor(RESPONSES)
    padded = torch.zeros(4, MAX_RESPONSE)
    for row, values in enumerate(VALUES):
        padded[row, : len(values)] = torch.tensor(values)
    scored = DataProto.from_dict(
        {"scores": torch.tensor(SCORES)},
        non_tensors={NUMBERS: np.fromiter(LEVELS, object), PRED: np.fromiter("abcd", object)},
    )
    futures: list[Any] = [
        Future(
            DataProto.from_dict(
                {"num_prompt_tokens": torch.tensor(PROMPTS), "num_response_tokens": sizes}
            )
        ),
        Future(scored),
        Future(DataProto.from_dict({"values": unpad(padded, sizes)})),
    ]
    uids = DataProto.from_dict(non_tensors={"uid": np.arange(4)})
    estimated = Estimator(config_with(folder, *words)).estimate(
        uids, *futures[:2], None, futures[2]
    )
    estimated = replace(estimated, span=Span("driver", "trainer", 0, "adv", 0.0, 0.0, ADV_S))
    old: Any = Future(DataProto.from_dict({"entropy_sums": torch.tensor(ENTROPY_SUMS)}))
    recorded = [Recorded(1, "adv", estimated.span)]
    for call, (name, seconds) in enumerate(SECONDS.items()):
        for rank in (0, 1):  # the second rank takes half as long, and has less memory
            span = Span("all", "actor", rank, name, 0.0, 0.0, seconds / (1 + rank), call=call)
            recorded.append(
                Recorded(
                    1, name, span._replace(peak_memory_bytes=2**31, reserved_memory_bytes=3 * 2**30)
                )
            )
    pools = {
        name: {"per_node": [2], "share": 0.5} for name in ("one", "two")
    }  # both on the same two GPUs
    plan = place(ResourcePoolManager(pools, {Role.Actor: "one", Role.Critic: "two"}), [2])
    after = [
        Recorded(
            2, "gen", Span("all", "actor", 0, "gen", STEP_S, STEP_S, STEP_S, call=len(SECONDS))
        )
    ]
    row = step_row(StepCalls(1, {}, estimated, old, old), recorded, [], after, plan)
    return row, estimated.tensors


def definitions(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """Every metric of a step, by its definition."""
    made = [row for row, length in enumerate(RESPONSES) if length]
    kept = {
        name: flat([tensors[name][row, :length].tolist() for row, length in enumerate(RESPONSES)])
        for name in tensors
    }
    returns, values = np.array(kept["returns"]), np.array(flat(VALUES))
    unexplained = np.var(returns - values, ddof=1) / (np.var(returns, ddof=1) + 1e-5)
    per_token = {name: SECONDS[name] for name in ("values", "ref", "update_critic", "update_actor")}
    return {
        "scores of the responses that are not aborted": spread(
            "critic/score", [SCORES[row] for row in made]
        ),
        "sums of their token-level rewards": spread(
            "critic/rewards", [float(tensors["token_level_rewards"][row].sum()) for row in made]
        ),
        "advantages of all response tokens": spread("critic/advantages", kept["advantages"]),
        "returns of all response tokens": spread("critic/returns", kept["returns"]),
        "values of all response tokens": spread("critic/values", kept["values"]),
        "1 - var(returns - values) / (var(returns) + 1e-5), unbiased": {
            "critic/vf_explained_var": 1 - unexplained
        },
        "entropies of response tokens, aggregated like the loss": {
            "actor/entropy": sum(ENTROPY_SUMS) / sum(RESPONSES)
        },
        "response tokens": lengths("response_length", RESPONSES, MAX_RESPONSE),
        "response tokens, without aborted responses": lengths(
            "response_length_non_aborted", [RESPONSES[row] for row in made], MAX_RESPONSE
        ),
        "prompt tokens": lengths("prompt_length", PROMPTS, MAX_PROMPT),
        "fraction of responses without tokens": {"response/aborted_ratio": 1 / 4},
        "mean of a number that the reward function returned, over the rows that have it": {
            "reward/level/mean": 2.0
        },
        "prompt and response tokens": {"perf/total_num_tokens": TOKENS},
        "seconds of the step": {"timing_s/step": STEP_S, "perf/time_per_step": STEP_S},
        "tokens per second and GPU; two pools share two GPUs": {
            "perf/throughput": TOKENS / STEP_S / 2
        },
        "seconds of the slowest rank": {
            f"timing_s/{name}": seconds for name, seconds in SECONDS.items()
        },
        "seconds of the driver": {"timing_s/adv": ADV_S},
        "milliseconds per response token": {"timing_per_token_ms/gen": 2000 / sum(RESPONSES)},
        "milliseconds per prompt and response token": {
            "timing_per_token_ms/adv": ADV_S * 1000 / TOKENS,
            **{
                f"timing_per_token_ms/{name}": seconds * 1000 / TOKENS
                for name, seconds in per_token.items()
            },
        },
        "peaks of all processes, in GiB": {
            "perf/max_memory_allocated_gb": 2,
            "perf/max_memory_reserved_gb": 3,
        },
        "number of the step": {"training/global_step": 1},
    }


def test_every_metric_of_a_step_has_its_definition(tmp_path: Path) -> None:
    row, tensors = row_of(tmp_path)
    table = definitions(tensors)
    found = {
        name: value for name, value in row.items() if not name.startswith(("pool/", "overlap/"))
    }
    assert set(found) == {name for expected in table.values() for name in expected}
    for definition, expected in table.items():
        assert {name: found[name] for name in expected} == pytest.approx(
            expected, rel=1e-5, abs=1e-6
        ), definition


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 4.75 / 6),
        ("seq-mean-token-sum", 4.75 / 3),
        ("seq-mean-token-mean", (1.5 / 3 + 0.25 + 3.0 / 2) / 3),
        ("seq-mean-token-sum-norm", 4.75 / 3 / MAX_RESPONSE),
    ],
)
def test_entropies_are_aggregated_like_the_loss(tmp_path: Path, mode: str, expected: float) -> None:
    row, _ = row_of(tmp_path, f"actor_rollout_ref.actor.loss_agg_mode={mode}")
    assert row["actor/entropy"] == pytest.approx(expected)


def test_entropies_are_divided_by_the_loss_scale_factor_like_the_loss(tmp_path: Path) -> None:
    keys = ["loss_agg_mode=seq-mean-token-sum-norm", "loss_scale_factor=3.5"]
    row, _ = row_of(tmp_path, *(f"actor_rollout_ref.actor.{key}" for key in keys))
    assert row["actor/entropy"] == pytest.approx(4.75 / 3 / 3.5)


# Tokens of ranks


def test_global_seqlen_compares_ranks_in_the_order_of_rows_with_balanced_ranks(
    tmp_path: Path,
) -> None:
    tokens = [9, 8, 7, 6, 1, 2, 3, 4]
    keys = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.train_batch_size=8"]
    row = length_metrics(config_with(tmp_path, *keys), tokens, 2, step=1)
    assert row == {
        "global_seqlen/min": 10,  # rows 4 to 7
        "global_seqlen/max": 30,  # rows 0 to 3
        "global_seqlen/minmax_diff": 20,
        "global_seqlen/mean": 20,
        "global_seqlen/balanced_min": 20,
        "global_seqlen/balanced_max": 20,
    }


def test_global_seqlen_is_that_of_the_rows_that_the_actors_ranks_get(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 1000, 48).tolist()
    keys = [
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.train_batch_size=24",
        "actor_rollout_ref.rollout.n=2",
    ]
    row = length_metrics(config_with(tmp_path, *keys), tokens, 4, step=1)
    of_ranks = np.array(tokens)[rank_order(tokens, 16, 4, balance=True)].reshape(4, 12).sum(axis=1)
    assert (row["global_seqlen/balanced_min"], row["global_seqlen/balanced_max"]) == (
        min(of_ranks),
        max(of_ranks),
    )
    assert (
        row["global_seqlen/balanced_max"] - row["global_seqlen/balanced_min"]
        < row["global_seqlen/minmax_diff"]
    )
    assert (
        length_metrics(
            config_with(tmp_path, *keys, "trainer.balance_batch=false"), tokens, 4, step=1
        )
        == {}
    )


# Validation


def by_definition(values: Sequence[float], preds: Sequence[Any] | None) -> dict[str, float]:
    """The statistics of the responses to one prompt, one draw after another."""
    count = len(values)
    found = {f"mean@{count}": float(np.mean(values))}
    if count > 1:
        found[f"std@{count}"] = float(np.std(values))
    sizes = sorted({n for n in (2, 4, 8, 16) if n < count} | {count}) if count > 1 else []
    for n in sizes:
        np.random.seed(42)
        drawn: dict[str, list[float]] = {"best": [], "worst": [], "maj": []}
        for _ in range(1000):
            chosen = np.random.choice(count, size=n, replace=True)
            drawn["best"].append(max(values[one] for one in chosen))
            drawn["worst"].append(min(values[one] for one in chosen))
            if preds is not None:
                (winner, _), *_ = Counter(
                    preds[one] for one in chosen
                ).most_common()  # of several, the first
                drawn["maj"].append(next(values[one] for one in chosen if preds[one] == winner))
        for kind, numbers in drawn.items():
            if numbers:
                found |= {
                    f"{kind}@{n}/mean": float(np.mean(numbers)),
                    f"{kind}@{n}/std": float(np.std(numbers)),
                }
    return found


@pytest.mark.parametrize("num_samples", [1, 2, 4, 6])
def test_a_validation_is_described_by_draws_from_the_responses_to_each_prompt(
    num_samples: int,
) -> None:
    random = np.random.default_rng(num_samples)
    responses, expected = [], dict[str, list[float]]()
    for prompt in range(5):
        # The first data source has numbers, answers and `acc`; the second has plain scores.
        source = "org/math" if prompt < 3 else "demo"
        preds = random.choice(["1", "2", "3"], num_samples).tolist() if prompt < 3 else None
        columns = {"reward": random.normal(size=num_samples).tolist()}
        if preds is not None:
            columns["acc"] = [float(pred == "1") for pred in preds]
        for sample in range(num_samples):
            numbers = {name: column[sample] for name, column in columns.items()}
            responses.append(ScoredResponse(source, numbers, preds[sample] if preds else None))
        core = "acc" if preds is not None else "reward"
        for name, column in columns.items():
            for statistic, value in by_definition(column, preds).items():
                is_core = name == core and re.fullmatch(
                    rf"(mean|best|maj)@{num_samples}(/.*)?", statistic
                )
                where = f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{statistic}"
                expected.setdefault(where, []).append(value)
    means = {name: float(np.mean(values)) for name, values in expected.items()}
    assert validation_metrics(responses, num_samples) == pytest.approx(means)


def test_prompts_without_a_number_are_skipped_for_this_number_only() -> None:
    numbers: list[dict[str, float]] = [
        {"a": 1, "b": 1},
        {"a": 3, "b": 2},
        {"a": 5},
        {"a": 7, "b": 100},
    ]
    responses = [ScoredResponse("demo", {"reward": 0.0, **one}) for one in numbers]
    metrics = validation_metrics(responses, 2)
    assert (metrics["val-aux/demo/a/mean@2"], metrics["val-aux/demo/b/mean@2"]) == (4, 1.5)
    alone = validation_metrics(responses[2:], 2)
    assert not [name for name in alone if "/b/" in name], "no prompt has all its numbers"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"val-core/demo/reward/mean": 0.25}, 0.25),  # runs of older versions
        ({"val-core/demo/reward/mean": 0.25, "val-core/demo/reward/best@4": 1.0}, 0.25),
        ({"val-core/org/math/acc/mean@8": 0.5, "val-core/demo/reward/mean@8": 0.25}, 0.375),
        (
            {
                "val-core/x/acc/mean@8": 0.5,
                "val-core/x/acc/best@8/mean": 1.0,
                "val-core/x/acc/maj@8/std": 3.0,
            },
            0.5,
        ),
        ({"val-aux/x/score/mean@8": 0.5, "timing_s/testing": 1.0}, None),
    ],
)
def test_the_score_of_a_validation_is_the_mean_of_its_data_sources(
    names: dict[str, float], expected: float | None
) -> None:
    assert validation_score(names) == expected


# Staleness


@pytest.mark.parametrize(
    ("step", "versions", "critic_warmup", "expected"),
    [
        (1, [0, 0], 0, (0.0, 0.0)),
        (5, [4, 4], 0, (0.0, 0.0)),
        (5, [3, 2], 0, (1.5, 2.0)),
        (5, [3, -1], 0, (1.0, 1.0)),  # an environment may not know the version of a row
        (3, [0, 0], 2, (0.0, 0.0)),  # only the critic has been trained
        (3, [2, 1], 2, (0.0, 0.0)),  # the same weights, sent again after a restart
        (5, [3, 1], 2, (1.5, 2.0)),
    ],
)
def test_staleness_is_how_many_steps_older_the_weights_of_the_rows_are(
    step: int, versions: list[int], critic_warmup: int, expected: tuple[float, float]
) -> None:
    metrics = staleness_metrics(step, torch.tensor(versions), critic_warmup)
    found = (metrics["training/staleness/mean"], metrics["training/staleness/max"])
    assert found == expected


def test_without_versions_there_is_no_staleness() -> None:
    assert staleness_metrics(3, None, 0) == {}
    assert staleness_metrics(3, torch.tensor([-1, -1]), 0) == {}
