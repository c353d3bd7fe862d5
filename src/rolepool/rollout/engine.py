"""The interface of rollout engines: token ids in, token ids and their log-probs out, weights
replaced in place.

Owns the types that engines and their callers share, and what engines with a model of their own
share: taking new weights as a stream, versions, sleeping and completions. Does not know how an
engine computes logits, how a token is chosen from them (`sampling`), nor how to tokenize.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rolepool.errors import DataError, RolepoolError, first_few
from rolepool.rollout.tensor_parallel import HfModule, Shard, WeightStream
from rolepool.rollout.weight_rows import RowStream
from rolepool.weights.digests import Digest
from rolepool.weights.receipts import Receipt
from rolepool.weights.regions import Region, whole_region
from rolepool.weights.rows import Exported

CopyInto = Callable[[Mapping[str, Tensor]], dict[str, Digest]]
"""Copies new weights into tensors by name. Returns the digests of what it has copied."""


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, for all requests of a call. `top_k` -1 keeps all tokens; temperature 0
    is greedy."""

    temperature: float
    top_p: float
    top_k: int
    do_sample: bool
    max_new_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response and are part of it; `ignore_eos` treats them like any other
    token."""

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class Request:
    """One response to one prompt. Several samples of a prompt are requests with different seeds."""

    token_ids: Sequence[int]
    seed: int
    """Seed of this sample: the same weights, prompt and seed give the same response in any
    batch."""
    max_new_tokens: int | None = None
    """Limit of this request; None uses that of the `Sampling`."""
    conversation: int | None = None
    """Requests with the same number are turns of one conversation. An engine may keep what it
    computed for one turn and use it for the next, as far as both begin with the same tokens."""

    def num_new(self, sampling: Sampling) -> int:
        """The largest number of tokens that it samples."""
        if self.max_new_tokens is None:
            return sampling.max_new_tokens
        return self.max_new_tokens


@dataclass(frozen=True, eq=False)
class Completion:
    """A response. Its numbers are arrays, because creating lists of all tokens of a batch is
    slow."""

    token_ids: npt.NDArray[np.int64]
    """Includes the stop token."""
    log_probs: npt.NDArray[np.floating]
    """One per token, under the distribution it was sampled from: after temperature, top-k and
    top-p. With greedy decoding they are those of the softmax of the logits."""
    finish_reason: Literal["stop", "length"]
    weights_version: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion):
            return False
        own_values = vars(self).values()
        other_values = vars(other).values()
        return all(map(np.array_equal, own_values, other_values))


ABILITIES = {
    "per_sample_seeds": (
        "responses depend on the batch, so another placement or a resumed run gets other responses"
    ),
    "sleep": "the engine's memory stays allocated while other roles compute",
}
"""What an engine may be able to do, and what is lost without it."""


class Session(Protocol):
    """Requests that join while others are generated."""

    def submit(self, requests: Sequence[Request]) -> Sequence[int]:
        """Add requests. Returns their numbers."""

    def step(self) -> list[tuple[int, Completion]]:
        """Generate for a while. Returns the requests that have ended, by number."""


class Engine(Protocol):
    """Generates responses, one call at a time. A subclass inherits `session`."""

    abilities: Collection[str]
    """Those of `ABILITIES` that it has. A run says what is lost without the others."""

    shared_weights: bool
    """Whether it uses the trainer's own weights, so that `update_weights` moves no data."""
    version: int
    """Version of the weights that it generates with."""

    def await_start(self, wait_s: float) -> str | None:
        """Wait at most so long until the engine can be used. Returns what it still waits for, such
        as a process that starts; None if it can be used."""
        return None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in the order of requests."""

    @contextmanager
    def session(
        self,
        sampling: Sampling,
        num_requests: int,
        max_tokens: int,
    ) -> Iterator[Session]:
        """A session of at most `num_requests` requests at a time, each of at most `max_tokens`
        tokens with its prompt. This one generates all requests that wait as one batch; an engine
        can do better."""
        yield _BatchSession(self, sampling)

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int | None,
    ) -> Receipt | None:
        """Copy new weights in place: whole tensors under their Hugging Face names, as a stream.

        They may come in several calls; the last call gives the version. A missing, repeated or
        unknown name or a wrong shape is an error that names the tensor. Everything computed with
        the old weights is dropped. An engine with shared weights uses only `version`.

        The last call returns a receipt with the digests of all weights of the update. The run
        compares them with what was sent. Without a receipt (None) nothing is compared.
        """

    def sleep(self) -> None:
        """Free the memory that only generation needs."""

    def wake(self) -> None:
        """Allow `generate` again, which allocates that memory."""


class _BatchSession:
    """A session of an engine that can only generate batches."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine = engine
        self._sampling = sampling
        self._waiting: list[Request] = []
        self._first = 0
        """The number of the first request that waits."""

    def submit(self, requests: Sequence[Request]) -> Sequence[int]:
        start = self._first + len(self._waiting)
        self._waiting.extend(requests)
        return range(start, start + len(requests))

    def step(self) -> list[tuple[int, Completion]]:
        requests = self._waiting
        first = self._first
        self._waiting = []
        self._first += len(requests)
        completions = self._engine.generate(requests, self._sampling)
        return list(enumerate(completions, start=first))


class StreamedEngine(Engine):
    """New weights are copied into `model` as they arrive."""

    abilities: Collection[str] = frozenset(ABILITIES)
    shared_weights = False
    shard: Shard | None = None
    """The part of the model that this rank has; None is all of it."""

    def __init__(self, model: HfModule) -> None:
        self.model = model
        self.version = 0
        self._asleep = False
        self._arriving: WeightStream | RowStream | None = None
        """An update of the weights that has not ended, or that failed."""

    def raise_if_not_ready(self) -> None:
        """Raise an error if the engine cannot generate now."""
        if self._asleep:
            raise RolepoolError("the rollout engine is asleep: wake it before it generates")
        if self._arriving is not None:
            problem = "the last weight update failed halfway or has not ended"
            raise RolepoolError(f"{problem}: update the weights before generating")

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int | None,
    ) -> Receipt | None:
        if self.shared_weights:
            if version is None:
                return None
            self.version = version
            return Receipt(version, is_shared=True)
        if self._arriving is None:
            self.begin_update()
        stream = self._arriving
        if not isinstance(stream, WeightStream):
            stream = WeightStream(self.model, self.shard)
        # If copying fails, the next update starts again.
        self._arriving = WeightStream(self.model, self.shard)
        stream.take(named_tensors)
        if version is None:
            self._arriving = stream
            return None
        digests = stream.end()
        self._end_update(digests, version)
        return Receipt(version, digests)

    # Weights of which this rank takes only its part

    def held_regions(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Region]:
        """The part of each weight that this rank holds, from the shapes of all weights of the
        actor. Raises DataError if these are not the weights of this model."""
        targets = self._targets()
        regions = {name: self._region_of(name, shape, targets) for name, shape in shapes.items()}
        # Tied weights come with one of their names.
        arriving = {id(targets[name]) for name in shapes}
        missing = [name for name, target in targets.items() if id(target) not in arriving]
        if missing:
            raise DataError(
                f"weights: {len(missing)} of {len(targets)} are missing: {first_few(missing, 5)}"
            )
        return regions

    def _targets(self) -> dict[str, Tensor]:
        """The tensors of the model by name. Tied weights are one object with several names."""
        targets: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        return targets

    def _region_of(self, name: str, shape: Sequence[int], targets: Mapping[str, Tensor]) -> Region:
        """The part of a weight of this shape that this rank holds."""
        if name not in targets:
            raise DataError(f"weights: {name} is not a weight of this model")
        own_shape = targets[name].shape
        if self.shard is not None:
            own_shape = self.shard.whole_shape(name, own_shape)
        if tuple(own_shape) != tuple(shape):
            raise DataError(
                f"weights: {name} has shape {list(shape)}, the model's {list(own_shape)}"
            )
        return whole_region(shape) if self.shard is None else self.shard.region(name, shape)

    def take_rows(self, exports: Sequence[Exported], version: int | None) -> Receipt | None:
        """Copy this rank's part of some weights, whose rows several ranks have exported. The last
        call gives the version, and returns the receipt."""
        if self._arriving is None:
            self.begin_update()
        targets = self._targets()
        stream = self._arriving if isinstance(self._arriving, RowStream) else RowStream(targets)
        # If copying fails, the next update starts again.
        self._arriving = RowStream(targets)
        held: dict[str, Region] = {}
        for exported in exports:
            for name, part in exported.items():
                held[name] = self._region_of(name, part.shape, targets)
        stream.take(exports, held)
        if version is None:
            self._arriving = stream
            return None
        digests = stream.end()
        self._end_update(digests, version)
        return Receipt(version, digests)

    def receive_weights(self, copy_into: CopyInto, version: int) -> Receipt:
        """Let a function copy new weights into the model. It gets the tensors by name, and returns
        the digests of what they have then. Until it has ended well, the engine cannot generate."""
        self.begin_update()
        # As with a stream: after an error, only another update makes the engine ready.
        targets = self._targets()
        self._arriving = RowStream(targets)
        digests = copy_into({name: target.detach() for name, target in targets.items()})
        self._end_update(digests, version)
        return Receipt(version, digests)

    def begin_update(self) -> None:
        """New weights are about to arrive."""

    def _end_update(self, digests: Mapping[str, Digest], version: int) -> None:
        self.have_arrived(digests)
        self._arriving = None
        self.version = version

    def have_arrived(self, digests: Mapping[str, Digest]) -> None:
        """All new weights are in the model. `digests` are theirs."""

    def sleep(self) -> None:
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def completion(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int64],
        log_probs: Sequence[float] | npt.NDArray[np.floating],
        stops: Container[int],
    ) -> Completion:
        """The completion of these numbers, which end with one of `stops` or at the limit of the
        request."""
        if not np.isfinite(log_probs).all():
            problem = f"the model's logits are not finite (weights version {self.version})"
            raise RolepoolError(f"{problem}: its weights contain NaN or have diverged")
        if not isinstance(log_probs, np.ndarray):
            log_probs = np.array(log_probs, dtype=np.float32)
        return Completion(
            token_ids=np.asarray(tokens, dtype=np.int64),
            log_probs=log_probs,
            finish_reason="stop" if int(tokens[-1]) in stops else "length",
            weights_version=self.version,
        )
