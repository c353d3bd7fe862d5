"""A rollout engine that keeps the weights of the beginning, as if it were many steps behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from rolepool.rollout.transformers_engine import TransformersEngine
from rolepool.weights.receipts import Receipt

KEYS = [
    "actor_rollout_ref.rollout.name=old_weights_engine:OldWeightsEngine",
    "actor_rollout_ref.rollout.parity_check=false",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
]


class OldWeightsEngine(TransformersEngine):
    def __init__(self, load_model: Callable[[], PreTrainedModel], **_: Any) -> None:
        super().__init__(load_model(), max_num_seqs=64)
        self._has_weights = False

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None
    ) -> Receipt | None:
        if not self._has_weights:
            self._has_weights = version is not None
            return super().update_weights(named_tensors, version)
        for _ in named_tensors:  # read, and forgotten
            pass
        if version is not None:
            self.version = version
        return None
