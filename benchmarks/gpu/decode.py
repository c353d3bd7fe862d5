"""How close a decode step of the native engine comes to the time of reading its bytes once.

    python benchmarks/gpu/decode.py [--cases "1.5B x 256,refill"] [--profile] [--json FILE]
    python benchmarks/gpu/decode.py --tiny      a small model on the CPU, to try the script out

The floor of a step is the time in which the GPU reads all weights and the filled part of the KV
cache once, at the rate of a large copy in the same run. The share is the floor divided by the
measured time, and it is 100% if nothing else takes any time. Models have random weights in bf16.
Every row runs from the first step to the last, and prefilling is not counted.

`refill` is another measure: 1,024 requests of 16 to 1,024 new tokens in 256 slots, in tokens per
second, relative to 256 requests of equal length. Finished rows leave their slots to waiting
requests there, and prefilling is counted on both sides.

With --profile each case also prints the kernels of some steps: how often and how long each runs in
a step, and the share of the time in which no kernel runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from generation import NUM_KV_HEADS, SHAPES
from transformers import Qwen2Config, Qwen2ForCausalLM

from rolepool.rollout import NativeEngine, Request, Sampling

SHAPES = SHAPES | {
    "3B": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "intermediate_size": 11008,
    },
}
VOCAB_SIZE = 151_936
SMALL_VOCAB_SIZE = 512
WARM_UP_TOKENS = 20
PROFILED_STEPS = 16
NUM_KERNELS = 22


@dataclass(frozen=True)
class Case:
    """Rows that decode together."""

    name: str
    shape: str
    num_rows: int
    prompt_tokens: int
    new_tokens: int
    goal: float
    """The share of the floor that this case should reach."""


@dataclass(frozen=True)
class Refill:
    """Requests of many lengths, which enter slots that others leave."""

    num_requests: int
    num_slots: int
    prompt_tokens: int
    new_tokens: tuple[int, int]
    goal: float


@dataclass(frozen=True)
class Work:
    device: str
    dtype: str
    vocab_size: int
    cases: tuple[Case, ...]
    refill_shape: str
    refill: Refill


FULL = Work(
    "cuda",
    "bfloat16",
    VOCAB_SIZE,
    (
        Case("1.5B x 256", "1.5B", 256, 128, 256, 0.55),
        Case("3B x 64", "3B", 64, 128, 256, 0.65),
        Case("1.5B x 64 x 8k", "1.5B", 64, 8192, 128, 0.80),
        Case("0.5B x 256", "0.5B", 256, 128, 256, 0.40),
    ),
    "0.5B",
    Refill(1024, 256, 128, (16, 1024), 0.80),
)
SMALL = Work(
    "cpu",
    "float32",
    SMALL_VOCAB_SIZE,
    (Case("tiny x 8", "tiny", 8, 16, 32, 0.0),),
    "tiny",
    Refill(32, 8, 16, (2, 32), 0.0),
)


def make_model(shape: str, work: Work) -> Any:
    config = Qwen2Config(
        vocab_size=work.vocab_size,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, work.dtype))
    try:
        with torch.device(work.device):
            return Qwen2ForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def synchronize(work: Work) -> None:
    if work.device == "cuda":
        torch.cuda.synchronize()


def copy_rate(work: Work) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(
        2**32 if work.device == "cuda" else 2**24, dtype=torch.uint8, device=work.device
    )
    target = torch.empty_like(source)
    taken_s = []
    for _ in range(10):
        synchronize(work)
        start_s = time.perf_counter()
        target.copy_(source)
        synchronize(work)
        taken_s.append(time.perf_counter() - start_s)
    return 2 * source.nbytes / min(taken_s)


def requests_of(lengths: Sequence[int], prompt_tokens: int, work: Work, seed: int) -> list[Request]:
    numbers = random.Random(seed)
    requests = []
    for length in lengths:
        prompt = [numbers.randrange(1, work.vocab_size) for _ in range(prompt_tokens)]
        requests.append(Request(prompt, numbers.randrange(2**31), length))
    return requests


def sampling_of(new_tokens: int) -> Sampling:
    return Sampling(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        do_sample=True,
        max_new_tokens=new_tokens,
        ignore_eos=True,
        stop_token_ids=(),
    )


def token_bytes(shape: str, work: Work) -> int:
    """The bytes of a token in the cache."""
    numbers = SHAPES[shape]
    head_dim = numbers["hidden_size"] // numbers["num_attention_heads"]
    num_bytes = getattr(torch, work.dtype).itemsize
    return int(2 * num_bytes * numbers["num_hidden_layers"] * NUM_KV_HEADS * head_dim)


def decode_s(
    engine: NativeEngine, case: Case, work: Work, new_tokens: int, seed: int, *, profiles: bool
) -> float:
    """The time of a decode step, from the first to the last step of all rows."""
    requests = requests_of([new_tokens] * case.num_rows, case.prompt_tokens, work, seed)
    length = case.prompt_tokens + case.new_tokens
    with engine.session(sampling_of(case.new_tokens), case.num_rows, length) as session:
        session.submit(requests)
        num_ended = len(session.step())  # prefills, and samples the first token of each row
        if profiles:
            profile_steps(session)
        synchronize(work)
        start_s = time.perf_counter()
        while num_ended < case.num_rows:
            num_ended += len(session.step())
        synchronize(work)
        taken_s = time.perf_counter() - start_s
    return taken_s / (new_tokens - 1)


def profile_steps(session: Any) -> None:
    """Print which kernels run in a decode step."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED_STEPS // 8):
            session.step()
        torch.cuda.synchronize()
    counts: dict[str, int] = defaultdict(int)
    times_us: dict[str, float] = defaultdict(float)
    starts_us: list[float] = []
    ends_us: list[float] = []
    for event in profile.events():
        if "CUDA" not in str(event.device_type):
            continue
        counts[event.name] += 1
        times_us[event.name] += event.time_range.elapsed_us()
        starts_us.append(event.time_range.start)
        ends_us.append(event.time_range.end)
    if not starts_us:
        print("    the profiler saw no kernels")
        return
    busy_us = sum(times_us.values())
    whole_us = max(ends_us) - min(starts_us)
    print(
        f"    a step: {whole_us / PROFILED_STEPS:.0f} us, of which kernels run "
        f"{busy_us / PROFILED_STEPS:.0f} us"
    )
    by_time = sorted(times_us, key=lambda name: -times_us[name])
    for name in by_time[:NUM_KERNELS]:
        per_step = counts[name] / PROFILED_STEPS
        step_us = times_us[name] / PROFILED_STEPS
        each_us = times_us[name] / counts[name]
        print(f"    {step_us:8.1f} us  {per_step:6.1f} x {each_us:6.2f} us  {name[:110]}")


def measure_case(
    case: Case, engine: NativeEngine, weights_bytes: int, rate: float, work: Work, options: Any
) -> dict[str, Any]:
    decode_s(engine, case, work, WARM_UP_TOKENS, 0, profiles=False)
    is_profiled = options.profile and work.device == "cuda"
    if is_profiled:
        decode_s(engine, case, work, case.new_tokens, 1, profiles=True)
    steps_s = [
        decode_s(engine, case, work, case.new_tokens, 2 + number, profiles=False)
        for number in range(options.rounds)
    ]
    step_s = statistics.median(steps_s)
    filled = case.num_rows * (case.prompt_tokens + case.new_tokens / 2)
    floor_s = (weights_bytes + filled * token_bytes(case.shape, work)) / rate
    result = {
        "case": asdict(case),
        "step_ms": 1e3 * step_s,
        "steps_ms": [1e3 * one for one in steps_s],
        "floor_ms": 1e3 * floor_s,
        "share": floor_s / step_s,
    }
    print(
        f"{case.name:16} {1e3 * step_s:7.3f} ms a step, floor {1e3 * floor_s:.3f} ms: "
        f"{floor_s / step_s:.0%} (goal {case.goal:.0%})",
        flush=True,
    )
    return result


def generate_rate(engine: NativeEngine, requests: list[Request], work: Work) -> float:
    """Tokens per second."""
    most_new = max(request.num_new(sampling_of(1)) for request in requests)
    synchronize(work)
    start_s = time.perf_counter()
    completions = engine.generate(requests, sampling_of(most_new))
    synchronize(work)
    taken_s = time.perf_counter() - start_s
    return sum(len(one.token_ids) for one in completions) / taken_s


def measure_refill(work: Work, rounds: int) -> dict[str, Any]:
    refill = work.refill
    model = make_model(work.refill_shape, work)
    engine = NativeEngine(model, max_num_seqs=refill.num_slots, max_num_batched_tokens=16384)
    numbers = random.Random(0)
    lengths = [numbers.randint(*refill.new_tokens) for _ in range(refill.num_requests)]
    mean_length = sum(lengths) // len(lengths)
    mixed, equal = [], []
    for number in range(rounds + 1):
        requests = requests_of(lengths, refill.prompt_tokens, work, number)
        mixed.append(generate_rate(engine, requests, work))
        fixed = [mean_length] * refill.num_slots
        requests = requests_of(fixed, refill.prompt_tokens, work, number)
        equal.append(generate_rate(engine, requests, work))
    result = {
        "mixed_tokens_per_s": statistics.median(mixed[1:]),
        "fixed_tokens_per_s": statistics.median(equal[1:]),
    }
    result["share"] = result["mixed_tokens_per_s"] / result["fixed_tokens_per_s"]
    print(
        f"refill: {result['mixed_tokens_per_s']:,.0f} tokens/s with lengths from "
        f"{refill.new_tokens[0]} to {refill.new_tokens[1]} in {refill.num_slots} slots, "
        f"{result['fixed_tokens_per_s']:,.0f} with equal lengths: {result['share']:.0%} "
        f"(goal {refill.goal:.0%})",
        flush=True,
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help="names of cases, and refill; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    work = SMALL if options.tiny else FULL
    names = [case.name for case in work.cases] + ["refill"]
    if options.cases:
        names = [name.strip() for name in options.cases.split(",")]
    rate = copy_rate(work)
    results: dict[str, Any] = {"copy_tb_per_s": rate / 1e12}
    print(f"a large copy: {rate / 1e12:.2f} TB/s, read and written", flush=True)
    for case in work.cases:
        if case.name not in names:
            continue
        model = make_model(case.shape, work)
        weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
        engine = NativeEngine(model, max_num_seqs=case.num_rows, max_num_batched_tokens=16384)
        results[case.name] = measure_case(case, engine, weights_bytes, rate, work, options)
        del model, engine
        gc.collect()
        if work.device == "cuda":
            torch.cuda.empty_cache()
    if "refill" in names:
        results["refill"] = measure_refill(work, options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
