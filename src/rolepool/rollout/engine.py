"""What a rollout engine is: token ids in, token ids and their log-probs out, weights replaced in place.

Owns the vocabulary that engines and their users share. Does not know any engine, nor how to tokenize.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rolepool.errors import ConfigError
from rolepool.seeds import derive_seed

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, for all requests of a call. `top_k` -1 is off; temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    do_sample: bool
    max_new_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response and belong to it; with `ignore_eos` they are tokens like any other."""

    def __post_init__(self) -> None:
        problems = []
        if self.temperature < 0:
            problems.append(f"temperature={self.temperature}: must be 0 or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.top_k < 1 and self.top_k != -1:
            problems.append(f"top_k={self.top_k}: must be 1 or more, or -1 for all tokens")
        if self.max_new_tokens < 1:
            problems.append(f"max_new_tokens={self.max_new_tokens}: must be 1 or more")
        if problems:
            raise ConfigError(problems)

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class Request:
    """One response to one prompt. Several samples of a prompt are requests that differ in seed."""

    token_ids: Sequence[int]
    seed: int
    """The sample's own: with the same weights, prompt and seed it is the same response in any company."""
    max_new_tokens: int | None = None
    """Of this request; None takes that of the `Sampling`."""


@dataclass(frozen=True, eq=False)
class Completion:
    """A response. Its numbers are arrays, as lists of all tokens of a batch take long to make; `token_ids` and
    `log_probs` are lists, for who looks at single ones."""

    token_array: npt.NDArray[np.int64]
    """The stop token included."""
    log_prob_array: npt.NDArray[np.float32]
    """One per token, under the distribution it was sampled from: after temperature, top-k and top-p. Greedy decoding
    samples from no distribution; its log-probs are those of the plain softmax of the logits."""
    finish_reason: FinishReason
    weights_version: int

    @property
    def token_ids(self) -> list[int]:
        return list(self.token_array.tolist())

    @property
    def log_probs(self) -> list[float]:
        return list(self.log_prob_array.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion):
            return NotImplemented
        is_same_text = np.array_equal(self.token_array, other.token_array)
        is_same = is_same_text and np.array_equal(self.log_prob_array, other.log_prob_array)
        return is_same and (self.finish_reason, self.weights_version) == (other.finish_reason, other.weights_version)


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; settings are checked against it before a run starts."""

    top_p: bool
    top_k: bool
    per_sample_seeds: bool
    sleep: bool
    shared_weights: bool
    """Works on the trainer's own weights, so that `update_weights` moves no data."""


@dataclass(frozen=True)
class Progress:
    """How far a `generate` is."""

    num_requests: int
    num_finished: int
    num_running: int
    num_tokens: int
    """Generated so far, by finished and running requests."""


class Engine(Protocol):
    """Generates. One call at a time."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int:
        """Of the weights it generates with."""
        ...

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[Completion]:
        """One completion per request, in the order of requests. `progress` is called now and then, and at the end."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int | None) -> None:
        """Take new weights, full tensors under their Hugging Face names, streamed, in place.

        They may come in several calls, of which the last gives the version. Names that are missing, double or unknown
        and shapes that do not fit are refused by name. Whatever was computed with the old weights is forgotten. An
        engine with shared weights looks at `version` only.
        """
        ...

    def sleep(self) -> None:
        """Give back the memory that is only needed to generate."""
        ...

    def wake(self) -> None:
        """Take it again."""
        ...


def sample_seed(run_seed: int, prompt_id: int | str, sample_index: int, *more: int | str) -> int:
    """Seed of a sample: depends on what it is a sample of (and on `more`, such as the step), never on where it runs."""
    return derive_seed("sample", *(_plain(part) for part in (run_seed, prompt_id, sample_index, *more)))


def _plain(part: int | str) -> int | str:
    """Without numpy's types, which hash differently from the same numbers of Python."""
    return int(part) if isinstance(part, Integral) else str(part)
