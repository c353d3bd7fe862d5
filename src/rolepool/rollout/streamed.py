"""What engines with a model of their own share: taking new weights as a stream, versions, sleeping, and completions.

Does not know how an engine generates.
"""

from collections.abc import Collection, Container, Iterable
from typing import Any

import numpy as np
from torch import Tensor

from rolepool.errors import RolepoolError
from rolepool.rollout.engine import ABILITIES, Completion, Engine
from rolepool.rollout.tensor_parallel import Shard, WeightStream


class StreamedEngine(Engine):
    """New weights are copied into `model` as they arrive."""

    abilities: Collection[str] = frozenset(ABILITIES)
    shared_weights = False
    shard: Shard | None = None
    """The part of the model that this rank has; None is all of it."""

    def __init__(self, model: Any) -> None:
        self.model, self.version = model, 0
        self._asleep = False
        self._arriving: WeightStream | None = None
        """An update of the weights that has not ended, or that failed."""

    def raise_if_not_ready(self) -> None:
        """Raise an error if the engine cannot generate now."""
        if self._asleep:
            raise RolepoolError("the rollout engine is asleep: wake it before it generates")
        if self._arriving is not None:
            problem = "the last weight update failed halfway or has not ended"
            raise RolepoolError(f"{problem}: update the weights before generating")

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None) -> None:
        if not self.shared_weights:
            stream = self._arriving or WeightStream(self.model, self.shard)
            self._arriving = WeightStream(self.model, self.shard)  # if copying fails, the next update starts again
            stream.take(named_tensors)
            if version is not None:
                stream.end()
                self.have_arrived()
            self._arriving = stream if version is None else None
        if version is not None:
            self.version = version

    def have_arrived(self) -> None:
        """All new weights are in the model."""

    def sleep(self) -> None:
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def completion(self, tokens: Any, log_probs: Any, stops: Container[int]) -> Completion:
        """The completion of these numbers, which end with one of `stops` or at the limit of the request."""
        if not np.isfinite(log_probs).all():
            problem = f"the model's logits are not finite (weights version {self.version})"
            raise RolepoolError(f"{problem}: its weights contain NaN or have diverged")
        numbers = np.asarray(tokens, dtype=np.int64), np.asarray(log_probs, dtype=np.float32)
        return Completion(*numbers, "stop" if int(tokens[-1]) in stops else "length", self.version)
