"""What ends a run from outside: kills of the driver and of Ray, and signals to the whole process
group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from train_helpers import rows_of, small_keys

from rolepool.data.demo import Demo
from rolepool.metrics.run_rows import last_step

STEPS = [
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=16",
    "trainer.save_freq=2",
    "trainer.logger=[console]",
]
TIMEOUT_S = 120


def start(
    demo: Demo, folder: Path, *more: str, wrapper: tuple[str, ...] = (), **options: object
) -> subprocess.Popen[str]:
    command = [
        *wrapper,
        sys.executable,
        "-m",
        "rolepool",
        "train",
        *small_keys(demo, folder, *STEPS, *more),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, **options)  # type: ignore[call-overload, no-any-return]


def wait_for_step(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    rows, deadline = folder / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while not rows.exists() or f'"step": {step},' not in rows.read_text():
        assert time.monotonic() < deadline and run.poll() is None, run.communicate()[0]
        time.sleep(0.02)


def processes_of(run: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The driver, and Ray's processes by name."""
    command = psutil.Process(run.pid)
    return {"driver": command.children()[0]} | {
        process.name(): process for process in command.children(recursive=True)
    }


@pytest.fixture(scope="module")
def undisturbed(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = start(demo, folder)
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, output
    return rows_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("driver", "driver, killed by signal 9, after step "),
        ("raylet", "error: Ray's raylet (pid "),
        ("gcs_server", "error: Ray's GCS server (pid "),
    ],
)
def test_a_kill_is_named_in_a_line_and_the_run_continues_with_the_same_numbers(
    victim: str, words: str, demo: Demo, tmp_path: Path, undisturbed: list[dict[str, object]]
) -> None:
    run = start(demo, tmp_path)
    wait_for_step(run, tmp_path, 3)
    before = processes_of(run)
    os.kill(before[victim].pid, signal.SIGKILL)
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, output
    assert words in output and "Traceback" not in output and "raylet.out" not in output, output
    assert "restarts: 1; " in output
    rows = rows_of(tmp_path)
    assert [row for row in rows if "restart" not in row] == undisturbed
    (restart,) = [row for row in rows if "restart" in row]
    assert restart["restart"]["repeated_from_step"] % 2 == 1, "the step after a checkpoint"
    assert not [process for process in before.values() if process.is_running()]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_process_group_saves_the_step(
    number: signal.Signals, code: int, demo: Demo, tmp_path: Path
) -> None:
    run = start(
        demo,
        tmp_path,
        "trainer.total_training_steps=5000",
        "trainer.save_freq=5000",
        process_group=0,
    )
    wait_for_step(run, tmp_path, 2)
    os.killpg(run.pid, number)
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == code, output
    assert (
        "was finished and saved; the same command resumes from it" in output
        and "Traceback" not in output
    )


@pytest.mark.slow
def test_timeout_ends_a_run_as_sigterm_does(demo: Demo, tmp_path: Path) -> None:
    more = ["trainer.total_training_steps=100000", "trainer.save_freq=100000"]
    run = start(
        demo, tmp_path, *more, wrapper=("timeout", "--preserve-status", "-s", "TERM", "3600")
    )
    wait_for_step(run, tmp_path, 2)
    run.send_signal(signal.SIGALRM)  # the signal that `timeout` gets when the time is up
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 143, output
    assert (
        "was finished and saved; the same command resumes from it" in output
        and "Traceback" not in output
    )


def test_ray_that_starts_too_slowly_is_started_again_with_a_longer_limit() -> None:
    program = (
        "import logging, ray\n"
        "from rolepool.cluster.connection import connect\n"
        "logging.basicConfig()\n"
        "connect(None, 1, 'cpu')\n"
        "print(ray.is_initialized())"
    )
    limit = {**os.environ, "RAY_gcs_server_port_wait_time_s": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=limit,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.stdout == "True\n", ended.stderr
    assert (
        "trying once more with a longer time limit" in ended.stderr
        and "Traceback" not in ended.stderr
    )


FAILS_IN_THE_RUN = """
import sys
from rolepool import ResourcePoolManager
from rolepool.placement.roles import ROLE_SPECS


def pools(config, gpus_per_node):
    parts = {"move": [1, 1]}[sys.argv[1]]
    return ResourcePoolManager({"all": [1]}, dict.fromkeys(ROLE_SPECS, "all"))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_moves_when_another_process_asks_it(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "fails_in_the_run.py").write_text(FAILS_IN_THE_RUN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    run = start(
        demo,
        folder,
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=1000",
        "trainer.save_freq=-1",
    )

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rolepool", "move", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)

    try:
        wait_for_step(run, folder, 2)
        refused = ask("trainer.n_gpus_per_node=64", "data.train_batch_size=64")
        assert refused.returncode == 2 and "a move changes placement" in refused.stderr
        too_many = ask("trainer.n_gpus_per_node=16")
        assert too_many.returncode == 2 and "16" in too_many.stderr
        failed = ask("placement.strategy=fails_in_the_run:pools")
        assert failed.returncode == 2
        assert "the function failed (KeyError at fails_in_the_run.py:8: 'train')" in failed.stderr
        answer = ask("placement.strategy=split")
        assert answer.returncode == 0, answer.stderr
        assert "s: waiting for the end of the current step" in answer.stderr
        assert (
            "s: starting processes for actor_rollout_ref_pool [1] and critic_pool [1]"
            in answer.stderr
        )
        assert "global_pool [2] -> actor_rollout_ref_pool [1] and critic_pool [1]" in answer.stdout
        step = last_step(folder)
        wait_for_step(run, folder, step + 3)
    finally:
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=TIMEOUT_S)
    assert "moved after step" in output
