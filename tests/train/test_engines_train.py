"""Runs with other rollout engines, of models that the native engine does not know, and engines with
other weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_demo import RECIPES, start
from train_helpers import ONE_RANK, SPLIT, rows_of, small_keys

from rolepool.config import load_config
from rolepool.data.demo import Demo
from rolepool.errors import WorkerError
from rolepool.report.run import read_run
from rolepool.trainer.loop import Observer, Trainer
from rolepool.trainer.signal import measure_signal
from tiny_models import write_model
from vllm_pythons import NO_REAL_PYTHON, REAL_PYTHON, substitute_python

TRANSFORMERS = "actor_rollout_ref.rollout.name=transformers"
PADDED = "actor_rollout_ref.model.use_remove_padding=false"
TENSOR_PARALLEL = [
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
]
NO_VALIDATION = ["trainer.val_before_train=false", "data.val_files=[]"]
VLLM = "actor_rollout_ref.rollout.name=vllm"
NEEDS_VLLM = pytest.mark.skipif(not REAL_PYTHON.exists(), reason=NO_REAL_PYTHON)
STALE_ENGINE = """
from rolepool.rollout.transformers_engine import TransformersEngine

class StaleEngine(TransformersEngine):
    def __init__(self, load_model, **kwargs):
        super().__init__(load_model(), max_num_seqs=64)

    def update_weights(self, named_tensors, version):
        if version is None or version < 2:
            super().update_weights(named_tensors, version)
        else:  # it forgets one update
            self.version = version
"""

pytestmark = pytest.mark.usefixtures("one_ray")


def run(*keys: str) -> None:
    Trainer(load_config([], keys)).run()


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("gemma2", [PADDED, *ONE_RANK]),
        pytest.param("gemma3_text", SPLIT, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", ["trainer.n_gpus_per_node=2"], marks=pytest.mark.slow),
    ],
)
def test_a_model_that_only_transformers_can_generate_with_is_trained(
    demo: Demo, tmp_path: Path, model_type: str, keys: list[str]
) -> None:
    """In every step the actor's log-probs are those of the engine, or the run would stop."""
    model = write_model(tmp_path / "model", model_type, Path(demo.model))
    more = [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        *keys,
    ]
    more += [
        "trainer.total_training_steps=5",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        *NO_VALIDATION,
    ]
    run(*small_keys(demo, tmp_path / "run", TRANSFORMERS, *more))
    rows = rows_of(tmp_path / "run")
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
    assert all(row["actor/updates"] == 2 and row["critic/updates"] == 2 for row in rows)
    assert rows[0]["actor/kl_loss"] < rows[-1]["actor/kl_loss"], "the policy has changed"


def num_decoded(folder: Path) -> int:
    """The tokens of all recorded decode steps."""
    spans = [one.span for one in read_run(folder).spans]
    return sum(part.num_tokens for span in spans for part in span.parts if part.name == "decode")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [ONE_RANK, SPLIT], ids=["shared weights", "two pools"])
def test_native_and_transformers_train_alike(demo: Demo, tmp_path: Path, keys: list[str]) -> None:
    more = [*keys, "trainer.total_training_steps=2", *NO_VALIDATION]
    for name in ("native", "transformers"):
        run(*small_keys(demo, tmp_path / name, f"actor_rollout_ref.rollout.name={name}", *more))
    native, transformers = (rows_of(tmp_path / name) for name in ("native", "transformers"))
    for one, other in zip(native, transformers, strict=True):
        assert one["critic/score/mean"] == other["critic/score/mean"]
        assert one["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-4)
    decoded = [num_decoded(tmp_path / name) for name in ("native", "transformers")]
    assert decoded[0] == decoded[1] > 0, "predictions need the recorded work"


@pytest.mark.slow
@NEEDS_VLLM
@pytest.mark.parametrize(
    "keys", [ONE_RANK, SPLIT, TENSOR_PARALLEL], ids=["one pool", "two pools", "tensor parallel"]
)
def test_vllm_trains_beside_the_other_roles(demo: Demo, tmp_path: Path, keys: list[str]) -> None:
    """The demo's model has heads of 32 numbers, which vLLM needs."""
    more = [
        *keys,
        VLLM,
        f"actor_rollout_ref.rollout.vllm_python={REAL_PYTHON}",
    ]
    more += [
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        *NO_VALIDATION,
    ]
    run(*small_keys(demo, tmp_path / "run", *more))
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)


def with_substitute(folder: Path, **variables: object) -> list[str]:
    """Keys of a short run with a substitute for vLLM, in all roles' one process."""
    folder.mkdir()
    python = substitute_python(folder, **variables)
    return [
        VLLM,
        f"actor_rollout_ref.rollout.vllm_python={python}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.total_training_steps=2",
        *ONE_RANK,
        *NO_VALIDATION,
    ]


class Impatient(Observer):
    """Lets vLLM start as soon as the run says that it waits for it."""

    def __init__(self, signal: Path) -> None:
        self.signal = signal
        self.lines: list[str] = []

    def on_notice(self, line: str) -> None:
        if line.startswith("waiting for vLLM to start ("):
            self.lines.append(line)
            self.signal.touch()


def test_vllm_starts_while_the_other_roles_load(demo: Demo, tmp_path: Path) -> None:
    """vLLM does not start before all other roles are there. If one of them waited for it, the run
    would end with an error after two minutes."""
    signal = tmp_path / "go on"
    keys = with_substitute(tmp_path / "vllm", VLLM_SUBSTITUTE_WAITS_FOR=signal)
    trainer = Trainer(load_config([], small_keys(demo, tmp_path / "run", *keys)))
    trainer.observer = observer = Impatient(signal)
    trainer.run()
    assert observer.lines
    assert [row["training/global_step"] for row in rows_of(tmp_path / "run")] == [1, 2]


def test_signal_says_that_it_waits_for_vllm(demo: Demo, tmp_path: Path) -> None:
    signal = tmp_path / "go on"
    keys = with_substitute(tmp_path / "vllm", VLLM_SUBSTITUTE_WAITS_FOR=signal)
    observer = Impatient(signal)
    loaded = load_config([], small_keys(demo, tmp_path / "run", *keys))
    measured = measure_signal(loaded, num_prompts=4, say=observer.on_notice)
    assert observer.lines
    assert sum(len(source.groups) for source in measured.sources.values()) == 4


def test_a_start_of_vllm_that_fails_ends_the_run_with_one_line(demo: Demo, tmp_path: Path) -> None:
    keys = with_substitute(tmp_path / "vllm", VLLM_SUBSTITUTE_FAILS="no room for this model")
    with pytest.raises(WorkerError) as caught:
        run(*small_keys(demo, tmp_path / "run", *keys))
    (line,) = str(caught.value).splitlines()
    assert line.startswith("vLLM could not start: ValueError: no room for this model; ")
    assert not (tmp_path / "run").exists(), "nothing is written before everything has started"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=NEEDS_VLLM)])
def test_the_demo_learns_under_another_engine(engine: str, demo: Demo, tmp_path: Path) -> None:
    words = [
        f"actor_rollout_ref.rollout.name={engine}",
        f"actor_rollout_ref.rollout.vllm_python={REAL_PYTHON}",
    ]
    page = (RECIPES.parent / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f"rolepool train recipes/demo_split.yaml {words[0]}\n" in page
    run = start(
        demo, str(RECIPES / "demo_split.yaml"), *words, f"trainer.default_local_dir={tmp_path}"
    )
    output, _ = run.communicate(timeout=900)
    assert run.returncode == 0, output
    held_out = [
        value
        for row in rows_of(tmp_path)
        for name, value in row.items()
        if name.startswith("val-core/")
    ]
    assert held_out[0] < 0.3 and held_out[-1] > 0.9


def test_an_engine_that_keeps_old_weights_stops_the_run(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stale_engine.py").write_text(STALE_ENGINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    words = [
        *ONE_RANK,
        "actor_rollout_ref.rollout.name=stale_engine:StaleEngine",
        "trainer.total_training_steps=5",
    ]
    with pytest.raises(WorkerError) as caught:
        run(*small_keys(demo, tmp_path / "run", *words, *NO_VALIDATION))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(
        "actor_rollout_ref.rollout.name=stale_engine:StaleEngine: the engine's log-probs, with "
    )
    assert "version 2 of the weights, are " in line and "parity_limit is 0.0002" in line
    assert [row["training/global_step"] for row in rows_of(tmp_path / "run")] == [1, 2], (
        "step 3 changed nothing"
    )
