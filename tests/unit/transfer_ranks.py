"""Trainer ranks and engine ranks as threads of one process, with a real process group of gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar

import torch
from torch import Tensor

from rolepool.protocol.stores import listening_store
from rolepool.rollout.engine import StreamedEngine
from rolepool.weights.digests import Digest
from rolepool.weights.group import MeetingPoint, TransferGroup
from rolepool.weights.messages import part_of
from rolepool.weights.process_group import Receiver, Sender, Sent
from rolepool.weights.receipts import Receipt
from rolepool.weights.routes import Layout, Weight, own_region

Result = TypeVar("Result")
Action = Callable[[], Any]
TIMEOUT_S = 60.0


def weight_of(name: str, tensor: Tensor, *, is_sharded: bool = True) -> Weight:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Weight(name, tuple(tensor.shape), dtype, tensor.element_size(), is_sharded)


def matrix_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)


class Ranks:
    """All ranks of a layout. Each of them runs in its own thread."""

    def __init__(self, layout: Layout, bucket_bytes: int = 2**20, **options: Any) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.layout = layout
        self.store = listening_store("127.0.0.1", layout.num_ranks)
        point = MeetingPoint("127.0.0.1", self.store.port, token_hex(8))
        self._threads = ThreadPoolExecutor(layout.num_ranks)

        def join(rank: int) -> TransferGroup:
            return TransferGroup(point, rank, layout.num_ranks, "cpu")

        self.groups = self.on_all([partial(join, rank) for rank in range(layout.num_ranks)])
        num_trainers = layout.trainer.num_ranks
        self.senders: list[Sender] = []
        for rank, group in enumerate(self.groups[:num_trainers]):
            self.senders.append(Sender(group, layout, rank, "cpu", bucket_bytes, **options))
        self.receivers: list[Receiver] = []
        for rank, group in enumerate(self.groups[num_trainers:]):
            self.receivers.append(Receiver(group, layout, rank, "cpu", bucket_bytes, **options))

    def on_all(self, actions: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run an action in the thread of each rank. Raises the first error."""
        futures = [self._threads.submit(action) for action in actions]
        return [future.result(timeout=TIMEOUT_S) for future in futures]

    def transfer(
        self, whole: Mapping[str, Tensor], models: Sequence[Mapping[str, Tensor]]
    ) -> tuple[list[Sent], list[dict[str, Digest]]]:
        """Send these weights to the engines, whose tensors are `models`."""
        results = self.on_all([*self._sends(whole), *self._receives(models)])
        return results[: len(self.senders)], results[len(self.senders) :]

    def transfer_to_engines(
        self, whole: Mapping[str, Tensor], engines: Sequence[StreamedEngine]
    ) -> list[Receipt]:
        """The same with engines, which get version 1."""
        receives: list[Action] = []
        for engine, receiver in zip(engines, self.receivers, strict=True):
            receives.append(partial(engine.receive_weights, receiver.receive, 1))
        results = self.on_all([*self._sends(whole), *receives])
        return results[len(self.senders) :]

    def errors(
        self, whole: Mapping[str, Tensor], models: Sequence[Mapping[str, Tensor]]
    ) -> list[BaseException | None]:
        """The error of each rank in a transfer."""
        actions = [*self._sends(whole), *self._receives(models)]
        futures = [self._threads.submit(action) for action in actions]
        return [future.exception(timeout=TIMEOUT_S) for future in futures]

    def _sends(self, whole: Mapping[str, Tensor]) -> list[Action]:
        def rows_of(rank: int, weight: Weight) -> Tensor:
            first, end = own_region(weight, self.layout.trainer, rank).rows
            dtype: torch.dtype = getattr(torch, weight.dtype)
            return matrix_of(whole[weight.name])[first:end].to(dtype)

        sends: list[Action] = []
        for rank, sender in enumerate(self.senders):
            sends.append(partial(sender.send, partial(rows_of, rank)))
        return sends

    def _receives(self, models: Sequence[Mapping[str, Tensor]]) -> list[Action]:
        pairs = zip(self.receivers, models, strict=True)
        return [partial(receiver.receive, model) for receiver, model in pairs]

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self._threads.shutdown()


def held_parts(layout: Layout, whole: Mapping[str, Tensor], engine: int) -> dict[str, Tensor]:
    """What an engine rank should have."""
    parts: dict[str, Tensor] = {}
    for weight in layout.weights:
        region = layout.engines[engine][weight.name]
        parts[weight.name] = part_of(matrix_of(whole[weight.name]), weight.whole, region)
    return parts
