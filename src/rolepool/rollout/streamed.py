"""What engines with a model of their own share: taking new weights as a stream, versions, and sleeping.

Does not know how an engine generates.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from rolepool.errors import RolepoolError
from rolepool.rollout.tensor_parallel import WeightStream


class StreamedEngine:
    """Checks the weights that arrive against those of `model`, and copies them into it."""

    shared_weights = False

    def __init__(self, model: nn.Module) -> None:
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
            stream = self._arriving or WeightStream(self.model, None)
            self._arriving = WeightStream(self.model, None)  # if copying fails, the next update starts again
            stream.take(self.received(named_tensors))
            if version is not None:
                stream.end()
                self.have_received()
            self._arriving = stream if version is None else None
        if version is not None:
            self.version = version

    def received(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The tensors of one call. An engine that generates in another process also sends them there."""
        return named_tensors

    def have_received(self) -> None:
        """All weights have arrived and were checked."""

    def sleep(self) -> None:
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False
