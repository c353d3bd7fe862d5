"""Loggers and monitors: they write what they are told, and never stop a run."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from rolepool.config import Config, load_config, not_trained
from rolepool.metrics import loggers, sampling
from rolepool.metrics.loggers import Loggers
from rolepool.metrics.sampling import NodeMonitor, Watched, pool_use, pool_utilization


def test_tensorboard_shows_the_rows_as_ordinary_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = Loggers(load_config([], ["trainer.logger=[tensorboard]"]).config, tmp_path)
    made.log(1, {"critic/score/mean": 0.25})
    made.log(2, {"critic/score/mean": 0.5})
    made.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert (events.Tags()["scalars"], events.Tags()["tensors"]) == (["critic/score/mean"], [])
    found = [(event.step, event.value) for event in events.Scalars("critic/score/mean")]
    assert found == [(1, 0.25), (2, 0.5)]
    assert all(
        abs(event.wall_time - time.time()) < 60 for event in events.Scalars("critic/score/mean")
    )


def test_a_logger_that_fails_is_warned_of_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(loggers.TensorBoard):
        def __init__(self, config: Config, folder: Path) -> None:
            """Needs no library."""

        def log(self, step: int, metrics: object) -> None:
            raise OSError("no space left on device")

    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", FullDisk)
    monkeypatch.setattr(not_trained, "find_spec", lambda name: object())
    made = Loggers(load_config([], ["trainer.logger=[tensorboard]"]).config, tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            made.log(step, {"a": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "trainer.logger: tensorboard failed; training continues without it: OSError('no space left on device')"
    ]


def test_wandb_gets_a_table_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = Loggers(load_config([], ["trainer.logger=[wandb]"]).config, tmp_path)
    sample = {"prompt": "a", "response": "b", "score": 0.5, "data_source": "letters"}
    made.log_samples(
        3, [{**sample, "ground_truth": "c", "acc": 1.0}, {**sample, "ground_truth": ["c", "d"]}]
    )
    made.close()
    (file,) = tmp_path.rglob("*.table.json")
    assert json.loads(file.read_text()) == {
        "columns": ["prompt", "response", "ground_truth", "score"],
        "data": [["a", "b", "c", 0.5], ["a", "b", ["c", "d"], 0.5]],
    }


def test_a_logger_that_is_not_installed_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(not_trained, "find_spec", lambda name: None)
    (problem,) = load_config([], ["trainer.logger=[console,wandb]"]).why_not_trained()
    assert "trainer.logger: wandb is not installed; pip install 'rolepool[wandb]'" in problem


def _spin() -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass


def test_a_sample_tells_a_busy_process_by_its_pool_and_forgets_one_that_is_gone() -> None:
    busy = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    busy.start()
    assert busy.pid is not None
    monitor = NodeMonitor("here", [Watched(busy.pid, "big", 3, None)], {"big": ["actor"]})
    deadline = time.monotonic() + 60
    used: list[float] = []
    while not used or (
        used[-1] <= 5 and time.monotonic() < deadline
    ):  # another program may use all cores for a while
        time.sleep(0.5)
        (row,) = monitor.sample()["processes"]
        used.append(row["cpu_percent"])
    assert (row["pool"], row["rank"], row["roles"]) == ("big", 3, ["actor"])
    assert used[-1] > 5, used
    assert row["memory_bytes"] > 2**20
    busy.kill()
    busy.join()
    assert monitor.sample()["processes"] == []


class FakeNvml:
    """NVML of a node with one GPU, or without a driver. It has the errors of the real one."""

    NVMLError = pynvml.NVMLError

    def __init__(self, has_driver: bool, is_readable: bool = True) -> None:
        self._has_driver = has_driver
        self._is_readable = is_readable

    def nvmlInit(self) -> None:
        if not self._has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=2**30, total=2**32)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if not self._is_readable:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 300_000


@pytest.mark.parametrize(
    ("nvml", "pools"),
    [
        (FakeNvml(has_driver=True), [["big"]]),
        (FakeNvml(has_driver=False), []),
        (FakeNvml(has_driver=True, is_readable=False), []),
    ],
    ids=["one GPU", "no driver", "a GPU that does not tell"],
)
def test_gpus_that_nvml_does_not_know_are_not_monitored_and_all_else_is(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, pools: list[list[str]]
) -> None:
    """A Ray can count more GPUs than there are, and a container can hide some."""
    monkeypatch.setattr(sampling, "pynvml", nvml)
    pid = os.getpid()
    watched = [Watched(pid, "big", 0, 0), Watched(pid, "big", 1, 1), Watched(pid, "small", 0, 3)]
    monitor = NodeMonitor("here", watched, {})
    sample = monitor.sample()
    assert [gpu["pools"] for gpu in sample["gpus"]] == pools
    assert [(process["pool"], process["rank"]) for process in sample["processes"]] == [
        ("big", 0),
        ("big", 1),
        ("small", 0),
    ]


def test_a_pools_utilization_is_that_of_its_gpus_and_without_them_of_its_processes() -> None:
    def sample(percent: float) -> dict[str, object]:
        processes = [
            {"pool": pool, "cpu_percent": 80.0, "memory_bytes": 2**30} for pool in ("big", "small")
        ]
        gpu = {"pools": ["big"], "utilization": percent, "memory_bytes": 2**31}
        return {"gpus": [gpu], "processes": processes}

    assert pool_utilization([sample(10), sample(30)]) == {
        "pool/big/utilization": 20,
        "pool/small/utilization": 80,
    }
    assert pool_utilization([]) == {}
    assert pool_use(sample(10)) == {"big": (10, 2.0), "small": (80, 1.0)}
