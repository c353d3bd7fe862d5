"""Corrections of rollouts as plain loops over tokens, in Python's own float64, and random batches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Row = list[float]
"""The numbers of the tokens of a row that count."""


class Batch(NamedTuple):
    """Log-probs of both programs and the mask, as [rows, tokens]."""

    actor: Tensor
    engine: Tensor
    mask: Tensor

    def rows(self) -> list[Row]:
        """log p - log q of the tokens that count."""
        rows: list[Row] = []
        for actor, engine, mask in zip(*(column.tolist() for column in self), strict=True):
            row = [p - q for p, q, counts in zip(actor, engine, mask, strict=True) if counts]
            rows.append(row)
        return rows


def random_batch(seed: int, rows: int = 12, width: int = 7, spread: float = 0.4) -> Batch:
    """Rows with holes, as environments leave them. One row is empty. What does not count is NaN."""
    generator = torch.Generator().manual_seed(seed)
    actor = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    engine = actor + spread * noise
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    is_sampled = torch.rand(rows, width, generator=generator) < 0.8
    mask = (torch.arange(width) < lengths) & is_sampled
    mask[:, 0] = True
    mask[3] = False
    engine[~mask] = math.nan
    return Batch(actor, engine, mask)


def limited(number: float) -> float:
    return max(-20.0, min(20.0, number))


def weights_of(rows: list[Row], level: str, lower: float | None, upper: float) -> list[Row]:
    """The weights of tokens, within their bounds."""
    weights: list[Row] = []
    for row in rows:
        logs = row if level == "token" else [sum(row)] * len(row)
        raw = [math.exp(limited(log)) for log in logs]
        if lower is None:
            weights.append([min(weight, upper) for weight in raw])
        else:
            weights.append([weight if lower <= weight <= upper else 0.0 for weight in raw])
    return weights


def with_mean_1(weights: list[Row], level: str) -> list[Row]:
    """Divided by the mean over tokens, or over sequences that have tokens."""
    if level == "token":
        numbers = flat(weights)
    else:
        numbers = [row[0] for row in weights if row]
    mean = sum(numbers) / len(numbers)
    return [[weight / mean for weight in row] for row in weights]


def kept_by(rows: list[Row], rule: str, lower: float | None, upper: float) -> list[list[bool]]:
    """Which tokens one rule keeps."""
    over, estimator = rule.rsplit("_", 1)
    kept: list[list[bool]] = []
    for row in rows:
        numbers = [estimate(estimator, limited(d)) for d in row]
        if over == "seq_sum":
            numbers = [math.fsum(numbers)] * len(row)
        elif over == "seq_mean" and row:
            numbers = [math.fsum(numbers) / len(row)] * len(row)
        elif over == "seq_max" and row:
            numbers = [max(numbers)] * len(row)
        if lower is None:
            kept.append([number <= upper for number in numbers])
        else:
            bounds = (math.log(lower), math.log(upper))
            kept.append([bounds[0] <= number <= bounds[1] for number in numbers])
    return kept


def estimate(estimator: str, d: float) -> float:
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d * d / 2
    return math.exp(d) - 1 - d


def flat(rows: list[Row]) -> Row:
    return [number for row in rows for number in row]


def mean(numbers: Row) -> float:
    return math.fsum(numbers) / len(numbers)


def mismatch_of(rows: list[Row]) -> dict[str, float]:
    """The metrics of a batch without the prefix of their names."""
    tokens = flat(rows)
    sequences = [row for row in rows if row]
    return {
        "kl": mean([-d for d in tokens]),
        "k3_kl": mean([math.exp(d) - 1 - d for d in tokens]),
        "ppl_ratio": mean([math.exp(-mean(row)) for row in sequences]),
        "chi2_token": mean([math.exp(d) ** 2 for d in tokens]) - 1,
        "chi2_seq": mean([math.exp(limited(sum(row))) ** 2 for row in sequences]) - 1,
    }
