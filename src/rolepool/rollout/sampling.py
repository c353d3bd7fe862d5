"""How a token is chosen from logits: temperature, top-k, top-p, and the random numbers of a sample.

The random numbers are a hash of the sample's seed and of its step, so a sample depends only on its
own row and not on the batch. One uniform number for each token inverts the cumulative distribution.
CPU and GPU (`sampling_kernels`) have the same rule and the same numbers, so they draw the same
token from the same logits, unless rounding decides. Tensors in, tensors out, and the host never
waits for the GPU.
"""

from numbers import Integral

import torch
from torch import Tensor

from rolepool.rollout.engine import Sampling
from rolepool.seeds import derive_seed

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2**64 divided by the golden ratio, as a signed number: its multiples spread over all 64-bit
numbers."""
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
"""The multipliers of SplitMix64, as signed numbers, because torch has no unsigned arithmetic."""
_UNIFORM_BITS = 48
"""Random bits of a uniform number. Float64 represents all of them and half a step more, so that the
number is never 0 or 1."""


def sample_seed(
    run_seed: int,
    prompt_id: int | str,
    sample_index: int,
    *others: int | str,
) -> int:
    """Seed of a sample. It depends on run, prompt and sample (and on `others`, such as the step),
    and not on where the sample is generated."""
    parts = (run_seed, prompt_id, sample_index, *others)
    plain_parts = [_as_plain(part) for part in parts]
    return derive_seed("sample", *plain_parts)


def _as_plain(part: int | str) -> int | str:
    """Python's own int or str, because numpy's numbers and strings have another hash."""
    if isinstance(part, Integral):
        return int(part)
    return str(part)


def log_prob_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which log-probs are computed from logits of this dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def filter_logits(logits_bv: Tensor, sampling: Sampling) -> Tensor:
    """Logits of the distribution to sample from; tokens that top-k and top-p exclude are -inf.

    Top-k also keeps tokens that are as likely as the k-th. Top-p keeps the smallest set of most
    likely tokens whose probability exceeds top_p, tokens as likely as the last of them, and at
    least one.
    """
    scores_bv = logits_bv.to(log_prob_dtype(logits_bv.dtype))
    if sampling.temperature != 1:
        scores_bv = scores_bv / sampling.temperature
    num_tokens = scores_bv.shape[-1]
    if 0 < sampling.top_k < num_tokens:
        largest_bk = scores_bv.topk(sampling.top_k, dim=-1).values
        least_b1 = largest_bk[:, -1:]
        scores_bv = scores_bv.masked_fill(scores_bv < least_b1, -torch.inf)
    if sampling.top_p < 1:
        ascending_bv = scores_bv.sort(dim=-1).values
        is_dropped_bv = ascending_bv.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        # The most likely token stays, also if rounding says that it is not needed.
        is_dropped_bv[:, -1] = False
        least_b1 = ascending_bv.masked_fill(is_dropped_bv, torch.inf).amin(dim=-1, keepdim=True)
        scores_bv = scores_bv.masked_fill(scores_bv < least_b1, -torch.inf)
    return scores_bv


def choose(
    logits_bv: Tensor,
    streams_b: Tensor,
    steps_b: Tensor,
    sampling: Sampling,
) -> tuple[Tensor, Tensor]:
    """The next token of each row, and its log-prob."""
    if logits_bv.is_cuda:
        return _choose_on_gpu(logits_bv, streams_b, steps_b, sampling)
    if sampling.is_greedy:
        scores_bv = logits_bv.to(log_prob_dtype(logits_bv.dtype))
        best_b, token_b = scores_bv.max(dim=-1)
        return token_b, best_b - scores_bv.logsumexp(dim=-1)

    probs_bv = filter_logits(logits_bv, sampling).softmax(dim=-1)
    cumulative_bv = probs_bv.cumsum(dim=-1, dtype=torch.float64)
    # In float64 and scaled by the last entry, so that rounding cannot select a token of
    # probability 0.
    uniform_b1 = uniforms(streams_b, steps_b)[:, None]
    target_b1 = uniform_b1 * cumulative_bv[:, -1:]
    last_token = probs_bv.shape[-1] - 1
    token_b1 = torch.searchsorted(cumulative_bv, target_b1, right=True)
    token_b1 = token_b1.clamp_(max=last_token)
    prob_b = probs_bv.gather(1, token_b1)[:, 0]
    return token_b1[:, 0], prob_b.log_()


def _choose_on_gpu(
    logits_bv: Tensor,
    streams_b: Tensor,
    steps_b: Tensor,
    sampling: Sampling,
) -> tuple[Tensor, Tensor]:
    from rolepool.rollout import sampling_kernels  # here, because it needs Triton

    if sampling.is_greedy:
        # Its log-prob is that of the softmax of the logits themselves.
        return sampling_kernels.draw(
            logits_bv,
            streams_b,
            steps_b,
            1.0,
            greedy=True,
            floors_b=None,
        )
    temperature = sampling.temperature
    floors_b = None
    if sampling.top_k > 0 or sampling.top_p < 1:
        floors_b = sampling_kernels.find_floors(
            logits_bv,
            temperature,
            sampling.top_k,
            sampling.top_p,
        )
    return sampling_kernels.draw(
        logits_bv,
        streams_b,
        steps_b,
        temperature,
        greedy=False,
        floors_b=floors_b,
    )


def seed_streams(seeds: list[int]) -> Tensor:
    """The initial state of each sample's random numbers."""
    signed = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
    return _mix(torch.tensor(signed, dtype=torch.int64))


def uniforms(streams_b: Tensor, steps_b: Tensor) -> Tensor:
    """One number strictly between 0 and 1 for each sample at its step, in float64."""
    bits_b = _mix(streams_b + (steps_b + 1) * _GOLDEN)
    upper_bits_b = _shift_right(bits_b, 64 - _UNIFORM_BITS)
    return (upper_bits_b.double() + 0.5) * 2.0**-_UNIFORM_BITS


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64: a bijection in which every input bit affects every output
    bit."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """A logical shift: the sign bit is not repeated."""
    remaining_bits = (1 << (64 - num_bits)) - 1
    return (x >> num_bits) & remaining_bits
