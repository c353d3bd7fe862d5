"""The metrics of a validation with N scored responses to each prompt, under verl's names and by its
definitions.

For each data source and variable (`reward` is the score, others are numbers that the reward
function returned):

    mean@N, std@N                      mean and standard deviation over the responses to a prompt
    best@n, worst@n, each /mean, /std  the largest and smallest value of n responses, for n = 2, 4, 8, ... and N
    maj@n/mean, maj@n/std              the value of the most frequent answer (`pred`) of n responses, if given

The n responses are drawn from the N with replacement, 1000 times with a fixed seed, so the same
scores give the same metrics. Each metric is the mean over the prompts. `val-core/` has mean@N,
best@N and maj@N of the variable `acc`, or of `reward` if there is no `acc`; everything else is in
`val-aux/`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rolepool.trainer.samples import ScoredResponse

NUM_DRAWS = 1000
SEED = 42

Values = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


class Draws(NamedTuple):
    """Draws of n of the responses to a prompt; the same places are drawn for all prompts."""

    size: int
    """How many responses n are drawn."""
    drawn: Places
    """The places of the responses, [draws, n]."""
    winners: Places | None
    """For each prompt the place of the response that wins the vote of each draw, [prompts, draws];
    None if there are no answers to vote for."""


def validation_metrics(responses: Sequence[ScoredResponse], num_samples: int) -> dict[str, float]:
    """All metrics of a validation. The `num_samples` responses to a prompt are next to each other.

    Prompts with a response that does not have a variable are skipped for this variable.
    """
    rows_of_source: dict[str, list[ScoredResponse]] = {}
    for response in responses:
        rows_of_source.setdefault(response.data_source, []).append(response)
    metrics: dict[str, float] = {}
    for source, rows in rows_of_source.items():
        draws = list(_draws(rows, num_samples))
        # A dict keeps the order of the names.
        names: dict[str, None] = {}
        for row in rows:
            names.update(dict.fromkeys(row.numbers))
        core_name = "acc" if "acc" in names else "reward"
        for name in names:
            statistics = _statistics(rows, name, num_samples, draws)
            for statistic, value in statistics:
                is_core = name == core_name and _is_core(statistic, num_samples)
                group = "val-core" if is_core else "val-aux"
                metrics[f"{group}/{source}/{name}/{statistic}"] = value
    return metrics


def _is_core(statistic: str, num_samples: int) -> bool:
    """Whether a statistic such as `best@4/mean` is one of all responses, and not the worst of them
    nor the deviation between them."""
    kind_and_size, _, _ = statistic.partition("/")
    kind, _, size = kind_and_size.partition("@")
    return kind in ("mean", "best", "maj") and int(size) == num_samples


def _draws(rows: Sequence[ScoredResponse], num_samples: int) -> Iterator[Draws]:
    """The draws for n = 2, 4, 8, ... and N."""
    has_answers = any(row.pred is not None for row in rows)
    # Equal answers have equal numbers.
    numbers: dict[str | None, int] = {}
    answers_of_rows: list[int] = []
    for row in rows:
        number = numbers.setdefault(row.pred, len(numbers))
        answers_of_rows.append(number)
    # [prompts, N]
    answers = np.array(answers_of_rows).reshape(-1, num_samples)
    for size in _sizes_of_draws(num_samples):
        # The same generator as verl, so that the numbers are those of verl.
        generator = np.random.RandomState(SEED)
        drawn = generator.choice(num_samples, size=(NUM_DRAWS, size))
        winners: Places | None = None
        if has_answers:
            winners_of_prompts = []
            for answers_to_prompt in answers:
                drawn_answers = answers_to_prompt[drawn]
                winners_of_prompts.append(_winners(drawn_answers, drawn))
            winners = np.stack(winners_of_prompts)
        yield Draws(size, drawn, winners)


def _sizes_of_draws(num_samples: int) -> list[int]:
    """2, 4, 8, ... below the number of responses, and this number; nothing is drawn from one."""
    if num_samples == 1:
        return []
    sizes = []
    size = 2
    while size < num_samples:
        sizes.append(size)
        size *= 2
    return [*sizes, num_samples]


def _winners(answers: Places, drawn: Places) -> Places:
    """The first drawn place of the most frequent answer in each draw. If several answers are the
    most frequent, the one that was drawn first wins."""
    # For each drawn response, how many of its draw have the same answer; argmax is the first place.
    is_same_answer = answers[:, :, None] == answers[:, None, :]
    counts = is_same_answer.sum(axis=2)
    first_places = counts.argmax(axis=1, keepdims=True)
    winners: Places = np.take_along_axis(drawn, first_places, axis=1)
    return winners[:, 0]


def _statistics(
    rows: Sequence[ScoredResponse],
    name: str,
    num_samples: int,
    draws: Sequence[Draws],
) -> Iterator[tuple[str, float]]:
    """The statistics of a variable over the prompts whose responses all have it."""
    values_of_rows = [row.numbers.get(name, np.nan) for row in rows]
    # [prompts, N]
    values = np.array(values_of_rows).reshape(-1, num_samples)
    is_missing = np.isnan(values)
    is_complete = ~is_missing.any(axis=1)
    if not is_complete.any():
        return
    kept: Values = values[is_complete]
    yield f"mean@{num_samples}", float(kept.mean())
    if num_samples > 1:
        deviations = kept.std(axis=1)
        yield f"std@{num_samples}", float(deviations.mean())
    for size, drawn, winners in draws:
        # The value of each draw, [prompts, draws].
        best = np.stack([of_prompt[drawn].max(axis=1) for of_prompt in kept])
        yield from _mean_and_std(f"best@{size}", best)
        worst = np.stack([of_prompt[drawn].min(axis=1) for of_prompt in kept])
        yield from _mean_and_std(f"worst@{size}", worst)
        if winners is not None:
            winners_of_kept = winners[is_complete]
            voted = np.take_along_axis(kept, winners_of_kept, axis=1)
            yield from _mean_and_std(f"maj@{size}", voted)


def _mean_and_std(name: str, of_draws: Values) -> Iterator[tuple[str, float]]:
    yield f"{name}/mean", float(of_draws.mean())
    deviations = of_draws.std(axis=1)
    yield f"{name}/std", float(deviations.mean())
