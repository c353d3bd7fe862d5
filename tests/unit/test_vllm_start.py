"""The start of vLLM beside the roles, and what can go wrong in it. A substitute takes vLLM's place."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_contract import check_engine
from rolepool.config import Config, load_config
from rolepool.errors import ConfigError, RolepoolError
from rolepool.protocol.worker import WorkerContext
from rolepool.rollout import Request, Sampling, sample_seed
from rolepool.rollout import vllm_engine as module
from rolepool.rollout.transformers_engine import TransformersEngine
from rolepool.rollout.vllm_client import VllmClient
from rolepool.rollout.vllm_engine import VllmEngine, start_vllm
from tiny_models import make_model, write_model
from vllm_pythons import substitute_python

SAMPLED = Sampling(
    1.0, 1.0, -1, do_sample=True, max_new_tokens=12, ignore_eos=True, stop_token_ids=()
)
REQUESTS = [
    Request([3 + index, 5, 7, *range(index)], sample_seed(0, index, 0)) for index in range(9)
]
GIB = 2**30


def arguments_in(folder: Path) -> dict[str, Any]:
    model = write_model(folder / "model", "qwen2")
    return {"model": model, "dtype": "float32", "enable_sleep_mode": True}


def test_the_substitute_keeps_the_contract(tmp_path: Path) -> None:
    """So tests with the substitute test what the engine does."""
    client = start_vllm(substitute_python(tmp_path), arguments_in(tmp_path))
    engine, model = VllmEngine(client, make_model("qwen2")), make_model("qwen2")
    try:
        check_engine(engine, model, [*REQUESTS, Request([1, 2], 5, max_new_tokens=1)])
    finally:
        engine.close()
    assert client.process.returncode == 0, "it ends by itself"


def test_an_engine_exists_while_vllm_still_starts(tmp_path: Path) -> None:
    signal = tmp_path / "go on"
    python = substitute_python(tmp_path, VLLM_SUBSTITUTE_WAITS_FOR=signal)
    engine = VllmEngine(start_vllm(python, arguments_in(tmp_path)), make_model("qwen2"))
    try:
        waiting = engine.await_start(0.1)
        assert waiting is not None
        assert re.fullmatch(r"waiting for vLLM to start \(\d+ s\)", waiting)
        signal.touch()
        assert engine.await_start(60) is None
        assert engine.await_start(0) is None
        expected = TransformersEngine(make_model("qwen2"), 64).generate(REQUESTS, SAMPLED)
        for one, other in zip(engine.generate(REQUESTS, SAMPLED), expected, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
    finally:
        engine.close()


def test_a_start_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    python = substitute_python(tmp_path, VLLM_SUBSTITUTE_FAILS="no room for\n  this model")
    client = VllmClient(python, arguments_in(tmp_path))
    try:
        with pytest.raises(RolepoolError) as caught:
            client.await_start(60)
    finally:
        client.close()
    reason = "vLLM could not start: ValueError: no room for this model"
    assert str(caught.value) == f"{reason}; its output has the traceback"


def test_a_process_that_dies_in_its_start_is_an_error_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    client = VllmClient(str(script), {})
    try:
        for call in (lambda: client.await_start(60), lambda: client.ask("sleep")):
            with pytest.raises(RolepoolError) as caught:
                call()
            expected = "vLLM's process ended with exit code 3; its output says why"
            assert str(caught.value) == expected
    finally:
        client.close()


def test_a_python_that_cannot_be_run_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RolepoolError) as caught:
        VllmClient(str(tmp_path / "python"), {})
    (line,) = caught.value.problems
    assert f"vllm_python={tmp_path}/python: cannot be run" in line
    assert "No such file" in line
    assert "setup_vllm.sh" in line


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 1000\n")
    script.chmod(0o755)
    client = VllmClient(str(script), {}, start_timeout_s=0.5, end_timeout_s=0.1)
    with pytest.raises(RolepoolError) as caught:
        client.ask("sleep")
    key = "actor_rollout_ref.rollout.vllm_start_timeout_s=0.5"
    problem = "vLLM has not started in this time; look at its output, or raise the limit"
    assert str(caught.value) == f"{key}: {problem}"
    assert client.process.wait(timeout=10) == -9


def test_vllm_ends_with_its_engine_while_it_starts(tmp_path: Path) -> None:
    """If the rollout's process is killed, nobody else ends vLLM."""
    python = substitute_python(tmp_path, VLLM_SUBSTITUTE_WAITS_FOR=tmp_path / "never")
    client = VllmClient(python, arguments_in(tmp_path))
    client._connection.close()
    assert client.process.wait(timeout=60) == 0  # the substitute would wait for 120 s
    client.close()


def test_sleep_works_while_other_processes_allocate_memory(tmp_path: Path) -> None:
    python = substitute_python(tmp_path, VLLM_SUBSTITUTE_OTHERS_ALLOCATE=1)
    engine = VllmEngine(start_vllm(python, arguments_in(tmp_path)), make_model("qwen2"))
    try:
        trained = make_model("qwen2", seed=1)
        engine.sleep()
        engine.update_weights(trained.named_parameters(), 1)
        engine.wake()
        expected = TransformersEngine(copy.deepcopy(trained), 64).generate(REQUESTS, SAMPLED)
        for one, other in zip(engine.generate(REQUESTS, SAMPLED), expected, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
    finally:
        engine.close()


# The size of the cache


def config_of(*words: str) -> Config:
    """Of a model of Qwen2.5-0.5B's shape, whose weights take 0.9 GiB, and a token 12 KiB."""
    shape = Path(module.__file__).parents[1] / "recipes/shapes/qwen2.5-0.5b"
    keys = [
        f"actor_rollout_ref.model.path={shape}",
        "data.max_prompt_length=128",
        "data.max_response_length=256",
        *(f"actor_rollout_ref.rollout.{word}" for word in words),
    ]
    return load_config([], keys).config


def cache_bytes(config: Config, monkeypatch: pytest.MonkeyPatch, share: float, gib: int) -> int:
    """The size of the cache on a GPU of so much memory, in a pool with a share of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib * GIB, gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: share)
    dims = WorkerContext().dims
    return module._cache_bytes(config, dims, lambda: pytest.fail("the shape is known"))


def test_the_cache_has_room_for_all_sequences_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token_bytes = 2 * 2 * 24 * 2 * 64
    found = cache_bytes(config_of("max_num_seqs=256"), monkeypatch, share=1, gib=140)
    assert found == 256 * (128 + 256 + 16) * token_bytes


def test_a_pools_share_limits_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("max_num_seqs=100000", "gpu_memory_utilization=0.5")
    whole = cache_bytes(config, monkeypatch, share=1, gib=100)
    half = cache_bytes(config, monkeypatch, share=0.5, gib=100)
    assert 49 * GIB < whole < 50 * GIB, "half of the GPU, less the weights"
    assert whole - half == 25 * GIB


def test_no_room_for_one_sequence_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError) as caught:
        cache_bytes(config_of("gpu_memory_utilization=0.1"), monkeypatch, share=1, gib=8)
    (line,) = caught.value.problems
    assert line.startswith("actor_rollout_ref.rollout.gpu_memory_utilization=0.1: 0 B of the ")
    assert "one sequence needs 4.7 MiB; raise it" in line


def test_vllm_does_not_measure_memory_while_other_roles_load() -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes here"):
        load_config([], [f"{key}={{gpu_memory_utilization: 0.7}}"])
    loaded = load_config([], [f"{key}={{kv_cache_memory_bytes: 1000}}"])
    assert loaded.config.at(key) == {"kv_cache_memory_bytes": 1000}
