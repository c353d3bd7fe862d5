"""Dynamic sampling, as in DAPO: which groups of responses a step learns from.

A group is the responses to one prompt. If all of them have the same score, their advantages are 0,
and the step replaces the group by one of a further prompt. Owns the choice and its limits. It knows
neither prompts nor the queue: `rolepool.trainer.pipeline` generates the batches.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rolepool.config import Config
from rolepool.data.rewards import FAILED
from rolepool.errors import DataError
from rolepool.protocol import DataProto, DataProtoFuture
from rolepool.protocol.batches import Scores
from rolepool.protocol.futures import RowNumbers, Stripe
from rolepool.trainer.advantages import Numbers, reward_numbers
from rolepool.trainer.results import Batch, fetched
from rolepool.trainer.state import FilteredGroups
from rolepool.trainer.step import Generated

SCORE_NAMES = (None, "score", "reward", "seq_reward", "seq_final_reward")
"""Values of `algorithm.filter_groups.metric` that mean the score. In verl the last one has the KL
penalty, which the config refuses."""
METRIC = "algorithm.filter_groups.metric"


class GroupsOfStep:
    """The groups of one step, from the batches that were generated for it so far."""

    def __init__(self, config: Config, number: int, num_batches_per_epoch: int) -> None:
        self._config = config
        self._number = number
        self._num_batches_per_epoch = num_batches_per_epoch
        self._num_wanted = config.data.train_batch_size
        self._num_samples = config.actor_rollout_ref.rollout.n
        self._batches: list[Generated] = []
        self._mixed: list[int] = []
        """The groups with differences, by their numbers among the groups of all batches."""
        self._num_since_mixed = 0
        """The batches since the last one that had a group with differences."""

    def add(self, generated: Generated) -> None:
        """Add a batch. Waits for its scores. If a process stands still, the watchdog ends the
        wait, as that of `Estimator.estimate`."""
        scored = fetched(generated.scores, timeout_s=None)
        values = metric_values(scored, self._config.algorithm.filter_groups.metric)
        first = len(self._batches) * self._config.prompts_of_generation
        mixed = mixed_groups(values, self._num_samples)
        self._mixed += [first + number for number in mixed]
        self._batches.append(generated)
        self._num_since_mixed = 0 if mixed else self._num_since_mixed + 1

    @property
    def are_enough(self) -> bool:
        return len(self._mixed) >= self._num_wanted

    def check_limit(self) -> None:
        """Raise DataError if no further batch may be generated."""
        num_batches = len(self._batches)
        size = self._config.prompts_of_generation
        most = self._config.algorithm.filter_groups.max_num_gen_batches
        limit = f"algorithm.filter_groups.max_num_gen_batches={most}"
        if 0 < most <= num_batches:
            more = "set 0 (no limit) or a larger max_num_gen_batches"
        elif self._num_since_mixed >= self._num_batches_per_epoch:
            # Without this, a task that is solved always, or never, would generate forever.
            limit = f"{limit}: the last {self._num_since_mixed} batches, an epoch, had none"
            more = "set another algorithm.filter_groups.metric"
        else:
            return
        num_mixed = len(self._mixed)
        has = f"step {self._number} has {num_mixed} of data.train_batch_size={self._num_wanted}"
        plural = "" if num_batches == 1 else "es"
        batches = f"{num_batches} batch{plural} of data.gen_batch_size={size} prompts ({limit})"
        metric = self._config.algorithm.filter_groups.metric or "score"
        same = f"all responses to the other {size * num_batches - num_mixed} have the same {metric}"
        fix = f"{more}, or choose prompts that are neither too easy nor too difficult"
        raise DataError(f"{has} groups after {batches}: {same}; {fix}")

    @property
    def kept(self) -> list[int]:
        """The groups that the step learns from: the first ones in the order of prompts. Further
        ones of the last batch are dropped."""
        return self._mixed[: self._num_wanted]

    def joined(self) -> Generated:
        """The groups that the step learns from, as if one batch had been generated."""
        of_rows = rows_of_groups(self.kept, self._num_samples)
        of_prompts = np.array(self.kept, dtype=np.int64)
        calls: dict[str, list[object]] = {}
        for batch in self._batches:
            for name, futures in batch.calls.items():
                calls.setdefault(name, []).extend(futures)
        baselines = [batch.baselines for batch in self._batches if batch.baselines is not None]
        return Generated(
            self._number,
            prompts=joined_prompts([batch.prompts for batch in self._batches], of_rows),
            rollouts=_joined([batch.rollouts for batch in self._batches], of_rows),
            scores=_joined([batch.scores for batch in self._batches], of_rows),
            baselines=_joined(baselines, of_prompts) if baselines else None,
            calls=calls,  # type: ignore[arg-type]
        )

    @property
    def chosen(self) -> FilteredGroups:
        """What was chosen, for the state of the run and for metrics."""
        size = self._config.prompts_of_generation
        num_batches = len(self._batches)
        return FilteredGroups(
            gen_batch_size=size,
            num_batches=num_batches,
            num_filtered=size * num_batches - len(self._mixed),
            kept=tuple(self.kept),
        )


def metric_values(scored: DataProto, metric: str | None) -> Numbers:
    """The number of each response that groups are compared by."""
    if metric in SCORE_NAMES:
        scores: Numbers = Scores.of(scored).scores.double().numpy()
        return scores
    numbers = reward_numbers(scored)
    values = numbers.get(f"reward/{metric}", numbers.get(str(metric)))
    if values is None:
        others = ", ".join(name.removeprefix("reward/") for name in numbers)
        has = f"only score and {others}" if others else "only score"
        raise DataError(f"{METRIC}={metric}: the reward has no such number, {has}; use one of them")
    failed = numbers.get(f"reward/{FAILED}", np.zeros(len(values)))
    # A response that could not be scored has the score 0 and no other numbers.
    values = np.where(np.isnan(values) & (failed == 1), 0.0, values)
    num_missing = int(np.isnan(values).sum())
    if num_missing:
        what = f"{num_missing} of {len(values)} responses have no such number"
        raise DataError(f"{METRIC}={metric}: {what}; return it for all, or use score")
    return values


def mixed_groups(values: Numbers, num_samples: int) -> list[int]:
    """The numbers of the groups whose values are not all equal. The responses to a prompt are next
    to each other."""
    groups = values.reshape(-1, num_samples)
    is_mixed = groups.min(axis=1) < groups.max(axis=1)
    numbers: list[int] = np.flatnonzero(is_mixed).tolist()
    return numbers


def rows_of_groups(groups: Sequence[int], num_samples: int) -> RowNumbers:
    """The rows of these groups, one group after another."""
    first_rows = np.array(groups, dtype=np.int64) * num_samples
    rows: npt.NDArray[np.int64] = (first_rows[:, None] + np.arange(num_samples)).ravel()
    return rows


def joined_prompts(batches: Sequence[DataProto], rows: RowNumbers) -> DataProto:
    """These rows of several batches of prompts."""
    return DataProto.concat(batches).select_idxs(rows)


def _joined(batches: Sequence[Batch], rows: RowNumbers) -> DataProtoFuture:
    """These rows of several results. Results of calls stay where they are, and only those that a
    step of the user has changed are fetched."""
    futures = [batch for batch in batches if isinstance(batch, DataProtoFuture) and batch.is_plain]
    if len(futures) == len(batches):
        return DataProtoFuture.concat(futures).reorder(rows)
    calls = [
        call for batch in batches if isinstance(batch, DataProtoFuture) for call in batch.calls
    ]
    parts = [fetched(batch, timeout_s=None) for batch in batches]
    return DataProtoFuture(calls, [Stripe(DataProto.concat(parts), order=rows)])
