"""Files that cannot be read or written: one line that says which and what to do, exit code 2,
nothing half-written."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from synthetic_runs import write_run

from commands import Outcome
from rolepool.errors import ConfigError
from rolepool.files import write_atomically
from rolepool.metrics.run_folder import RunFolder

Rolepool = Callable[..., Outcome]

UNREADABLE = "/proc/self/mem"
"""Opens as a file, and then cannot be read, not even by root."""


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """As on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def assert_one_line(outcome: Outcome, *words: str) -> None:
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome.err
    assert outcome.err.startswith("error: ")
    for word in words:
        assert word in outcome.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", num_steps=2)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("trace RUN -o FILE/trace.json", ("trace FILE/trace.json: cannot be written", "-o")),
        ("trace RUN -o FOLDER", ("trace FOLDER: cannot be written", "-o")),
        ("report RUN -o FILE/page.html", ("report FILE/page.html: cannot be written", "-o")),
        (
            "plot RUN --output-dir FILE",
            ("--output-dir FILE: cannot be written", "name another folder"),
        ),
        (
            "compare RUN RUN --output-dir FILE/it",
            ("--output-dir FILE/it: cannot be written", "name another folder"),
        ),
        ("demo FILE/demo", ("FILE/demo: cannot be written", "name another folder")),
    ],
)
def test_a_place_that_cannot_be_written_to_is_named_with_its_option(
    rolepool: Rolepool, tmp_path: Path, run: Path, command: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "a_file").write_text("mine", encoding="utf-8")
    (tmp_path / "a_folder").mkdir()
    places = {"RUN": run, "FILE": tmp_path / "a_file", "FOLDER": tmp_path / "a_folder"}

    def filled(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, str(place))
        return text

    before = sorted(tmp_path.rglob("*"))
    assert_one_line(rolepool(*filled(command).split()), *map(filled, words))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_no_half_of_a_trace(rolepool: Rolepool, run: Path) -> None:
    with no_file_larger_than(1000):
        outcome = rolepool("trace", str(run))
    assert_one_line(outcome, f"trace {run / 'trace.json'}: cannot be written (File too large)")
    assert not list(run.glob("*trace*"))


def test_a_full_disk_in_a_run_is_told_with_the_key_of_its_folder(tmp_path: Path) -> None:
    with no_file_larger_than(10), pytest.raises(ConfigError) as raised:
        RunFolder(tmp_path).add_metrics(1, {"critic/score/mean": 0.5})
    key = f"trainer.default_local_dir={tmp_path}"
    assert (
        str(raised.value)
        == f"{key}: metrics.jsonl cannot be written (File too large); fix it and resume"
    )


def test_a_full_disk_leaves_no_half_of_a_demo(rolepool: Rolepool, tmp_path: Path) -> None:
    """Its prompts fit, and the model, which is not written by Python, does not."""
    with no_file_larger_than(2**20):
        outcome = rolepool("demo", str(tmp_path / "demo"))
    assert_one_line(outcome, f"{tmp_path / 'demo'}: cannot be written", "File too large")
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_cannot_be_read_are_named_with_their_key(
    rolepool: Rolepool, tmp_path: Path
) -> None:
    from rolepool.data.demo import make_demo

    model = make_demo(tmp_path / "demo").model
    file = tmp_path / "prompts.jsonl"
    file.symlink_to(UNREADABLE)
    keys = [
        f"actor_rollout_ref.model.path={model}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
    ]
    keys += ["data.max_prompt_length=8", "data.max_response_length=4"]
    outcome = rolepool(
        "train", *keys, f"data.train_files={file}", f"trainer.default_local_dir={tmp_path / 'run'}"
    )
    assert_one_line(
        outcome,
        f"data.train_files={file}: cannot be read (Input/output error); name a readable file",
    )
    assert not (tmp_path / "run").exists()


def test_metrics_that_cannot_be_read_are_named(rolepool: Rolepool, run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(UNREADABLE)
    for command in ("report", "trace", "plot"):
        assert_one_line(
            rolepool(command, str(run)),
            f"{run / 'metrics.jsonl'}: cannot be read (Input/output error)",
        )


def test_what_no_command_foresees_names_the_file_and_the_reason(
    rolepool: Rolepool, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("mine", encoding="utf-8")
    outcome = rolepool(
        "compare", "--run", str(root / "recipes/demo.yaml"), "--", "standard", "split"
    )
    assert outcome == (2, "", "error: runs/compare_demo: Not a directory\n")


def test_a_file_whose_writing_fails_is_left_as_it_was(tmp_path: Path) -> None:
    def pieces() -> Iterator[str]:
        yield "half"
        raise RuntimeError("no more")

    file = tmp_path / "file.txt"
    file.write_text("old", encoding="utf-8")
    with pytest.raises(RuntimeError):
        write_atomically(file, pieces())
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]
    assert file.read_text(encoding="utf-8") == "old"


def test_plots_and_pages_take_the_place_of_old_ones_only_when_they_are_whole(
    rolepool: Rolepool, tmp_path: Path, run: Path
) -> None:
    """A file that is written over shows in its second name; one that is replaced does not."""
    commands = [("plot", str(run)), ("compare", str(run), str(run))]
    output = ("--output-dir", str(tmp_path / "output"))
    for command in commands:
        assert rolepool(*command, *output).code == 0
    written = sorted((tmp_path / "output").iterdir())
    assert {path.suffix for path in written} == {".csv", ".html", ".png"}
    for path in written:
        path.write_text("old", encoding="utf-8")
        os.link(path, tmp_path / f"second-{path.name}")
    for command in commands:
        assert rolepool(*command, *output).code == 0
    assert sorted((tmp_path / "output").iterdir()) == written
    for path in written:
        assert path.read_bytes() != b"old"
        assert (tmp_path / f"second-{path.name}").read_bytes() == b"old"
