"""Conversations of several turns against one turn with the same tokens, and a thousand
conversations at a time.

    python benchmarks/conversations.py [--rounds 5] [--conversations 128] [--turns 4]

The first part samples the same number of tokens in two ways, with one thread: in one turn, and in
--turns turns with 4 tokens of the environment after each. Both sides sample as many tokens per
sequence and run the same engine; rounds alternate. The goal is at most 1.2 times the time of one
turn. The second part runs 1,000 conversations of three turns, each with a tool call in a process,
and prints the time and the number of threads.
"""

from __future__ import annotations

import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch starts its threads

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolepool.config import load_config
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.data.demo import make_demo
from rolepool.data.tokenizer import load_tokenizer
from rolepool.data.tools import ToolProcess
from rolepool.rollout import NativeEngine, Sampling
from rolepool.rollout.conversations import Conversations
from rolepool.rollout.environments import Generate, Trajectory

PROMPT_TOKENS, TURN_TOKENS, ADDED_TOKENS = 32, 32, 4
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
    num_heads, num_kv_heads = heads
    counts = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 512,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=True, **counts, **sizes)
    ).eval()


def turns_of(num_turns: int, num_tokens: int) -> Callable[[Any, Generate], Any]:
    """A rollout function with this number of turns, all of this number of tokens."""

    async def rollout(row: Any, generate: Generate) -> Trajectory:
        trajectory = Trajectory(list(row["prompt_ids"]))
        for _ in range(num_turns):
            await generate(trajectory, num_tokens)
            trajectory.add([1] * ADDED_TOKENS)
        return trajectory

    return rollout


async def with_a_tool(row: Any, generate: Generate) -> Trajectory:
    trajectory = Trajectory(list(row["prompt_ids"]))
    for _ in range(3):
        await generate(trajectory, 4)
        outcome = await generate.run(trajectory, pow, 3, row["index"], 11)
        trajectory.add([outcome.value])
    return trajectory


def compare(name: str, options: argparse.Namespace) -> None:
    model = make_model(**MODELS[name])  # type: ignore[arg-type]
    engine = NativeEngine(
        model, max_num_seqs=1024, max_num_batched_tokens=8192, shared_weights=True
    )
    sampling = Sampling(1.0, 1.0, -1, True, 1, ignore_eos=True, stop_token_ids=())
    num_rows, num_turns = options.conversations, options.turns
    rows = [
        {"prompt_ids": [2 + (row * 7 + at) % 500 for at in range(PROMPT_TOKENS)]}
        for row in range(num_rows)
    ]
    limits = PROMPT_TOKENS, num_turns * (TURN_TOKENS + ADDED_TOKENS)
    tokenizer: Any = None
    ways = {
        "one turn": Conversations(turns_of(1, num_turns * TURN_TOKENS), tokenizer, [], limits),
        f"{num_turns} turns": Conversations(
            turns_of(num_turns, TURN_TOKENS), tokenizer, [], limits
        ),
    }
    took: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        for way, conversations in ways.items():
            start_s = time.process_time()
            made = conversations.run(engine, sampling, rows, range(num_rows))
            if number:  # the first round warms up
                took[way].append(time.process_time() - start_s)
            assert {sum(value == value for value in one.log_probs) for one in made} == {
                num_turns * TURN_TOKENS
            }
    num_tokens = num_rows * num_turns * TURN_TOKENS
    medians = {way: statistics.median(seconds) for way, seconds in took.items()}
    for way, seconds in medians.items():
        print(
            f"{name:6} {way:10} {seconds:7.2f} s of CPU time  {num_tokens / seconds:8.0f} tokens/s"
        )
    one, several = medians.values()
    print(f"{name:6} ratio {several / one:.2f}; goal: at most 1.2", flush=True)


def run_a_thousand() -> None:
    with tempfile.TemporaryDirectory() as folder:
        demo = make_demo(f"{folder}/demo")
        model, tokenizer = (
            LlamaForCausalLM.from_pretrained(demo.model),
            load_tokenizer(PolicyModelConfig(path=str(demo.model))),
        )
    engine = NativeEngine(
        model, max_num_seqs=1024, max_num_batched_tokens=8192, shared_weights=True
    )
    sampling = Sampling(1.0, 1.0, -1, True, 1, ignore_eos=False, stop_token_ids=(1,))
    keys = load_config([], []).config.environment
    rows = [
        {"prompt_ids": [4 + row % 8, 3], "index": row, "origin": f"row {row}"}
        for row in range(1000)
    ]
    processes = [ToolProcess(keys) for _ in range(keys.num_processes)]
    conversations, most = Conversations(with_a_tool, tokenizer, processes, (4, 32)), 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.01):
            most = max(most, threading.active_count())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start_s = time.perf_counter()
    made = conversations.run(engine, sampling, rows, range(1000))
    took_s = time.perf_counter() - start_s
    ended.set()
    watcher.join()
    num_calls = sum(one.num_tool_calls for one in made)
    assert num_calls == 3000 and not any(one.num_tool_errors for one in made)
    print(
        f"1,000 conversations, {num_calls:,} tool calls: {took_s:.2f} s, at most {most} threads (one is the watcher)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=128)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in MODELS:
        compare(name, options)
    run_a_thousand()


if __name__ == "__main__":
    main()
