"""Which rows each rank updates on, in which order: fixed here, before dispatch, from row lengths alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rolepool.config import Config
from rolepool.config.model_keys import Actor, Critic
from rolepool.models.micro_batches import rank_order
from rolepool.protocol.worker import derive_seed


def update_orders(
    config: Config, keys: Actor | Critic, lengths: Sequence[int], num_ranks: int, step: int
) -> Iterator[tuple[npt.NDArray[np.int64], bool]]:
    """For each epoch the order of rows, and whether it is the last.

    A mini-batch is a set of rows that depends on seed and step only; balancing over ranks happens inside it.
    """
    rows_per_mini_batch = keys.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    for epoch in range(keys.ppo_epochs):
        rows = np.arange(len(lengths))
        if keys.shuffle:
            rows = np.random.default_rng(derive_seed(config.trainer.seed, "shuffle", step, epoch)).permutation(rows)
        order = rank_order(
            [lengths[int(row)] for row in rows], rows_per_mini_batch, num_ranks, balance=config.trainer.balance_batch
        )
        yield rows[order], epoch == keys.ppo_epochs - 1
