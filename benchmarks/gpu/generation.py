"""The native engine, vLLM and transformers: how fast each generates the same work.

    python benchmarks/gpu/generation.py --vllm-python PYTHON --json FILE
    python benchmarks/gpu/generation.py --tiny [--vllm-python PYTHON]      a small model on the CPU

Models have random weights in the shapes of Qwen2.5-0.5B and 1.5B, in bf16. Responses have fixed
lengths, because nothing ends them:

- fixed: 256 prompts of 128 tokens, 256 new tokens each;
- mixed: 512 prompts of 128 tokens, 16 to 512 new tokens each;
- long: 256 prompts of 512 tokens, 256 new tokens each;
- shared: the same with 32 prompts, 8 responses to each.

Each engine runs in a process of its own, one after another, with its best settings:

- native: CUDA graphs, and slots for all requests. It always returns log-probs, and its seeds cost
  nothing. Without CUDA graphs: `eager`.
- vllm: its defaults (compiled, CUDA graphs, prefix caching), room for all requests, in the way in
  which rolepool runs it. `seeds` is what training asks for: log-probs, and a seed for each request.
- transformers: with log-probs it is rolepool's engine of this name; without, `generate`, whose
  batches of 256 are as long as their longest response.

Every round has new prompts, so that no prefix cache knows them. The first round warms up and does
not count. If an engine fails or exceeds its limit, what it has measured so far is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
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
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    },
}
ENGINES = ("native", "vllm", "transformers")
MARK = "RESULT "
"""How lines begin with which a process tells what it has measured."""
NUM_KV_HEADS = 2


@dataclass(frozen=True)
class Case:
    """Some work: responses to prompts."""

    name: str
    num_prompts: int
    num_responses: int
    """The number of responses to each prompt."""
    prompt_tokens: int
    new_tokens: tuple[int, int]
    """The shortest and the longest response."""

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.num_responses

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.new_tokens[1]

    def lengths(self) -> list[int]:
        """The length of each response, the same in every round."""
        numbers = random.Random(0)
        return [numbers.randint(*self.new_tokens) for _ in range(self.num_requests)]

    def prompts(self, vocab_size: int, round_number: int) -> list[list[int]]:
        """A prompt for each response. Other rounds have other prompts."""
        numbers = random.Random(round_number)
        prompts: list[list[int]] = []
        for _ in range(self.num_prompts):
            prompt = [numbers.randrange(1, vocab_size) for _ in range(self.prompt_tokens)]
            prompts += [prompt] * self.num_responses
        return prompts


@dataclass(frozen=True)
class Size:
    """Where, and how much work."""

    device: str
    dtype: str
    vocab_size: int
    cases: tuple[Case, ...]


FULL = Size(
    "cuda",
    "bfloat16",
    151_936,
    (
        Case("fixed", 256, 1, 128, (256, 256)),
        Case("mixed", 512, 1, 128, (16, 512)),
        Case("long", 256, 1, 512, (256, 256)),
        Case("shared", 32, 8, 512, (256, 256)),
    ),
)
SMALL = Size(
    "cpu",
    "float32",
    512,
    (
        Case("fixed", 8, 1, 16, (16, 16)),
        Case("mixed", 16, 1, 16, (2, 32)),
        Case("long", 8, 1, 64, (16, 16)),
        Case("shared", 2, 4, 64, (16, 16)),
    ),
)


@dataclass(frozen=True)
class Result:
    """What was measured of one case, or of an engine's start (case "start", without tokens)."""

    shape: str
    engine: str
    case: str
    variant: str
    seconds: list[float]
    """The time of each round that is measured."""
    num_tokens: int = 0
    first_s: float = 0.0
    """The time of the first round, which is a warm-up."""
    detail: str = ""

    @property
    def rate(self) -> float:
        """Tokens per second, the median."""
        return self.num_tokens / statistics.median(self.seconds)

    @property
    def line(self) -> str:
        what = f"{self.engine:12} {self.case:7} {self.variant:26}"
        took = ", ".join(f"{one:.2f}" for one in self.seconds)
        if not self.num_tokens:
            return f"  {what} {took} s  {self.detail}".rstrip()
        warm_up = f"; the first took {self.first_s:.2f} s" if self.first_s else ""
        return f"  {what} {self.rate:>10,.0f} tokens/s  ({took} s{warm_up})  {self.detail}".rstrip()


# In the process of an engine


class Bench:
    """Measures one engine with one shape."""

    def __init__(self, engine: str, shape: str, size: Size, rounds: int) -> None:
        self.engine = engine
        self.shape = shape
        self.size = size
        self.rounds = rounds

    def tell(
        self,
        case: str,
        variant: str,
        seconds: list[float],
        num_tokens: int = 0,
        first_s: float = 0.0,
        detail: str = "",
    ) -> Result:
        """Tell the parent process a result at once, because this process may exceed its limit."""
        result = Result(
            self.shape, self.engine, case, variant, seconds, num_tokens, first_s, detail
        )
        print(MARK + json.dumps(asdict(result)), flush=True)
        return result

    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """The result of a call, and how long it takes until the GPU has finished."""
        import torch

        if self.size.device == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        result = call(*arguments)
        if self.size.device == "cuda":
            torch.cuda.synchronize()
        return result, time.perf_counter() - start_s

    def measure(
        self,
        case: Case,
        variant: str,
        generate: Callable[[list[list[int]], list[int]], int],
        rounds: int | None = None,
        *,
        warms_up: bool = True,
    ) -> Result:
        """Measure some rounds of a case. `generate` gets prompts and lengths, and returns the
        number of tokens that it generated."""
        lengths = case.lengths()
        took: list[float] = []
        num_rounds = self.rounds if rounds is None else rounds
        for number in range(num_rounds + warms_up):
            prompts = case.prompts(self.size.vocab_size, number)
            num_tokens, round_s = self.timed(generate, prompts, lengths)
            assert num_tokens == sum(lengths), f"{num_tokens} tokens in place of {sum(lengths)}"
            took.append(round_s)
        first_s = took.pop(0) if warms_up else 0.0
        detail = ""
        if self.size.device == "cuda" and self.engine != "vllm":
            import torch

            detail = f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
            torch.cuda.reset_peak_memory_stats()
        return self.tell(case.name, variant, took, sum(lengths), first_s, detail)

    def make_model(self) -> Any:
        """The model with random weights, the same in every process."""
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=self.size.vocab_size,
            num_key_value_heads=NUM_KV_HEADS,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            **SHAPES[self.shape],
        )
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.size.dtype))
        try:
            with torch.device(self.size.device):
                return Qwen2ForCausalLM(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(default)

    def run(self, options: argparse.Namespace) -> None:
        start_s = time.perf_counter()
        if self.engine == "native":
            run_native(self, start_s)
        elif self.engine == "vllm":
            run_vllm(self, start_s, options.vllm_python)
        else:
            run_transformers(self, start_s)


def with_engine(engine: Any) -> Callable[[list[list[int]], list[int]], int]:
    """Generate with an engine of rolepool."""
    from rolepool.rollout import Request, Sampling

    sampling = Sampling(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        do_sample=True,
        max_new_tokens=1,
        ignore_eos=True,
        stop_token_ids=(),
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        pairs = enumerate(zip(prompts, lengths, strict=True))
        requests = [Request(prompt, seed, length) for seed, (prompt, length) in pairs]
        return sum(len(done.token_ids) for done in engine.generate(requests, sampling))

    return generate


def run_native(bench: Bench, start_s: float) -> None:
    from rolepool.rollout import NativeEngine

    size = bench.size
    model = bench.make_model()
    num_slots = max(case.num_requests for case in size.cases)
    settings: dict[str, Any] = {"max_num_seqs": num_slots, "max_num_batched_tokens": 16384}
    engine = NativeEngine(model, **settings)
    bench.tell("start", "imports and weights", [time.perf_counter() - start_s])
    results = {
        case.name: bench.measure(case, "log-probs, seeds", with_engine(engine))
        for case in size.cases
    }
    fixed = size.cases[0]
    first_tokens = Case("prefill", fixed.num_prompts, 1, fixed.prompt_tokens, (1, 1))
    prefill = bench.measure(first_tokens, "log-probs, seeds", with_engine(engine))
    tell_floor(bench, model, fixed, results["fixed"], prefill)
    eager = NativeEngine(model, **settings, enforce_eager=True)
    bench.measure(fixed, "eager (no CUDA graphs)", with_engine(eager), rounds=1)


def tell_floor(bench: Bench, model: Any, case: Case, whole: Result, prefill: Result) -> None:
    """Tell the time of a decode step, and of reading all weights and the filled cache once."""
    import torch

    num_steps = case.new_tokens[1] - 1
    step_s = statistics.median(whole.seconds) - statistics.median(prefill.seconds)
    source = torch.empty(
        2**30 if bench.size.device == "cuda" else 2**24,
        dtype=torch.uint8,
        device=bench.size.device,
    )
    target = torch.empty_like(source)
    best_s = min(bench.timed(target.copy_, source)[1] for _ in range(10))
    bytes_per_s = 2 * source.nbytes / best_s
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    filled = case.num_requests * (case.prompt_tokens + case.new_tokens[1] / 2)
    floor_s = (weights_bytes + filled * token_bytes(bench)) / bytes_per_s
    step_ms, floor_ms = 1e3 * step_s / num_steps, 1e3 * floor_s
    speed = f"{bytes_per_s / 1e12:.2f} TB/s"
    detail = f"{step_ms:.2f} ms; reading weights and cache at {speed} takes {floor_ms:.2f} ms"
    bench.tell("step", "a decode step", [step_s / num_steps], detail=detail)


def token_bytes(bench: Bench) -> int:
    """The bytes of a token in the cache."""
    shape = SHAPES[bench.shape]
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    num_bytes = 4 if bench.size.dtype == "float32" else 2
    return 2 * num_bytes * shape["num_hidden_layers"] * NUM_KV_HEADS * head_dim


def run_vllm(bench: Bench, start_s: float, python: str) -> None:
    from rolepool.rollout.vllm_engine import start_vllm

    size = bench.size
    num_rows = max(case.num_requests for case in size.cases)
    length = max(case.longest for case in size.cases)
    arguments: dict[str, Any] = {
        "dtype": size.dtype,
        "max_model_len": length,
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": 16384,
        "kv_cache_memory_bytes": num_rows * (length + 32) * token_bytes(bench),
    }
    if size.device == "cpu":
        arguments["enforce_eager"] = True
    else:
        arguments["gpu_memory_utilization"] = 0.01  # the cache's size is given in bytes
    with tempfile.TemporaryDirectory() as folder:
        model = bench.make_model()
        model.save_pretrained(folder)
        bench.tell("start", "imports and a model folder", [time.perf_counter() - start_s])
        del model
        if size.device == "cuda":
            import torch

            torch.cuda.empty_cache()
        start_s = time.perf_counter()
        client = start_vllm(python, {"model": folder, **arguments})
        while (waiting := client.await_start(10)) is not None:
            print(f"  {waiting}", flush=True)
        bench.tell("start", "vLLM, nothing cached before", [time.perf_counter() - start_s])
        variants = (
            ("log-probs, seeds", True, True, size.cases),
            ("neither", False, False, size.cases),
            ("log-probs", True, False, size.cases[:1]),
            ("seeds", False, True, size.cases[:1]),
        )
        for variant, log_probs, seeds, cases in variants:
            for case in cases:
                # Few rounds, because a start takes most of the time that there is.
                num_rounds = 2 if case.name == "fixed" else 1
                bench.measure(case, variant, with_vllm(client, log_probs, seeds), num_rounds)
        client.close()


def with_vllm(client: Any, log_probs: bool, seeds: bool) -> Callable[..., int]:
    """Generate with vLLM, with or without log-probs and a seed for each request."""
    from rolepool.rollout.vllm_engine import _STEPS_AT_ONCE

    def generate(prompts: list[list[int]], lengths: list[int]) -> int:
        messages = []
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            settings: dict[str, Any] = {"temperature": 1.0, "max_tokens": length}
            if seeds:
                settings["seed"] = number
            if not log_probs:
                settings["logprobs"] = None
            messages.append((number, prompt, settings))
        client.ask("submit", messages)
        num_tokens = 0
        num_running = len(messages)
        while num_running:
            for _, tokens, values in client.ask("run", _STEPS_AT_ONCE):
                assert len(values) == (len(tokens) if log_probs else 0)
                num_tokens += len(tokens)
                num_running -= 1
        return num_tokens

    return generate


def run_transformers(bench: Bench, start_s: float) -> None:
    import torch

    from rolepool.rollout.transformers_engine import TransformersEngine

    model = bench.make_model()
    bench.tell("start", "imports and weights", [time.perf_counter() - start_s])
    num_rows = bench.size.cases[0].num_requests

    def with_generate(prompts: list[list[int]], lengths: list[int]) -> int:
        num_tokens = 0
        for first in range(0, len(prompts), num_rows):
            batch = slice(first, first + num_rows)
            ids = torch.tensor(prompts[batch], device=bench.size.device)
            num_new = max(lengths[batch])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    min_new_tokens=num_new,
                    max_new_tokens=num_new,
                    do_sample=True,
                    top_k=0,
                    pad_token_id=0,
                )
            assert out.shape[1] == ids.shape[1] + num_new
            num_tokens += sum(lengths[batch])
        return num_tokens

    engine = with_engine(TransformersEngine(model, num_rows))
    fixed = bench.size.cases[0]
    warm_up = Case("warm-up", num_rows, 1, fixed.prompt_tokens, (4, 4))
    for variant, generate in (("log-probs, seeds", engine), ("neither (generate)", with_generate)):
        generate(warm_up.prompts(9, 0), warm_up.lengths())
        bench.measure(fixed, variant, generate, rounds=1, warms_up=False)
    for case in bench.size.cases[1:]:
        for variant, generate in (
            ("log-probs, seeds", engine),
            ("neither (generate)", with_generate),
        ):
            bench.measure(case, variant, generate, rounds=1, warms_up=False)


# In the parent process


def lines_of(process: subprocess.Popen[str], limit_s: float) -> Iterator[str]:
    """The lines of a process, which is killed with its children after the limit."""

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, kill)
    timer.start()
    try:
        assert process.stdout is not None
        yield from process.stdout
        process.wait()
    finally:
        timer.cancel()
        kill()


def run_engine(
    shape: str, engine: str, options: argparse.Namespace, limit_s: float, results: list[Result]
) -> str | None:
    """Measure an engine in a process of its own, and add what it tells. Returns what went wrong."""
    words = [sys.executable, __file__, "--worker", engine, "--shapes", shape]
    words += ["--rounds", str(options.rounds)]
    words += ["--tiny"] if options.tiny else []
    words += ["--vllm-python", options.vllm_python] if options.vllm_python else []
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"} if options.tiny else {}
    began_s = time.monotonic()
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    for line in lines_of(process, limit_s):
        if line.startswith(MARK):
            results.append(Result(**json.loads(line.removeprefix(MARK))))
            print(results[-1].line, flush=True)
        else:
            print(line, end="", flush=True)
    took_s = time.monotonic() - began_s
    if took_s >= limit_s:
        return f"{engine} with {shape}: stopped after its limit of {limit_s:.0f} s"
    if process.returncode:
        return f"{engine} with {shape}: exit code {process.returncode}, see above"
    return None


def print_ratios(results: list[Result]) -> None:
    """Print by what factor the native engine is faster, case by case."""
    rates = {
        (one.shape, one.case, one.engine, one.variant): one.rate
        for one in results
        if one.num_tokens
    }
    for (shape, case, engine, variant), rate in rates.items():
        native = rates.get((shape, case, "native", "log-probs, seeds"))
        if engine != "native" and native is not None:
            print(f"  {shape:5} {case:8} native is {native / rate:6.2f} times {engine}, {variant}")
    for shape in dict.fromkeys(one.shape for one in results):
        for engine in ENGINES:
            for variant in ("log-probs, seeds", "neither", "neither (generate)"):
                alone = rates.get((shape, "long", engine, variant))
                shared = rates.get((shape, "shared", engine, variant))
                if alone and shared:
                    gain = f"sharing prompts makes it {shared / alone:.2f} times as fast"
                    print(f"  {shape:5} {engine}, {variant}: {gain}")


def machine() -> dict[str, str]:
    """What the figures depend on."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds that count, of the native engine"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES))
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--vllm-python", metavar="PYTHON", help="the Python of vLLM's environment")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    parser.add_argument("--native-limit-s", type=float, default=75, help="of each shape")
    parser.add_argument("--vllm-limit-s", type=float, default=200, help="of each shape")
    parser.add_argument("--transformers-limit-s", type=float, default=45, help="of each shape")
    parser.add_argument("--total-limit-s", type=float, default=470, help="of all together")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = SMALL if options.tiny else FULL
    shapes = options.shapes or (["tiny"] if options.tiny else ["0.5B", "1.5B"])
    if options.worker is not None:
        Bench(options.worker, shapes[0], size, options.rounds).run(options)
        return
    if "vllm" in options.engines and options.vllm_python is None:
        print("vllm is left out, because --vllm-python is not given")
        options.engines.remove("vllm")
    end_s = time.monotonic() + options.total_limit_s
    results: list[Result] = []
    problems: list[str] = []
    # What takes longest and says least comes last.
    slow = [engine for engine in options.engines if engine == "transformers"]
    fast = [engine for engine in options.engines if engine != "transformers"]
    order = [(shape, engine) for shape in shapes for engine in fast]
    order += [(shape, engine) for engine in slow for shape in shapes]
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for shape, engine in order:
        limit_s = min(vars(options)[f"{engine}_limit_s"], end_s - time.monotonic())
        print(f"{engine} with {shape}, at most {limit_s:.0f} s", flush=True)
        if limit_s < 5:
            problem: str | None = f"{engine} with {shape}: not run, --total-limit-s is over"
        else:
            problem = run_engine(shape, engine, options, limit_s, results)
        if problem is not None:
            problems.append(problem)
            print(f"  {problem}", flush=True)
        if options.json is not None:  # now, because this process may be stopped, too
            content = {
                "machine": about,
                "results": [asdict(one) for one in results],
                "problems": problems,
            }
            options.json.write_text(json.dumps(content, indent=1))
    print_ratios(results)
    for problem in problems:
        print(f"problem: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
