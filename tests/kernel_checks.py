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
from torch import Tensor

from rolepool.rollout import Sampling
from rolepool.rollout.kv_cache import DecodeBatch
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
