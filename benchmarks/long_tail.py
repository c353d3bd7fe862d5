"""Steps whose responses have a long tail of lengths: bytes stored for them, and their time against
another checkout.

    python benchmarks/long_tail.py [--rounds 8] [--baseline PATH_TO_OTHER_SRC]

64 rows of at most 2,048 new tokens and about 250 in the mean: lengths come from a log-normal
distribution, each drawn with its sample's own seed, and a response ends there (as `max_new_tokens`
of its request) and nowhere else. A model of one layer takes PPO steps on two CPU slots of a real
Ray.

Bytes stored per step are all that calls leave in their replies and in the object store (the encoded
columns of every rank) and all that the driver puts there (its batches, encoded). They are compared
with the bytes of the real tokens' columns: 8 for each token id, and 4 for each response token's old
and reference log-prob, value, advantage and return. Goal: at most 1.5x.

With `--baseline` both checkouts take steps in turn, each by its own copy of this script and in a
Ray of its own, so that whatever else the machine does falls on both alike. The first step of each
is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rolepool.cluster import Cluster
from rolepool.cluster import calls as calls_module
from rolepool.config import load_config
from rolepool.data.demo import make_demo
from rolepool.data.prompts import PromptLoader, PromptSet
from rolepool.data.tokenizer import load_tokenizer
from rolepool.placement import build_plan
from rolepool.placement.roles import ROLE_SPECS, Role
from rolepool.protocol import CallFuture
from rolepool.protocol.encoding import Encoded, encode
from rolepool.roles.rollout import Rollout
from rolepool.rollout.engine import Completion, Request, Sampling
from rolepool.trainer import build
from rolepool.trainer.advantages import Estimator, repeated
from rolepool.trainer.step import StepCalls, ppo_step

OWN_SOURCE = Path(__file__).parent.parent / "src"
NUM_ROWS, MOST_NEW_TOKENS = 64, 2048
LOG_MEDIAN, LOG_SPREAD = np.log(125), 1.35
BYTES_PER_ID, BYTES_PER_NUMBER, NUMBERS_PER_TOKEN = 8, 4, 5
MOST_TIMES_THE_REAL = 1.5
STEP_TIMEOUT_S = 300


class LongTailRollout(Rollout):
    """A rollout whose responses end at lengths of a long-tailed distribution."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        generate = self.engine.generate

        def generate_long_tail(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
            return generate(
                [replace(one, max_new_tokens=response_length(one.seed)) for one in requests],
                sampling,
            )

        self.engine.generate = generate_long_tail  # type: ignore[method-assign, assignment]


def response_length(seed: int) -> int:
    drawn = np.random.default_rng(seed).lognormal(LOG_MEDIAN, LOG_SPREAD)
    return int(np.clip(drawn, 1, MOST_NEW_TOKENS))


# One checkout


def write_model(folder: Path) -> None:
    """A smaller model in the place of the demo's, for longer texts."""
    config = AutoConfig.from_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    config.update({**sizes, "max_position_embeddings": 2 * MOST_NEW_TOKENS})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Steps:
    """Takes steps, and says how long each took and what was stored for it."""

    def __init__(self, folder: Path) -> None:
        demo = make_demo(folder)
        write_model(demo.model)
        words = [
            f"actor_rollout_ref.model.path={demo.model}",
            f"data.train_files={demo.train_file}",
            f"data.train_batch_size={NUM_ROWS}",
            "data.max_prompt_length=8",
            f"data.max_response_length={MOST_NEW_TOKENS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_ROWS // 2}",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.rollout.ignore_eos=true",
            "trainer.n_gpus_per_node=2",
            "trainer.device=cpu",
        ]
        self.config = load_config([], words).config
        self.sent: list[Encoded] = []
        calls_module.encode = self._watched_encode
        ROLE_SPECS[Role.Rollout] = replace(
            ROLE_SPECS[Role.Rollout], worker=f"{__name__}:{LongTailRollout.__name__}"
        )
        tokenizer = load_tokenizer(self.config.actor_rollout_ref.model)
        self.loader = PromptLoader(PromptSet("train", self.config, tokenizer), NUM_ROWS, seed=1)
        self.estimator = Estimator(self.config)
        self.plan = build_plan(self.config)
        self.number = 0

    def _watched_encode(self, value: Any) -> Encoded:
        """The driver encodes the parts of its own batches to send them."""
        self.sent.append(encode(value))
        return self.sent[-1]

    def serve(self) -> None:
        """A step for every line that comes in; what it took goes out as a line of JSON."""
        with Cluster(self.plan) as cluster:
            self.roles = build.build_roles(cluster, self.config, 10)
            print("ready", flush=True)
            for _ in sys.stdin:
                print(json.dumps(self.step()), flush=True)

    def step(self) -> dict[str, float]:
        self.number += 1
        self.sent.clear()
        prompts = repeated(self.loader.next_batch(), 1)
        start_s = time.perf_counter()
        step = ppo_step(self.config, self.roles, self.estimator, prompts, self.number)
        for call in calls_of(step):
            call.spans()
        took_s = time.perf_counter() - start_s
        num_tokens = sum(step.estimated.lengths)
        num_new = num_tokens - sum(map(len, prompts.non_tensor_batch["raw_prompt_ids"]))
        return {
            "step_s": took_s,
            "stored_bytes": sum(map(bytes_of_replies, calls_of(step)))
            + sum(part.num_bytes for part in self.sent),
            "real_bytes": num_tokens * BYTES_PER_ID
            + num_new * BYTES_PER_NUMBER * NUMBERS_PER_TOKEN,
            "mean_new_tokens": num_new / NUM_ROWS,
        }


def calls_of(step: StepCalls) -> list[CallFuture]:
    return [call for calls in step.calls.values() for call in calls]


def bytes_of_replies(future: CallFuture) -> int:
    """What the ranks stored as their results, whether it lies in the object store or in the
    reply."""
    replies = [
        reply for call in future.calls for reply in call.replies(None) if reply.header is not None
    ]
    small = [column for reply in replies for column in reply.header.small.values()]
    large = [
        column
        for reply in replies
        if reply.header.large
        for column in ray.get(reply.stored).values()
    ]
    return sum(column.num_bytes for column in (*small, *large))


# All of them


def start(source: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAY_DEDUP_LOGS": "0",
    }
    script = source.parent / "benchmarks" / Path(__file__).name  # each checkout runs its own copy
    command = [sys.executable, str(script), "--serve"]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str]) -> str:
    """The next line that is an answer; Ray and the workers print others."""
    assert process.stdout is not None
    deadline = time.monotonic() + STEP_TIMEOUT_S
    for line in process.stdout:
        if line.startswith(("ready", "{")):
            return line
        if time.monotonic() > deadline:
            break
    raise SystemExit(
        f"no answer from {process.args} within {STEP_TIMEOUT_S} s; its exit code is {process.poll()}"
    )


def measure(sources: dict[str, Path], rounds: int) -> dict[str, list[dict[str, float]]]:
    """The steps of each checkout, taken in turn."""
    processes = {name: start(source) for name, source in sources.items()}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    try:
        for process in processes.values():
            answer(process)
        for _ in range(rounds + 1):
            for name, process in processes.items():
                assert process.stdin is not None
                process.stdin.write("step\n")
                process.stdin.flush()
                steps[name].append(json.loads(answer(process)))
    finally:
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=STEP_TIMEOUT_S)
    return {name: taken[1:] for name, taken in steps.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--baseline", type=Path, help="the src folder of another checkout")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="long_tail_") as folder:
            Steps(Path(folder)).serve()
        return 0
    sources = {"this checkout": OWN_SOURCE}
    if options.baseline is not None:
        sources["baseline"] = options.baseline.absolute()
    measured = measure(sources, options.rounds)
    times = {}
    for name, steps in measured.items():
        middle = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        times[name] = middle["stored_bytes"] / middle["real_bytes"]
        print(
            f"{name:14} {middle['mean_new_tokens']:5.0f} new tokens a row, step {middle['step_s']:.3f} s, "
            f"stored {middle['stored_bytes'] / 2**20:.2f} MiB, {times[name]:.2f} times the real tokens' columns"
        )
    if options.baseline is not None:
        pairs = zip(measured["baseline"], measured["this checkout"], strict=True)
        print(
            f"step time, baseline over this: {statistics.median(a['step_s'] / b['step_s'] for a, b in pairs):.2f}"
        )
    is_met = times["this checkout"] <= MOST_TIMES_THE_REAL
    print(f"goal of at most {MOST_TIMES_THE_REAL}: {'met' if is_met else 'missed'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
