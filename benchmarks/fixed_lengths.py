"""An extension for runs whose responses have fixed lengths: nine of ten are short, and every tenth
is eight times longer and takes all of `data.max_response_length`.

The native engine is as it is, and so are its weights and their transfer. Only the limits of its
requests are set here, so the run needs `actor_rollout_ref.rollout.ignore_eos=true`. A call has
exactly this share of long responses. Which ones they are depends on the seeds of the samples, so
runs with the same seed agree about it, also if their weights differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rolepool.rollout.engine import Completion, Request, Sampling
from rolepool.rollout.native import NativeEngine

ONE_LONG_OF = 10
TIMES_LONGER = 8

_generate = NativeEngine.generate


def with_fixed_lengths(requests: Sequence[Request], sampling: Sampling) -> list[Request]:
    """The same requests with the limits of this distribution. At least one of them is long."""
    by_seed = sorted(range(len(requests)), key=lambda index: requests[index].seed)
    num_long = max(1, round(len(requests) / ONE_LONG_OF))
    is_long = set(by_seed[:num_long])
    limited: list[Request] = []
    for index, request in enumerate(requests):
        limit = sampling.max_new_tokens
        if index not in is_long:
            limit = max(1, limit // TIMES_LONGER)
        limited.append(replace(request, max_new_tokens=limit))
    return limited


def generate(
    self: NativeEngine, requests: Sequence[Request], sampling: Sampling
) -> list[Completion]:
    if not requests:
        return _generate(self, requests, sampling)
    return _generate(self, with_fixed_lengths(requests, sampling), sampling)


NativeEngine.generate = generate  # type: ignore[method-assign]
