"""The interface of rollout engines: token ids in, token ids and their log-probs out, weights
replaced in place.

Owns the types that engines and their callers share, and what engines with a model of their own
share: taking new weights as a stream, versions, sleeping, completions, and how a token is chosen
from logits. Does not know how an engine computes logits, nor how to tokenize.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolepool.errors import RolepoolError
from rolepool.rollout.tensor_parallel import Shard, WeightStream
from rolepool.seeds import derive_seed


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


@dataclass(frozen=True, eq=False)
class Completion:
    """A response. Its numbers are arrays, because creating lists of all tokens of a batch is
    slow."""

    token_ids: npt.NDArray[np.int64]
    """Includes the stop token."""
    log_probs: npt.NDArray[np.float32]
    """One per token, under the distribution it was sampled from: after temperature, top-k and
    top-p. With greedy decoding they are those of the softmax of the logits."""
    finish_reason: Literal["stop", "length"]
    weights_version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Completion) and all(
            map(np.array_equal, vars(self).values(), vars(other).values())
        )


ABILITIES = {
    "per_sample_seeds": "responses depend on the batch, so another placement or a resumed run gets other responses",
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

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in the order of requests."""

    @contextmanager
    def session(self, sampling: Sampling, num_requests: int, max_tokens: int) -> Iterator[Session]:
        """A session of at most `num_requests` requests at a time, each of at most `max_tokens`
        tokens with its prompt. This one generates all requests that wait as one batch; an engine
        can do better."""
        yield _BatchSession(self, sampling)

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None
    ) -> None:
        """Copy new weights in place: whole tensors under their Hugging Face names, as a stream.

        They may come in several calls; the last call gives the version. A missing, repeated or
        unknown name or a wrong shape is an error that names the tensor. Everything computed with
        the old weights is dropped. An engine with shared weights uses only `version`.
        """

    def sleep(self) -> None:
        """Free the memory that only generation needs."""

    def wake(self) -> None:
        """Allow `generate` again, which allocates that memory."""


class _BatchSession:
    """A session of an engine that can only generate batches."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._waiting: list[Request] = []
        self._first = 0
        """The number of the first request that waits."""

    def submit(self, requests: Sequence[Request]) -> Sequence[int]:
        start = self._first + len(self._waiting)
        self._waiting.extend(requests)
        return range(start, start + len(requests))

    def step(self) -> list[tuple[int, Completion]]:
        requests, first = self._waiting, self._first
        self._waiting, self._first = [], first + len(requests)
        return list(enumerate(self._engine.generate(requests, self._sampling), start=first))


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

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None
    ) -> None:
        if not self.shared_weights:
            stream = self._arriving or WeightStream(self.model, self.shard)
            self._arriving = WeightStream(
                self.model, self.shard
            )  # if copying fails, the next update starts again
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
        """The completion of these numbers, which end with one of `stops` or at the limit of the
        request."""
        if not np.isfinite(log_probs).all():
            problem = f"the model's logits are not finite (weights version {self.version})"
            raise RolepoolError(f"{problem}: its weights contain NaN or have diverged")
        numbers = np.asarray(tokens, dtype=np.int64), np.asarray(log_probs, dtype=np.float32)
        return Completion(*numbers, "stop" if int(tokens[-1]) in stops else "length", self.version)


def sample_seed(run_seed: int, prompt_id: int | str, sample_index: int, *more: int | str) -> int:
    """Seed of a sample: depends on run, prompt, sample (and on `more`, such as the step), not on
    where it runs."""
    # As Python's int and str, because numpy's numbers hash differently.
    parts = (run_seed, prompt_id, sample_index, *more)
    return derive_seed(
        "sample", *(int(part) if isinstance(part, Integral) else str(part) for part in parts)
    )


# From logits to tokens: temperature, top-k, top-p, and random numbers that are a hash of (sample,
# step)
#
# A sample depends only on its own row. A CPU inverts the cumulative distribution at one uniform
# number. A GPU draws a random number for every token and takes the first in an exponential race,
# which reads the logits once. So CPU and GPU sample different tokens from one seed. Tensors in,
# tensors out, no host synchronization.

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2**64 divided by the golden ratio, as a signed number: its multiples spread over all 64-bit
numbers."""
_MULTIPLIER_1, _MULTIPLIER_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_UNIFORM_BITS = 48


def filter_logits(logits_bv: Tensor, sampling: Sampling) -> Tensor:
    """Logits of the distribution to sample from; tokens that top-k and top-p exclude are -inf.

    Top-k also keeps tokens that are as likely as the k-th. Top-p keeps the smallest set of most
    likely tokens whose probability exceeds top_p, tokens as likely as the last of them, and at
    least one.
    """
    scores_bv = logits_bv.float()
    if sampling.temperature != 1:
        scores_bv = scores_bv / sampling.temperature
    num_tokens = scores_bv.shape[-1]
    if 0 < sampling.top_k < num_tokens:
        least_b1 = scores_bv.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores_bv = scores_bv.masked_fill(scores_bv < least_b1, -torch.inf)
    if sampling.top_p < 1:
        ascending_bv = scores_bv.sort(dim=-1).values
        dropped_bv = ascending_bv.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        dropped_bv[:, -1] = False
        least_b1 = ascending_bv.masked_fill(dropped_bv, torch.inf).amin(dim=-1, keepdim=True)
        scores_bv = scores_bv.masked_fill(scores_bv < least_b1, -torch.inf)
    return scores_bv


def seed_streams(seeds: list[int]) -> Tensor:
    """The initial state of each sample's random numbers."""
    signed = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
    return _mix(torch.tensor(signed, dtype=torch.int64))


def uniforms(streams_b: Tensor, steps_b: Tensor) -> Tensor:
    """One number strictly between 0 and 1 for each sample at its step, in float64."""
    bits_b = _mix(streams_b + (steps_b + 1) * _GOLDEN)
    return (_shift_right(bits_b, 64 - _UNIFORM_BITS).double() + 0.5) * 2.0**-_UNIFORM_BITS


def choose(
    logits_bv: Tensor, streams_b: Tensor, steps_b: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs."""
    if logits_bv.is_cuda:
        from rolepool.rollout import kernels  # needs Triton

        temperature, floors_b = (1.0 if sampling.is_greedy else sampling.temperature), None
        if not sampling.is_greedy and (sampling.top_k > 0 or sampling.top_p < 1):
            floors_b = kernels.find_floors(logits_bv, temperature, sampling.top_k, sampling.top_p)
        return kernels.race(
            logits_bv, streams_b, steps_b, temperature, sampling.is_greedy, floors_b
        )
    if sampling.is_greedy:
        scores_bv = logits_bv.float()
        best, token_b = scores_bv.max(dim=-1)
        return token_b, best - scores_bv.logsumexp(dim=-1)
    probs_bv = filter_logits(logits_bv, sampling).softmax(dim=-1)
    # In float64 and scaled by its last entry, so that rounding cannot select a token of probability
    # 0.
    cumulative_bv = probs_bv.cumsum(dim=-1, dtype=torch.float64)
    target_b1 = uniforms(streams_b, steps_b)[:, None] * cumulative_bv[:, -1:]
    token_b1 = torch.searchsorted(cumulative_bv, target_b1, right=True).clamp_(
        max=probs_bv.shape[-1] - 1
    )
    return token_b1[:, 0], probs_bv.gather(1, token_b1)[:, 0].log_()


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64: a bijection in which every input bit affects every output
    bit."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """A logical shift: the sign bit is not repeated."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
