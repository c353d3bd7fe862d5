"""Asking a run to move: what is refused before the run is touched, and what is asked when no run
trains."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Outcome
from rolepool.config import load_config
from rolepool.errors import ConfigError, PlacementError
from rolepool.metrics.run_folder import RunFolder
from rolepool.placement import build_plan
from rolepool.trainer.moves import (
    answer_request,
    ask_run,
    changed_pools,
    check_move,
    moved,
    request_file,
    take_request,
)

KEYS = [
    "trainer.n_gpus_per_node=4",
    "trainer.device=cpu",
    "data.train_files=rows.jsonl",
    "data.train_batch_size=8",
]
KEYS += ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.model.path=model"]
CUSTOM = ["placement.strategy=custom", "placement.pools={a:[2],b:[1],c:[1]}"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that trains: its files say so."""
    loaded = load_config([], KEYS)
    folder = RunFolder(tmp_path)
    folder.write("config.yaml", loaded.to_yaml())
    folder.add_plan(1, build_plan(loaded.config))
    folder.write("state.json", "{}")
    folder.write(".lock", "process 1 on elsewhere")
    return tmp_path


def test_a_strategy_in_the_words_replaces_the_keys_of_the_old_one() -> None:
    roles = "placement.roles={actor:a,rollout:c,ref:a,critic:b}"
    config = load_config([], [*KEYS, *CUSTOM, roles]).config
    plan, loaded = moved(
        config, ["placement.strategy=split", "placement.split.actor_gpus_per_node=3"]
    )
    assert loaded.config.placement.pools == {}
    assert plan.in_words == "actor_rollout_ref_pool [3] and critic_pool [1]"


@pytest.mark.parametrize(
    "word", ["critic.optim.lr=1", "trainer.device=cuda", "split", "trainer.nnodes_=2"]
)
def test_other_keys_need_a_new_start(
    word: str, run: Path, rolepool: Callable[..., Outcome]
) -> None:
    outcome = rolepool("move", str(run), "placement.strategy=split", word)
    assert outcome.code == 2
    assert f"{word}: a move changes placement.*" in outcome.err and "Traceback" not in outcome.err
    assert not request_file(run).exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["placement.strategy=split", "placement.split.actor_gpus_per_node=4"],
            "the critic would have no GPU",
        ),
        (["trainer.n_gpus_per_node=3"], "data.train_batch_size=8"),
        (["placement.strategy=nothing"], "placement.strategy=nothing"),
        ([], "a move changes placement.*"),
    ],
)
def test_a_bad_placement_is_refused_and_the_run_is_not_asked(
    words: list[str], problem: str, run: Path, rolepool: Callable[..., Outcome]
) -> None:
    outcome = rolepool("move", str(run), *words)
    assert outcome.code == 2 and problem in outcome.err
    assert not request_file(run).exists()


def test_a_placement_that_does_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    shape = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
    }
    shape |= {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "architectures": [],
    }
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    keys = [*KEYS, f"actor_rollout_ref.model.path={tmp_path}", "trainer.device=cuda"]
    plan, loaded = moved(load_config([], keys).config, ["trainer.n_gpus_per_node=1"])
    with pytest.raises(PlacementError, match=r"global_pool needs about .* GiB more than a GPU has"):
        check_move(loaded.config, plan, 80 * 2**30)


def test_pools_with_the_same_places_and_roles_are_kept() -> None:
    roles = "placement.roles={actor:a,rollout:%s,critic:b}"
    old = load_config([], [*KEYS, *CUSTOM, roles % "c"])
    plan, loaded = moved(
        old.config, ["placement.strategy=custom", "placement.pools={a:[2],b:[2]}", roles % "b"]
    )
    assert changed_pools(old.config, build_plan(old.config), loaded.config, plan) == ["b"]


def test_no_run_trains(run: Path, rolepool: Callable[..., Outcome]) -> None:
    (run / ".lock").unlink()
    outcome = rolepool("move", str(run), "placement.strategy=split")
    assert outcome.code == 2 and "does not train now" in outcome.err
    assert not request_file(run).exists()


def test_a_run_that_does_not_answer_is_not_asked_any_more(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"has not moved within --timeout 0\.1 s"):
        ask_run(run, ["placement.strategy=split"], 0.1)
    assert take_request(run) is None


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_answer_reaches_the_one_who_asked(is_refused: bool, run: Path) -> None:
    def answer() -> None:
        while (request := take_request(run)) is None:
            time.sleep(0.01)
        assert request.words == ["placement.strategy=split"]
        answer_request(run, "the answer", is_refused=is_refused)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    if is_refused:
        with pytest.raises(ConfigError, match="the answer"):
            ask_run(run, ["placement.strategy=split"], 60)
    else:
        assert ask_run(run, ["placement.strategy=split"], 60) == "the answer"
    thread.join(10)
    assert not request_file(run).exists()
