"""The native rollout engine on one GPU: against `transformers.generate`, and against the bytes a
step must read.

    python benchmarks/gpu/generation.py            Qwen2.5-0.5B and -1.5B shapes, random weights, bf16
    python benchmarks/gpu/generation.py --tiny     a small model on the CPU, to try the script out

256 prompts of 128 tokens, 256 new tokens each, no end token. For each shape:

- the whole call in tokens per second, median of --rounds, with and without CUDA graphs;
- the decode steps alone (the call less one that samples the first token only) against the byte floor: weights and
  filled cache read once per step, at the bandwidth that a copy on this GPU was just measured to have;
- at the first shape `transformers.generate`, once, on the same prompts; and 1,024 requests of 16 to 1,024 new tokens,
  with as many slots as above and with the default of 1,024.

Goals: 100,000 tok/s and 25 times `generate` at 0.5B, 40% of the floor at 1.5B, mixed lengths at 70%
of the fixed rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rolepool.rollout import NativeEngine, Request, Sampling

SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "intermediate_size": 4864,
    },
    "1.5B": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "intermediate_size": 8960,
    },
}
TINY = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
}
SAMPLED = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    do_sample=True,
    max_new_tokens=1,
    ignore_eos=True,
    stop_token_ids=(),
)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much work."""

    device: str
    dtype: torch.dtype
    vocab_size: int
    num_prompts: int
    prompt_length: int
    num_new: int
    num_mixed: int
    mixed: tuple[int, int]


FULL = Size("cuda", torch.bfloat16, 151_936, 256, 128, 256, 1024, (16, 1024))
SMALL = Size("cpu", torch.float32, 512, 8, 16, 16, 32, (2, 32))


def synchronize(size: Size) -> None:
    if size.device == "cuda":
        torch.cuda.synchronize()


def seconds(size: Size, call: Callable[[], object]) -> float:
    synchronize(size)
    start = time.perf_counter()
    call()
    synchronize(size)
    return time.perf_counter() - start


def copy_bandwidth(size: Size) -> float:
    """Bytes per second, reading and writing together, of the best of ten copies."""
    source = torch.empty(
        2**30 if size.device == "cuda" else 2**24, dtype=torch.uint8, device=size.device
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(size, lambda: target.copy_(source)) for _ in range(10))


def make_model(size: Size, shape: dict[str, int]) -> Any:
    config = Qwen2Config(
        vocab_size=size.vocab_size,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        **shape,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(size.dtype)
    try:
        with torch.device(size.device):
            return Qwen2ForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)


def make_requests(size: Size, count: int, new: tuple[int, int]) -> list[Request]:
    numbers = random.Random(0)
    return [
        Request(
            [numbers.randrange(1, size.vocab_size) for _ in range(size.prompt_length)],
            index,
            numbers.randint(*new),
        )
        for index in range(count)
    ]


def rate(size: Size, engine: NativeEngine, requests: list[Request], rounds: int) -> float:
    """Tokens per second of whole calls, the median; the first call warms up."""
    num_tokens = sum(request.max_new_tokens or 0 for request in requests)

    def generate() -> None:
        completions = engine.generate(requests, SAMPLED)
        assert sum(len(completion.token_ids) for completion in completions) == num_tokens

    warm_up_s = seconds(size, generate)
    took = [seconds(size, generate) for _ in range(rounds)]
    print(
        f"    calls: {', '.join(f'{one:.3f}' for one in took)} s; the first, which warms up: {warm_up_s:.1f} s"
    )
    return num_tokens / statistics.median(took)


def with_transformers(size: Size, model: Any, requests: list[Request]) -> float:
    ids = torch.tensor([request.token_ids for request in requests], device=size.device)
    mask = torch.ones_like(ids)

    def generate(num_new: int) -> None:
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, min_new_tokens=num_new, max_new_tokens=num_new, do_sample=True, top_k=0,
                pad_token_id=0,
            )  # fmt: skip

    generate(4)
    return len(requests) * size.num_new / seconds(size, lambda: generate(size.num_new))


def floor_s(size: Size, model: Any, bandwidth: float) -> float:
    """Of all decode steps of the fixed-length run: weights and filled cache read once per step."""
    config, item = model.config, size.dtype.itemsize
    weights = sum(parameter.nbytes for parameter in model.parameters())
    head_dim = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * item
    filled = sum(size.prompt_length + step for step in range(1, size.num_new)) * size.num_prompts
    return ((size.num_new - 1) * weights + filled * per_token) / bandwidth


def report(name: str, value: float, goal: float | None = None, unit: str = "tok/s") -> None:
    shown = f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"
    verdict = "" if goal is None else f"   goal {goal:,g}: {'met' if value >= goal else 'MISSED'}"
    print(f"  {name:44} {shown:>20}{verdict}", flush=True)


def measure(
    name: str, size: Size, shape: dict[str, int], options: argparse.Namespace, bandwidth: float
) -> None:
    model = make_model(size, shape)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{name}: {num_params / 1e6:,.0f}M parameters, {size.num_prompts} x {size.prompt_length}+{size.num_new}"
    )
    is_first = name != "1.5B"
    fixed = make_requests(size, size.num_prompts, (size.num_new, size.num_new))
    settings: dict[str, Any] = {"max_num_seqs": size.num_prompts, "max_num_batched_tokens": 8192}
    engine = NativeEngine(model, **settings)
    ours = rate(size, engine, fixed, options.rounds)
    report("native", ours, 100_000 if is_first else None)
    prefill_s = size.num_prompts / rate(
        size, engine, make_requests(size, size.num_prompts, (1, 1)), options.rounds
    )
    total_s = size.num_prompts * size.num_new / ours
    decode_s, least_s = total_s - prefill_s, floor_s(size, model, bandwidth)
    report("  prompts and first tokens", prefill_s * 1e3, unit="ms")
    report("  a decode step", decode_s / (size.num_new - 1) * 1e3, unit="ms")
    report("  a decode step at the byte floor", least_s / (size.num_new - 1) * 1e3, unit="ms")
    report(
        "  decode steps, of the floor's rate",
        100 * least_s / decode_s,
        None if is_first else 40,
        "%",
    )
    report("  whole call, of the floor's rate", 100 * least_s / total_s, unit="%")
    if size.device == "cuda":
        report("  peak memory", torch.cuda.max_memory_allocated() / 2**30, unit="GiB")
    if is_first:
        mixed = make_requests(size, size.num_mixed, size.mixed)
        for num_slots in (size.num_prompts, 1024):
            slow = rate(
                size, NativeEngine(model, **{**settings, "max_num_seqs": num_slots}), mixed, 1
            )
            report(f"native, {size.num_mixed} mixed lengths, {num_slots} slots", slow)
            report("  of the fixed-length rate", 100 * slow / ours, 70, "%")
        report(
            "native, without CUDA graphs",
            rate(size, NativeEngine(model, **settings, enforce_eager=True), fixed, 1),
        )
        theirs = with_transformers(size, model, fixed)
        report("transformers.generate", theirs)
        report("  native over generate", ours / theirs, 25, "times")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    size = SMALL if options.tiny else FULL
    shapes = TINY if options.tiny else {name: SHAPES[name] for name in options.shapes}
    bandwidth = copy_bandwidth(size)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}")
    for name, shape in shapes.items():
        try:
            measure(name, size, shape, options, bandwidth)
        except Exception:
            traceback.print_exc()
        if size.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
