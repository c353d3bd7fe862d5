"""From logits to tokens: temperature, top-k, top-p, and random numbers that are a hash of (sample, step).

A sample depends only on its own row. A CPU inverts the cumulative distribution at one uniform number. A GPU draws a
random number for every token and takes the first in an exponential race, which reads the logits once. So CPU and GPU
sample different tokens from one seed. Tensors in, tensors out, no host synchronization.
"""

import torch
from torch import Tensor

from rolepool.rollout.engine import Sampling

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2**64 divided by the golden ratio, as a signed number: its multiples spread over all 64-bit numbers."""
_MULTIPLIER_1, _MULTIPLIER_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_UNIFORM_BITS = 48


def filter_logits(logits_bv: Tensor, sampling: Sampling) -> Tensor:
    """Logits of the distribution to sample from; tokens that top-k and top-p exclude are -inf.

    Top-k also keeps tokens that are as likely as the k-th. Top-p keeps the smallest set of most likely tokens whose
    probability exceeds top_p, tokens as likely as the last of them, and at least one.
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


def choose(logits_bv: Tensor, streams_b: Tensor, steps_b: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs."""
    if logits_bv.is_cuda:
        from rolepool.rollout import kernels  # needs Triton

        temperature, floors_b = (1.0 if sampling.is_greedy else sampling.temperature), None
        if not sampling.is_greedy and (sampling.top_k > 0 or sampling.top_p < 1):
            floors_b = kernels.find_floors(logits_bv, temperature, sampling.top_k, sampling.top_p)
        return kernels.race(logits_bv, streams_b, steps_b, temperature, sampling.is_greedy, floors_b)
    if sampling.is_greedy:
        scores_bv = logits_bv.float()
        best, token_b = scores_bv.max(dim=-1)
        return token_b, best - scores_bv.logsumexp(dim=-1)
    probs_bv = filter_logits(logits_bv, sampling).softmax(dim=-1)
    # In float64 and scaled by its last entry, so that rounding cannot select a token of probability 0.
    cumulative_bv = probs_bv.cumsum(dim=-1, dtype=torch.float64)
    target_b1 = uniforms(streams_b, steps_b)[:, None] * cumulative_bv[:, -1:]
    token_b1 = torch.searchsorted(cumulative_bv, target_b1, right=True).clamp_(max=probs_bv.shape[-1] - 1)
    return token_b1[:, 0], probs_bv.gather(1, token_b1)[:, 0].log_()


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64: a bijection in which every input bit affects every output bit."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """A logical shift: the sign bit is not repeated."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
