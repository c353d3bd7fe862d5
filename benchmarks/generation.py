"""The rollout engines and `transformers.generate`, on responses of mixed length, one thread, in one
run.

    python benchmarks/generation.py [--rounds 3] [--requests 128] [--slots 64] [--device cpu] [--vllm-python PYTHON]

Requests have prompts of 16 to 48 tokens and end after 8 to 256 tokens each (no end token: the
lengths stand for where one would come, and both sides produce exactly the same number of tokens
that count). `generate` is run in two ways:

- "as they come": batches of --slots requests in the order given, each run to the longest of its batch. This is what
  it can do in training, where nobody knows the lengths beforehand. The goal, at least 2, is against this.
- "sorted": the same, told the lengths in advance and sorted by them.

vLLM takes part if the Python of its environment is given, with models whose heads have 32 numbers
or more. Its CPU time is that of another process, so it is compared by the clock only.

Prints the median of --rounds in tokens per second, and the ratios; by the clock, and by the
process's own CPU time, which others on the machine disturb less. Rounds alternate between the ways.
"""

from __future__ import annotations

import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch starts its threads
os.environ["OMP_NUM_THREADS"] = "1"  # vLLM's process reads it

import argparse
import copy
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolepool.rollout import Engine, NativeEngine, Request, Sampling
from rolepool.rollout.transformers_engine import TransformersEngine
from rolepool.rollout.vllm_engine import VllmEngine, start_vllm

MODELS = {
    "0.15M": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 144,
        "num_hidden_layers": 3,
        "heads": (4, 2),
    },
    "5M": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "heads": (8, 4),
    },
}


def make_model(vocab_size: int, heads: tuple[int, int], **sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


def make_requests(num_requests: int, vocab_size: int) -> list[Request]:
    numbers = random.Random(0)
    return [
        Request(
            [numbers.randrange(1, vocab_size) for _ in range(numbers.randint(16, 48))],
            seed=index,
            max_new_tokens=numbers.randint(8, 256),
        )
        for index in range(num_requests)
    ]


def num_new(request: Request) -> int:
    assert request.max_new_tokens is not None
    return request.max_new_tokens


def with_generate(model: LlamaForCausalLM, requests: list[Request], num_rows: int) -> None:
    """Left-padded batches, each as long as its longest response."""
    for start in range(0, len(requests), num_rows):
        batch = requests[start : start + num_rows]
        width = max(len(request.token_ids) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.token_ids) :] = torch.tensor(request.token_ids)
            mask[row, width - len(request.token_ids) :] = 1
        length = max(map(num_new, batch))
        with torch.inference_mode():
            out = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=length,
                do_sample=True,
                top_k=0,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert out.shape[1] == width + length


def with_engine(engine: Engine, requests: list[Request]) -> None:
    sampling = Sampling(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        do_sample=True,
        max_new_tokens=256,
        ignore_eos=True,
        stop_token_ids=(),
    )
    completions = engine.generate(requests, sampling)
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) == num_new(request)


def make_engines(
    model: LlamaForCausalLM, num_slots: int, vllm_python: str | None, folder: str
) -> dict[str, Engine]:
    native = NativeEngine(
        model, max_num_seqs=num_slots, max_num_batched_tokens=8192, shared_weights=True
    )
    engines: dict[str, Engine] = {"native": native}
    engines["transformers engine"] = TransformersEngine(model, num_slots, shared_weights=True)
    if vllm_python is not None and model.config.head_dim >= 32:
        model.save_pretrained(folder)
        arguments = {
            "model": folder,
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": num_slots,
        }
        arguments |= {"enforce_eager": True, "enable_prefix_caching": False}
        client = start_vllm(vllm_python, arguments)
        engines["vllm engine"] = VllmEngine(client, copy.deepcopy(model))
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="for example .venv-vllm/bin/python")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, sizes in MODELS.items():
        model = make_model(**sizes).to(options.device)  # type: ignore[arg-type]
        folder = tempfile.TemporaryDirectory()
        engines = make_engines(model, options.slots, options.vllm_python, folder.name)
        requests = make_requests(options.requests, model.config.vocab_size)
        by_length = sorted(requests, key=num_new)
        ways: dict[str, Callable[[], None]] = {
            name: lambda engine=engine, requests=requests: with_engine(engine, requests)
            for name, engine in engines.items()
        }
        ways |= {
            "generate, as they come": lambda model=model, requests=requests: with_generate(
                model, requests, options.slots
            ),
            "generate, sorted": lambda model=model, by_length=by_length: with_generate(
                model, by_length, options.slots
            ),
        }
        wall_s: dict[str, list[float]] = {way: [] for way in ways}
        cpu_s: dict[str, list[float]] = {way: [] for way in ways}
        for round_number in range(options.rounds + 1):
            for way, run in ways.items():
                start_wall, start_cpu = time.perf_counter(), time.process_time()
                run()
                if round_number:  # the first warms up
                    wall_s[way].append(time.perf_counter() - start_wall)
                    cpu_s[way].append(time.process_time() - start_cpu)
        num_tokens = sum(map(num_new, requests))
        num_params = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{name}: {num_params / 1e6:.2f}M parameters, {len(requests)} requests, {num_tokens} new tokens"
        )
        wall = {way: statistics.median(took) for way, took in wall_s.items()}
        cpu = {way: statistics.median(took) for way, took in cpu_s.items()}
        for way in ways:
            by_cpu = "" if way == "vllm engine" else f"{num_tokens / cpu[way]:8.0f} tok/CPU-s"
            print(f"  {way:24} {num_tokens / wall[way]:8.0f} tok/s  {by_cpu}")
        for way in list(ways)[1:]:
            by_wall, by_cpu = (
                wall[way] / wall["native"],
                f"{cpu[way] / cpu['native']:.2f} by CPU time",
            )
            more = "in another process" if way == "vllm engine" else by_cpu
            more += "; goal: at least 2" if way.endswith("come") else ""
            print(f"  native is {by_wall:.2f} times as fast as {way} ({more})", flush=True)
        folder.cleanup()


if __name__ == "__main__":
    main()
