"""Batches of prompts: which rows belong to which step, in an order that depends only on the seed and the epoch.

Owns the position in the data. It is a plain dict in the checkpoint. It counts rows, not steps or ranks, so a run
resumes at the same prompt with any placement and batch size.

Does not know how many responses are sampled for a prompt, or on which ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rolepool.data.prompts import PromptSet
from rolepool.errors import ConfigError, DataError
from rolepool.protocol import DataProto


class PromptLoader:
    """An endless sequence of training batches. The last rows of an epoch are dropped if they do not fill a batch."""

    def __init__(self, prompts: PromptSet, batch_size: int, *, seed: int, shuffle: bool = True) -> None:
        if batch_size > len(prompts):
            raise ConfigError(
                f"data.train_batch_size={batch_size}: {prompts.key} has {len(prompts)} prompts, less than one batch; "
                f"use at most {len(prompts)}"
            )
        self._prompts, self._batch_size = prompts, batch_size
        # What must be the same to resume at a saved position.
        self._identity: dict[str, Any] = {"num_rows": len(prompts), "digest": prompts.digest}
        self._identity.update(seed=seed, shuffle=shuffle)
        self.num_steps_per_epoch = len(prompts) // batch_size
        self.epoch = -1
        """The epoch of the next batch; the first is 0."""
        self._move_to(0, 0)

    def next_batch(self) -> DataProto:
        """The next `batch_size` prompts; see `batch_of` for the columns."""
        rows = self._order[self._index : self._index + self._batch_size].tolist()
        batch = batch_of(self._prompts, rows, f"epoch{self.epoch}")
        self._move_to(self.epoch, self._index + self._batch_size)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts, and in which data; only numbers and strings."""
        return {"epoch": self.epoch, "index": self._index, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position that `state_dict` returned. Raises DataError if the data or its order has changed."""
        try:
            epoch, index = int(state["epoch"]), int(state["index"])
            changed = {key: (state[key], now) for key, now in self._identity.items() if state[key] != now}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the saved data position cannot be read ({error!r}): {dict(state)}") from error
        if changed:
            changes = "; ".join(f"{key} was {then}, is {now}" for key, (then, now) in changed.items())
            raise DataError(
                f"the saved position in {self._prompts.key} belongs to other data: {changes} (digest is a hash of all "
                "prompt tokens; seed is data.seed, or trainer.seed if that is null). Undo the change, or start a new "
                "run with trainer.resume_mode=disable"
            )
        if epoch < 0 or not 0 <= index < len(self._prompts):
            raise DataError(f"the saved data position is epoch {epoch}, row {index} of {len(self._prompts)} rows")
        self._move_to(epoch, index)

    def _move_to(self, epoch: int, index: int) -> None:
        """Move to row `index` of an epoch, or to the next epoch if less than a batch is left in it."""
        if index + self._batch_size > len(self._prompts):
            epoch, index = epoch + 1, 0
        if epoch != self.epoch:
            self._order = np.arange(len(self._prompts))
            if self._identity["shuffle"]:
                np.random.default_rng([self._identity["seed"], epoch]).shuffle(self._order)
        self.epoch, self._index = epoch, index


def validation_batches(prompts: PromptSet, batch_size: int | None = None) -> Iterator[DataProto]:
    """All prompts once, in the order of the files; the last batch may be smaller. None: all prompts in one batch."""
    size = batch_size or len(prompts)
    for start in range(0, len(prompts), size):
        yield batch_of(prompts, range(start, min(start + size, len(prompts))), "val")


def batch_of(prompts: PromptSet, rows: Sequence[int], pass_name: str) -> DataProto:
    """These prompts as a batch. It has no tensors, because prompts differ in length and are not padded here.

    `raw_prompt_ids` are lists of token ids; `uid` names a prompt and is the same in every run, so that responses to the
    same prompt can be found; `index` is the prompt's number, and `origin` its place in the files.
    """
    uids = [f"{pass_name}-row{row}" for row in rows]
    columns = {**prompts.take(rows), "uid": uids, "index": np.array(rows, dtype=np.int64)}
    return DataProto.from_dict(non_tensors=columns)
