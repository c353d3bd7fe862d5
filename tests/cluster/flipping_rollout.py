"""A rollout in whose process group one bit of each message changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rolepool.roles.rollout import Rollout
from rolepool.weights.process_group import Receiver
from rolepool.weights.routes import Message


class FlippingReceiver(Receiver):
    def _receive_messages(
        self, messages: Any, unpack: Callable[[Message, Tensor], None], end_round: Any
    ) -> None:
        def flip_and_unpack(message: Message, buffer: Tensor) -> None:
            buffer[5] ^= 1
            unpack(message, buffer)

        super()._receive_messages(messages, flip_and_unpack, end_round)


class FlippingRollout(Rollout):
    def join_transfers(self, *args: Any) -> None:
        super().join_transfers(*args)
        self._receiver.__class__ = FlippingReceiver

    join_transfers.__dict__.update(vars(Rollout.join_transfers))
