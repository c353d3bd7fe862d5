"""Checks of the Triton kernels against plain torch, on any device.

Tests on a GPU call them with "cuda". Run as a program, this file checks the kernels on a CPU with
Triton's interpreter, which needs TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rolepool.rollout import Sampling
from rolepool.rollout.decoder import UNLIMITED
from rolepool.rollout.kv_cache import CacheShape, DecodeBatch, SlotCache
from rolepool.rollout.sampling import choose, filter_logits, log_prob_dtype, seed_streams

SAMPLED = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    do_sample=True,
    max_new_tokens=24,
    ignore_eos=True,
    stop_token_ids=(),
)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_k": 20},
    {"top_p": 0.9, "temperature": 1.5},
    {"top_k": 50, "top_p": 0.7},
)
DTYPES = (torch.float32, torch.bfloat16)


def choose_by_kernels(
    logits_bv: Tensor, streams_b: Tensor, steps_b: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    from rolepool.rollout.sampling import _choose_on_gpu

    return _choose_on_gpu(logits_bv, streams_b, steps_b, sampling)


# Attention


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Rows that each attend to a slot of a cache."""

    num_rows: int
    group: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    num_keys: int = 2
    length: int = 700
    window: int = UNLIMITED
    has_norms: bool = False


class AttentionInputs:
    """Random inputs of a case, on a device. The cache has NaN where no token is yet."""

    def __init__(self, case: AttentionCase, device: str) -> None:
        self.case = case
        torch.manual_seed(0)
        num_slots = case.num_rows + 3
        self.positions = torch.randint(0, case.length, (case.num_rows,))
        self.positions[-1] = case.length - 1
        self.positions[case.num_rows // 2] = 0
        self.slots = torch.randperm(num_slots)[: case.num_rows]
        size = (2, 2, num_slots, case.num_keys, case.length, case.head_dim)
        self.cache = torch.full(size, torch.nan, dtype=case.dtype)
        for slot, position in zip(self.slots.tolist(), self.positions.tolist(), strict=True):
            earlier = self.cache[:, :, slot, :, :position]
            earlier.copy_(torch.randn(earlier.shape))
        num_all = (case.group + 2) * case.num_keys
        self.qkv = torch.randn(case.num_rows, num_all, case.head_dim).to(case.dtype)
        angles = torch.rand(case.length, case.head_dim // 2) * 6
        self.cos = angles.cos().repeat(1, 2).to(case.dtype)
        self.signed_sin = torch.cat((-angles.sin(), angles.sin()), dim=1).to(case.dtype)
        self.norms: tuple[Tensor, Tensor, float] | None = None
        if case.has_norms:
            query_weight, key_weight = (torch.rand(2, case.head_dim) + 0.5).to(device, case.dtype)
            self.norms = (query_weight, key_weight, 1e-3)
        for name in ("positions", "slots", "cache", "qkv", "cos", "signed_sin"):
            setattr(self, name, getattr(self, name).to(device))
        from rolepool.rollout.kernels import make_counters

        self.counters = make_counters(torch.device(device))
        keys, values = self.cache
        place = [keys.data_ptr(), values.data_ptr(), num_slots, case.length]
        self.place = torch.tensor(place, device=device)

    @property
    def heads(self) -> Any:
        from rolepool.rollout.kernels import Heads

        return Heads(
            num_queries=self.case.group * self.case.num_keys,
            num_keys=self.case.num_keys,
            cos=self.cos,
            signed_sin=self.signed_sin,
            counters=self.counters,
        )

    def mixed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed and rotated by torch."""
        case = self.case
        num_queries = case.group * case.num_keys
        num_turned = num_queries + case.num_keys
        qk = self.qkv[:, :num_turned].double()
        if self.norms is not None:
            query_weight, key_weight, eps = self.norms
            weights = [query_weight] * num_queries + [key_weight] * case.num_keys
            factor = (qk.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
            qk = (qk * factor * torch.stack(weights)).to(case.dtype).double()
        cos = self.cos[self.positions][:, None].double()
        signed_sin = self.signed_sin[self.positions][:, None].double()
        turned = (qk * cos + qk.roll(case.head_dim // 2, dims=-1) * signed_sin).to(case.dtype)
        return turned[:, :num_queries], turned[:, num_queries:], self.qkv[:, num_turned:]

    def cache_after(self) -> Tensor:
        """The cache with the new tokens of layer 1."""
        _, keys, values = self.mixed()
        cache = self.cache.clone()
        cache[0, 1, self.slots, :, self.positions] = keys
        cache[1, 1, self.slots, :, self.positions] = values
        return cache

    def expected(self) -> Tensor:
        """What torch computes in float64."""
        case = self.case
        keys, values = self.cache_after()[:, 1, self.slots]
        seen = torch.arange(case.length, device=keys.device)
        visible = seen <= self.positions[:, None]
        visible &= seen > self.positions[:, None] - case.window
        outputs = F.scaled_dot_product_attention(
            self.mixed()[0][:, :, None].double(),
            keys.nan_to_num().repeat_interleave(case.group, 1).double(),
            values.nan_to_num().repeat_interleave(case.group, 1).double(),
            attn_mask=visible[:, None, None],
        )
        return outputs[:, :, 0].flatten(1)


def _largest_error(got: Tensor, expected: Tensor) -> float:
    """Relative to numbers above 1, absolute for others. NaN must be at the same places."""
    assert torch.equal(got.isnan(), expected.isnan())
    expected = expected.double().nan_to_num()
    difference = got.double().nan_to_num() - expected
    return float((difference / expected.abs().clamp(min=1)).abs().max())


def _tolerance(case: AttentionCase) -> float:
    if case.dtype.itemsize == 2:
        return 2e-2
    # A GPU approximates the square root of a norm.
    return 3e-5 if case.has_norms else 1e-5


def check_attention(device: str, case: AttentionCase) -> float:
    """Outputs and the cache afterwards; returns the error of outputs."""
    from rolepool.rollout import kernels

    inputs = AttentionInputs(case, device)
    expected, cache_after = inputs.expected(), inputs.cache_after()
    qkv_before = inputs.qkv.clone()
    where = (inputs.positions, inputs.slots, inputs.place, 1)
    # Twice, because a launch must leave its counters as it found them.
    for _ in range(2):
        outputs = kernels.attend(
            inputs.qkv, inputs.heads, inputs.norms, where, case.window, case.head_dim**-0.5
        )
        assert not inputs.counters.any()
    assert torch.equal(inputs.qkv, qkv_before)
    assert _largest_error(inputs.cache, cache_after) < _tolerance(case), case
    error = _largest_error(outputs, expected)
    assert error < _tolerance(case), f"{case}: {error:.1e}"
    return error


def check_storing(device: str, case: AttentionCase) -> None:
    """What a prefill does before its attention: the tokens of this case are those of a prompt."""
    from rolepool.rollout import kernels

    inputs = AttentionInputs(case, device)
    expected, cache_after = torch.cat(inputs.mixed(), dim=1), inputs.cache_after()
    where = (inputs.positions, inputs.slots, inputs.place, 1)
    kernels.rotate_and_store(inputs.qkv, inputs.heads, inputs.norms, where)
    assert _largest_error(inputs.qkv, expected) < _tolerance(case), case
    assert _largest_error(inputs.cache, cache_after) < _tolerance(case), case


def check_an_unused_row(device: str) -> None:
    """It reads nothing from the cache and writes nothing to it."""
    from rolepool.rollout import kernels

    for num_rows in (2, 300):  # with parts, and without
        case = AttentionCase(num_rows=num_rows, group=2, head_dim=64, length=8)
        inputs = AttentionInputs(case, device)
        inputs.cache.fill_(torch.nan)
        inputs.positions.fill_(-1)
        where = (inputs.positions, inputs.slots, inputs.place, 1)
        outputs = kernels.attend(inputs.qkv, inputs.heads, None, where, UNLIMITED, 1.0)
        kernels.rotate_and_store(inputs.qkv, inputs.heads, None, where)
        assert inputs.cache.isnan().all()
        assert not outputs.any()


def check_copies_of_slots(device: str) -> None:
    """Those that a CPU makes one after another."""
    from rolepool.rollout import kernels

    for dtype, num_heads, head_dim, length in (
        (torch.float32, 2, 48, 37),
        (torch.bfloat16, 1, 128, 300),
    ):
        shape = CacheShape(3, num_heads, head_dim, dtype, torch.device("cpu"))
        expected = SlotCache(shape, 9, length)
        torch.manual_seed(0)
        expected._keys.normal_()
        expected._values.normal_()
        keys, values = expected._keys.to(device).clone(), expected._values.to(device).clone()
        sources, targets, lengths = [2, 2, 7, 0], [3, 8, 1, 4], [length, 5, 1, length - 1]
        expected.copy_all(sources, targets, lengths)
        copies = torch.tensor([sources, targets, lengths], device=device)
        kernels.copy_slots(keys, values, copies)
        assert torch.equal(keys.cpu(), expected._keys)
        assert torch.equal(values.cpu(), expected._values)


# Sampling


def check_draws_are_those_of_a_cpu(device: str, settings: dict[str, Any], num_rows: int) -> None:
    """The rule is the same, so tokens differ only if rounding decides, which is rare."""
    sampling = dataclasses.replace(SAMPLED, **settings)
    for vocab_size in (37, 4096, 9001):
        for dtype in DTYPES:
            torch.manual_seed(0)
            logits = (torch.randn(num_rows, vocab_size) * 3).to(dtype)
            streams = seed_streams(list(range(num_rows)))
            steps = torch.arange(num_rows)
            expected, expected_log_probs = choose(logits, streams, steps, sampling)
            tokens, log_probs = choose_by_kernels(
                logits.to(device), streams.to(device), steps.to(device), sampling
            )
            tokens, log_probs = tokens.cpu(), log_probs.cpu()
            assert log_probs.dtype == log_prob_dtype(dtype)
            is_equal = tokens == expected
            num_other = int((~is_equal).sum())
            difference = (log_probs - expected_log_probs)[is_equal].abs().max()
            what = f"{settings}, {vocab_size} tokens, {dtype}"
            # Top-p may round one token at its edge the other way, in a row now and then.
            most = max(1, num_rows // 50) if "top_p" in settings else num_rows // 100
            assert num_other <= most, f"{what}: {num_other} of {num_rows} draws are others"
            assert difference < 1e-3, f"{what}: log-probs differ by {difference:.1e}"


def check_greedy_draws(device: str) -> None:
    sampling = dataclasses.replace(SAMPLED, do_sample=False)
    for dtype in DTYPES:
        torch.manual_seed(0)
        logits = torch.randn(20, 9001).to(dtype).to(device)
        zeros = torch.zeros(20, dtype=torch.int64, device=device)
        tokens, log_probs = choose_by_kernels(logits, zeros, zeros, sampling)
        expected = logits.float().log_softmax(dim=-1)
        # Of equal logits, of which 16 bits have many, any may be taken.
        assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.amax(dim=1))
        assert (log_probs - expected.amax(dim=1)).abs().max() < 1e-5


def check_a_token_of_probability_zero_is_never_drawn(device: str, num_rows: int) -> None:
    """Whole blocks without probability, at both ends and in the middle."""
    logits = torch.full((1, 20_000), -torch.inf)
    allowed = [4097, 9000, 9001, 12_287]
    logits[0, allowed] = torch.tensor([0.0, -20.0, -1.0, -30.0])
    logits = logits.expand(num_rows, -1).contiguous().to(device)
    streams = seed_streams(list(range(num_rows))).to(device)
    steps = torch.zeros(num_rows, dtype=torch.int64, device=device)
    tokens, log_probs = choose_by_kernels(logits, streams, steps, SAMPLED)
    assert set(tokens.tolist()) == {4097, 9001}
    assert log_probs.isfinite().all()
    # Top-k draws none that it excludes, and keeps as many as it is asked for.
    top = dataclasses.replace(SAMPLED, top_k=2)
    tokens, _ = choose_by_kernels(logits, streams, steps, top)
    kept = filter_logits(logits[:1].cpu(), top)[0].isfinite()
    assert kept[tokens.cpu()].all()


def check_rows_that_are_not_numbers(device: str) -> None:
    """They draw some token of the vocabulary, and their log-probs say that something is wrong."""
    logits = torch.randn(5, 9001)
    logits[0, 5000] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    logits[3] = torch.nan
    logits = logits.to(device)
    streams = seed_streams([0, 1, 2, 3, 4]).to(device)
    steps = torch.zeros(5, dtype=torch.int64, device=device)
    for sampling in (SAMPLED, dataclasses.replace(SAMPLED, do_sample=False)):
        tokens, log_probs = choose_by_kernels(logits, streams, steps, sampling)
        assert ((tokens >= 0) & (tokens < 9001)).all()
        assert log_probs.isfinite().tolist() == [False, False, False, False, True]


# Rows of a batch


def check_record(device: str) -> None:
    """Some rows end by their limit or by a stop token; rows behind them are not in use."""
    num_rows = 150
    limits = [1 + index % 7 for index in range(num_rows)]
    for stops in ((), (3,), (3, 11)):
        batches = []
        for where in ("cpu", device):
            batch = DecodeBatch(num_rows + 5, 7, stops, torch.device(where), scattered=True)
            batch._by_kernel = None
            batch.enter(range(num_rows), [4] * num_rows, limits, range(num_rows))
            batches.append(batch)
        expected, batch = batches
        batch._by_kernel = batch._recording_kernel()
        # The rows of a whole step, and those of an admission, which begin somewhere.
        for rows in [slice(0, 150)] * 3 + [slice(17, 150), slice(0, 152), slice(149, 150)]:
            torch.manual_seed(rows.start)
            tokens = torch.randint(0, 20, (rows.stop - rows.start,))
            log_probs = torch.randn(rows.stop - rows.start)
            expected.record(rows, tokens, log_probs)
            batch.record(rows, tokens.to(device), log_probs.to(device))
        assert torch.equal(batch._state.cpu(), expected._state)
        # The last column is for rows that have ended, and nobody reads it.
        assert torch.equal(batch._sampled.cpu()[:, :-1], expected._sampled[:, :-1])
        assert torch.equal(batch._log_probs.cpu()[:, :-1], expected._log_probs[:, :-1])
        has_stopped = expected.limits[:num_rows] < torch.tensor(limits)
        assert has_stopped.any() == bool(stops)


def repair_interpreter() -> None:
    """Loops over a range that a kernel has computed: Triton 3.6 converts an array of one number to
    an integer for them, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_index_too(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index_too


def main() -> int:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    repair_interpreter()
    for settings in FILTERS:
        check_draws_are_those_of_a_cpu("cpu", settings, num_rows=6)
    check_greedy_draws("cpu")
    check_a_token_of_probability_zero_is_never_drawn("cpu", num_rows=20)
    check_rows_that_are_not_numbers("cpu")
    check_record("cpu")
    check_an_unused_row("cpu")
    check_copies_of_slots("cpu")
    for case in (
        AttentionCase(num_rows=3, group=7, head_dim=64),
        AttentionCase(num_rows=3, group=2, head_dim=48, has_norms=True, length=100),
        # The interpreter multiplies no matrices in bfloat16.
        AttentionCase(num_rows=3, group=6, head_dim=128, dtype=torch.float16, window=70),
        AttentionCase(num_rows=64, group=2, head_dim=64, length=70),
        AttentionCase(num_rows=130, group=1, head_dim=16, has_norms=True, length=40),
    ):
        check_attention("cpu", case)
        check_storing("cpu", case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
