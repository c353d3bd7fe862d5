"""A run that generates ahead is stopped, loses processes or moves: its numbers are those of a run to
which nothing happened, because what waits in its queue belongs to its state."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_helpers import rows_of

from commands import load_benchmark
from rolepool.cli import main
from rolepool.config import load_config
from rolepool.trainer.loop import Trainer

chaos = load_benchmark("chaos")
NUM_STEPS = 6
STEPS = [f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=2"]
PARITY = "actor_rollout_ref.rollout.parity_check=true"
"""Rows that were generated with older weights must not be compared with the actor's log-probs."""

pytestmark = pytest.mark.usefixtures("one_ray")
Undisturbed = Callable[..., Path]
SINGLE = "single"
"""A placement of one process, which starts fast."""


def keys_with(folder: Path, k: int, placement: str = "apart") -> list[str]:
    keys: list[str] = chaos.demo_keys(folder, "together" if placement == SINGLE else placement)
    if placement == SINGLE:
        keys.append("trainer.n_gpus_per_node=1")
    return [*keys, *STEPS, PARITY, f"algorithm.max_staleness={k}"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "data"


@pytest.fixture(scope="module")
def undisturbed(data: Path, one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The folder of a run with k to which nothing happens. It is made once."""
    folders: dict[tuple[int, str], Path] = {}

    def folder_of(k: int, placement: str = "apart") -> Path:
        case = (k, placement)
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp(f"undisturbed_{k}") / "run"
            chaos.run(folders[case], keys_with(data, k, placement))
        return folders[case]

    return folder_of


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of steps, without what is measured."""
    return [row for row in rows_of(folder) if "training/global_step" in row]


def steps_without_generation(folder: Path) -> list[int]:
    """The steps whose responses came from a saved state."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "training/global_step" in row]
    return [row["step"] for row in steps if "timing_s/gen" not in row]


# Deaths

DEATHS = {
    "rollout:generation": 5,
    "actor0:update": 4,
    "actor1:snapshot": 9,
    "rollout:sync": 4,
    "reward:scoring": 4,
    "together/rank0:update": 4,
}
"""Victims, phases, and the call of the phase at which it dies."""
IN_EVERY_RUN = (1, "together/rank0:update")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("k", "case"),
    [
        pytest.param(k, case, marks=[] if (k, case) == IN_EVERY_RUN else pytest.mark.slow)
        for k in (1, 2)
        for case in DEATHS
    ],
)
def test_after_a_death_a_run_learns_from_the_responses_that_waited(
    k: int, case: str, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    placement = SINGLE if "/" in case else "apart"
    with chaos.kill_at(*case.split(":"), DEATHS[case]) as killed_s:
        outcome = chaos.run(folder, keys_with(data, k, placement))
    assert killed_s, "the victim was not killed"
    (restart,) = outcome.restarts
    first = restart["repeated_from_step"]
    assert first > 1, "the run did not go back to a state with a queue"
    assert training_rows(folder) == training_rows(undisturbed(k, placement))
    restored = range(first, min(first + k, NUM_STEPS + 1))
    assert steps_without_generation(folder) == list(restored)
    assert not list(Path("/dev/shm").glob(f"rolepool-{os.getpid()}-*"))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", ["actor0:update", "rollout:generation"])
def test_a_snapshot_of_an_earlier_step_still_has_its_queue(
    case: str, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    keys = [*keys_with(data, 1), "trainer.snapshot_freq=2", "trainer.save_freq=-1"]
    with chaos.kill_at(*case.split(":"), 6) as killed_s:
        outcome = chaos.run(folder, keys)
    assert killed_s, "the victim was not killed"
    (restart,) = outcome.restarts
    assert restart["repeated_from_step"] in (3, 5)
    assert training_rows(folder) == training_rows(undisturbed(1))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("k", [1, 2])
def test_after_the_death_of_the_driver_the_queue_comes_from_a_checkpoint(
    k: int, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    outcome = chaos.run_driver(folder, keys_with(data, k), "driver:sync")
    assert outcome.restarts
    assert training_rows(folder) == training_rows(undisturbed(k))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("placement", ["together", "tp", "split"])
def test_after_a_death_in_a_pool_that_also_generates(
    placement: str, data: Path, tmp_path: Path
) -> None:
    keys = keys_with(data, 1, placement)
    expected = chaos.run(tmp_path / "expected", keys)
    victim = "actor0" if placement == "split" else "rank1"
    with chaos.kill_at(f"{placement}/{victim}", "update", 6) as killed_s:
        outcome = chaos.run(tmp_path / "run", keys)
    assert killed_s, "the victim was not killed"
    assert outcome.restarts
    assert outcome.rows == expected.rows


# Resuming


def resume(keys: list[str], folder: Path, used: Path, *more: str) -> list[str]:
    """Resume a run in a copy of its folder. Returns the lines that it tells."""
    shutil.copytree(used, folder)
    for checkpoint in folder.glob("checkpoints/step_*"):
        if checkpoint.name > "step_000002":
            shutil.rmtree(checkpoint)
    story = chaos.Story()
    words = [*keys, f"trainer.default_local_dir={folder}", *more]
    trainer = Trainer(load_config([], words))
    trainer.observer = story
    trainer.run()
    return [line for _, line in story.notices]


def test_a_run_is_resumed_with_what_waited_in_its_queue(
    data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    used = undisturbed(1, SINGLE)
    saved = used / "checkpoints" / "step_000002"
    names = sorted(path.name for path in saved.glob("queue_*"))
    assert names == ["queue_000003_rollouts.safetensors", "queue_000003_scores.safetensors"]
    state = json.loads((saved / "trainer.json").read_text())
    assert [queued["step"] for queued in state["queue"]] == [3]
    last = used / "checkpoints" / f"step_{NUM_STEPS:06d}"
    assert not list(last.glob("queue_*")), "nothing is generated beyond the last step"

    folder = tmp_path / "run"
    lines = resume(keys_with(data, 1, SINGLE), folder, used)
    assert training_rows(folder) == training_rows(used)
    assert steps_without_generation(folder) == [3]
    assert not any("max_staleness" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("k", "words", "staleness"),
    [
        (0, "learns from these responses first", [0, 1, 1, 0, 0, 0]),
        (2, "those up to step 5 are generated with its weights", [0, 1, 1, 1, 2, 2]),
    ],
)
def test_a_run_is_resumed_with_another_k(
    k: int,
    words: str,
    staleness: list[int],
    data: Path,
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    lines = resume(keys_with(data, k), folder, undisturbed(1))
    assert any(words in line for line in lines)
    assert [row["training/staleness/max"] for row in training_rows(folder)] == staleness


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_whose_checkpoint_has_a_damaged_queue_does_not_start(
    data: Path, undisturbed: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = Path(shutil.copytree(undisturbed(1), tmp_path / "run"))
    checkpoint = used / "checkpoints" / "step_000002"
    (checkpoint / "queue_000003_scores.safetensors").write_bytes(b"x")
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    keys = [*keys_with(data, 1), f"trainer.default_local_dir={used}", *words]
    assert main(["train", *keys]) == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if not line.startswith("warning: ")]
    assert "queue_000003_scores.safetensors: damaged, because its hash" in line


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_with_bypass_mode_only_rows_of_the_present_weights_are_compared(
    data: Path, tmp_path: Path
) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    chaos.run(tmp_path / "run", [*keys_with(data, 2), bypass])
    distances = [row["actor/ppo_kl"] for row in training_rows(tmp_path / "run")]
    assert abs(distances[0]) < 1e-6 < abs(distances[-1]), "the ratio is that to the engine's policy"


# Moves


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("k", [1, 2])
def test_a_run_that_moves_takes_its_queue_with_it(
    k: int, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The numbers of ranks stay the same, so the numbers do, bit for bit."""
    swapped = """placement.strategy=custom placement.pools={actor_pool:[2],other_pool:[1]}
    placement.roles={actor:actor_pool,ref:actor_pool,rollout:other_pool,critic:other_pool}"""
    outcome = chaos.run(tmp_path / "run", keys_with(data, k), moves={3: swapped.split()})
    (move,) = outcome.moves
    assert move["after_step"] == 4
    assert training_rows(tmp_path / "run") == training_rows(undisturbed(k))
    assert steps_without_generation(tmp_path / "run") == list(range(5, 5 + k))
