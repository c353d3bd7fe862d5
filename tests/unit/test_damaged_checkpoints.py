"""A checkpoint that has changed since it was saved is not used: the older one is, or the error
names the file."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_checkpoint import SMALL

from rolepool.config import load_config
from rolepool.errors import ConfigError
from rolepool.metrics.run_folder import RunFolder
from rolepool.models import checkpoint as model_files
from rolepool.trainer.checkpoint import Checkpoints
from rolepool.trainer.state import TrainState

RANK_FILE = "actor/rank_00000_of_00001.json"


def save(run: Path, step: int) -> Path:
    """A checkpoint of one role, as a run saves it."""
    final = model_files.checkpoint_folder(run, step)
    temporary = model_files.temporary_folder(final)
    model_files.save_trained(SMALL, temporary / "actor")
    state = temporary / "trainer.json"
    state.write_text(TrainState(step=step, data={}, kl_controller={}).model_dump_json())
    model_files.write_hashes(state, [state])
    model_files.publish(temporary, final)
    return final


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved")
    save(run, 1)
    save(run, 2)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 1 and 2, for a test to damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def found(run: Path, *words: str) -> Path | None:
    config = load_config([], [f"trainer.default_local_dir={run}", *words]).config
    checkpoint = Checkpoints(config, RunFolder(run), ["actor"]).find()
    return None if checkpoint is None else checkpoint.path


def without_hashes(checkpoint: Path) -> None:
    """Each other file stays as it was saved."""
    for file in checkpoint.rglob("*.sha256"):
        file.unlink()


def flip_two_bytes(checkpoint: Path) -> None:
    file = max(checkpoint.glob("actor/*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-100] ^= 0xFF
    content[-101] ^= 0xFF
    file.write_bytes(content)


def no_random_states(checkpoint: Path) -> None:
    without_hashes(checkpoint)
    file = checkpoint / RANK_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "rng": {}}))


def short_random_state(checkpoint: Path) -> None:
    without_hashes(checkpoint)
    file = checkpoint / RANK_FILE
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "rng": {**content["rng"], "torch": [1, 2, 3]}}))


def another_step(checkpoint: Path) -> None:
    without_hashes(checkpoint)
    (checkpoint / "trainer.json").write_text(
        TrainState(step=10**9, data={}, kl_controller={}).model_dump_json()
    )


def many_ranks(checkpoint: Path) -> None:
    (checkpoint / RANK_FILE).rename(checkpoint / "actor" / "rank_00000_of_99999999.json")


def nested_state(checkpoint: Path) -> None:
    without_hashes(checkpoint)
    (checkpoint / "trainer.json").write_text("[" * 100_000 + "]" * 100_000)


def nested_rank_file(checkpoint: Path) -> None:
    without_hashes(checkpoint)
    (checkpoint / RANK_FILE).write_text('{"rng": ' * 100_000 + "{}" + "}" * 100_000)


def spoil_hashes(checkpoint: Path) -> None:
    (checkpoint / "trainer.sha256").write_bytes(b"\xff\xfe")


def no_hash_of_the_state(checkpoint: Path) -> None:
    (checkpoint / "trainer.sha256").unlink()


def empty_hash_of_the_state(checkpoint: Path) -> None:
    (checkpoint / "trainer.sha256").write_text("")


def empty_hashes_of_a_rank(checkpoint: Path) -> None:
    (checkpoint / RANK_FILE).with_suffix(".sha256").write_text("")


def one_hash_of_a_rank_is_missing(checkpoint: Path) -> None:
    hashes = (checkpoint / RANK_FILE).with_suffix(".sha256")
    hashes.write_text(
        "".join(line for line in hashes.open() if not line.endswith(".safetensors\n"))
    )


def hashes_of_a_file_elsewhere(checkpoint: Path) -> None:
    """The names in a list are those of files beside it."""
    hashes = checkpoint / "trainer.sha256"
    digest, _ = hashes.read_text().split("  ")
    hashes.write_text(f"{digest}  ../step_000001/trainer.json\n")


def change_state(checkpoint: Path) -> None:
    (checkpoint / "trainer.json").write_text(
        TrainState(step=2, data={"x": 1}, kl_controller={}).model_dump_json()
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_two_bytes, "its hash is not the one that was saved"),
        (change_state, "trainer.json: damaged"),
        (no_random_states, "not a valid rank file"),
        (short_random_state, "not a valid rank file"),
        (another_step, "step=1000000000 is not the step of its folder"),
        (many_ranks, "No such file or directory"),
        (nested_state, "trainer"),
        (nested_rank_file, "not a valid rank file"),
        (spoil_hashes, "not a list of hashes"),
        (without_hashes, "no list has its hash"),
        (no_hash_of_the_state, "trainer.json: damaged, because no list has its hash"),
        (empty_hash_of_the_state, "trainer.json: damaged, because no list has its hash"),
        (hashes_of_a_file_elsewhere, "trainer.json: damaged, because no list has its hash"),
        (empty_hashes_of_a_rank, "no list has its hash"),
        (one_hash_of_a_rank_is_missing, "no list has its hash"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.timeout(30)
def test_the_older_checkpoint_is_used_and_one_line_says_why(
    run: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reason: str
) -> None:
    newest = model_files.checkpoint_folder(run, 2)
    assert found(run) == newest
    damage(newest)
    assert found(run) == model_files.checkpoint_folder(run, 1)
    (line,) = caplog.messages
    assert line.startswith(f"skipping {newest}: ") and reason in line and "\n" not in line


@pytest.mark.parametrize(
    "damage", [flip_two_bytes, another_step, nested_state, no_hash_of_the_state]
)
def test_a_damaged_checkpoint_that_is_named_is_an_error(
    run: Path, damage: Callable[[Path], None]
) -> None:
    newest = model_files.checkpoint_folder(run, 2)
    damage(newest)
    with pytest.raises(ConfigError) as caught:
        found(run, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}")
    assert len(caught.value.problems) == 1 and str(newest) in str(caught.value)


def test_if_every_checkpoint_is_damaged_a_run_does_not_begin_again(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip_two_bytes(model_files.checkpoint_folder(run, 2))
    empty_hash_of_the_state(model_files.checkpoint_folder(run, 1))
    before = files_of(run)
    with pytest.raises(ConfigError) as caught:
        found(run)
    summary, newest, oldest = caught.value.problems
    assert summary.startswith(
        f"trainer.resume_mode=auto: all 2 checkpoints of {run} cannot be used"
    )
    assert "trainer.resume_mode=disable" in summary
    assert (
        newest.startswith(str(run / "checkpoints/step_000002"))
        and "its hash is not the one that was saved" in newest
    )
    assert (
        oldest.startswith(str(run / "checkpoints/step_000001")) and "no list has its hash" in oldest
    )
    assert files_of(run) == before and not caplog.messages
    assert found(run, "trainer.resume_mode=disable") is None


def test_a_folder_that_lost_its_state_is_a_damaged_checkpoint(run: Path) -> None:
    for step in (1, 2):
        (model_files.checkpoint_folder(run, step) / "trainer.json").unlink()
    with pytest.raises(ConfigError, match=r"trainer\.json cannot be read"):
        found(run)


def test_a_run_without_checkpoints_begins(tmp_path: Path) -> None:
    """A save that was interrupted is no checkpoint."""
    (tmp_path / "checkpoints" / ".tmp-step_000001").mkdir(parents=True)
    assert found(tmp_path) is None


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", [without_hashes, no_hash_of_the_state, empty_hashes_of_a_rank])
def test_the_error_says_how_to_accept_a_checkpoint_without_hashes(
    run: Path, damage: Callable[[Path], None]
) -> None:
    """Following it, once for each folder without a list, makes the checkpoint usable."""
    newest = model_files.checkpoint_folder(run, 2)
    damage(newest)
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}"]
    for _ in range(2):
        try:
            assert found(run, *words) == newest
            break
        except ConfigError as error:
            command, folder = str(error).split("run `")[1].split("` in ")
            subprocess.run(command, shell=True, cwd=folder, check=True, timeout=30)
    assert found(run, *words) == newest


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    newest = model_files.checkpoint_folder(run, 2)
    flip_two_bytes(newest)
    with pytest.raises(ConfigError, match="its hash is not the one that was saved"):
        model_files.export_hf(newest / "actor", newest / "actor", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_every_file_has_a_hash_that_sha256sum_accepts(run: Path) -> None:
    newest = model_files.checkpoint_folder(run, 2)
    for folder in (newest, newest / "actor"):
        lists = [file.name for file in folder.glob("*.sha256")]
        checked = subprocess.run(
            ["sha256sum", "--check", *lists], cwd=folder, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stderr
        files = {file.name for file in folder.iterdir() if file.is_file()} - {*lists}
        assert {line.split(":")[0] for line in checked.stdout.splitlines()} == files


def test_a_role_without_hashes_is_loaded(tmp_path: Path) -> None:
    """Older versions and snapshots write none."""
    model_files.save_trained(SMALL, tmp_path / "role")
    for file in tmp_path.rglob("*.sha256"):
        file.unlink()
    model_files.load_trained(SMALL, tmp_path / "role")
