"""Defaults that fit the machine, the model and the batch size; a value that the user sets stays as
it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rolepool.config import load_config
from rolepool.config.fitting import num_gpus, num_slots
from rolepool.errors import ConfigError
from rolepool.placement import build_plan
from rolepool.placement.checks import find_problems, find_warnings

Rolepool = Callable[..., Any]
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


def value(key: str, *overrides: str) -> object:
    return load_config(overrides=overrides).value_of(key)


# The batch


@pytest.mark.parametrize(
    ("batch", "mini_batch"), [(1024, 256), (32, 32), (1, 1), (256, 256), (300, 150), (384, 192)]
)
def test_the_default_mini_batch_divides_the_batch_and_the_critic_follows_it(
    batch: int, mini_batch: int
) -> None:
    config = load_config(overrides=[f"data.train_batch_size={batch}"]).config
    assert config.at(MINI_BATCH) == config.critic.ppo_mini_batch_size == mini_batch


def test_a_key_that_follows_a_fitted_default_is_checked_with_the_fitted_value() -> None:
    follower = "algorithm.gamma=${critic.ppo_mini_batch_size}"
    with pytest.raises(ConfigError, match="gamma=150: must be less than or equal to 1"):
        load_config(overrides=["data.train_batch_size=300", follower])


def test_a_mini_batch_that_the_user_sets_is_never_changed() -> None:
    assert value(MINI_BATCH, "data.train_batch_size=32", f"{MINI_BATCH}=8") == 8
    with pytest.raises(
        ConfigError, match=f"{MINI_BATCH}=64: must divide data.train_batch_size=32; use 32"
    ):
        load_config(overrides=["data.train_batch_size=32", f"{MINI_BATCH}=64"])


def test_a_default_is_fitted_beside_a_wrong_key_and_the_wrong_key_alone_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            overrides=[
                "data.train_batch_size=32",
                "critic.ppo_mini_batch_size=x",
                "trainer.n_gpus_per_node=0",
            ]
        )
    assert len(caught.value.problems) == 2


# The lengths


@pytest.mark.parametrize(
    ("positions", "overrides", "lengths"),
    [
        (4096, "", (512, 512)),
        (1024, "", (512, 512)),
        (600, "", (300, 300)),
        (65, "", (32, 33)),
        (600, "data.max_prompt_length=500", (500, 100)),
        (600, "data.max_response_length=500", (100, 500)),
        (4096, "data.max_response_length=4000", (96, 4000)),
        (4096, "data.max_response_length=2000", (512, 2000)),
        (64, "actor_rollout_ref.model.override_config.max_position_embeddings=2048", (512, 512)),
    ],
)
def test_default_lengths_are_at_most_what_the_policy_has_positions_for(
    tmp_path: Path, positions: int, overrides: str, lengths: tuple[int, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    config = load_config(
        overrides=[f"actor_rollout_ref.model.path={tmp_path}", *overrides.split()]
    ).config
    assert (config.data.max_prompt_length, config.data.max_response_length) == lengths
    assert not [
        problem for problem in find_problems(config, build_plan(config)) if "positions" in problem
    ]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"max_position_embeddings": "x", "rope_scaling": "y"}']
)
def test_a_model_that_does_not_say_leaves_the_defaults(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert value("data.max_prompt_length", f"actor_rollout_ref.model.path={tmp_path}") == 512


def test_a_length_that_the_user_sets_too_long_is_still_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    words = [f"actor_rollout_ref.model.path={tmp_path}", "data.max_response_length=64"]
    config = load_config(overrides=words).config
    assert any(
        "has 64 positions" in problem for problem in find_problems(config, build_plan(config))
    )


# The machine


@pytest.mark.parametrize(
    ("gpus", "cores", "device", "slots"),
    [
        (8, 64, "auto", 8),
        (3, 64, "cuda", 3),
        (8, 2, "cpu", 2),
        (0, 1, "auto", 1),
        (0, 6, "auto", 4),
        (0, 64, "cpu", 8),
    ],
)
def test_the_slots_are_the_gpus_or_a_power_of_two_of_cpu_processes(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, device: str, slots: int
) -> None:
    monkeypatch.setattr("rolepool.config.fitting.num_gpus", lambda: gpus)
    monkeypatch.setattr("rolepool.config.fitting.num_cores", lambda: cores)
    assert num_slots(device) == slots
    assert value("trainer.n_gpus_per_node", f"trainer.device={device}") == slots
    assert (
        value("trainer.n_gpus_per_node", "trainer.n_gpus_per_node=null", f"trainer.device={device}")
        == slots
    )
    assert (
        value("trainer.n_gpus_per_node", "trainer.n_gpus_per_node=5", f"trainer.device={device}")
        == 5
    )


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 8), ("", 0), ("-1", 0), ("2,3", 2), ("GPU-1f,GPU-2e,GPU-3d", 3)]
)
def test_gpus_that_are_hidden_do_not_count(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    monkeypatch.setattr("rolepool.config.fitting.gpu_memories", lambda: [2**30] * 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus() == count


def test_config_shows_the_number_and_explains_where_it_comes_from(rolepool: Rolepool) -> None:
    assert type(yaml.safe_load(rolepool("config").out)["trainer"]["n_gpus_per_node"]) is int
    explained = rolepool("config", "trainer.n_gpus_per_node").out
    assert re.match(r"trainer\.n_gpus_per_node = \d+\n", explained)
    assert "null uses all GPUs of this machine" in explained and "default: null" in explained


# Warnings


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        ("algorithm.adv_estimator=grpo", True),
        ("algorithm.adv_estimator=rloo", True),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2", False),
        ("algorithm.adv_estimator=reinforce_plus_plus", False),
        ("algorithm.adv_estimator=gae", False),
    ],
)
def test_an_estimator_that_compares_responses_warns_if_there_is_one(
    overrides: str, warns: bool
) -> None:
    config = load_config(overrides=overrides.split()).config
    warnings = list(find_warnings(config, build_plan(config), on_cpus=False))
    assert len(warnings) == warns
    assert all(
        warning.startswith("actor_rollout_ref.rollout.n=1: algorithm.adv_estimator=")
        for warning in warnings
    )


def test_more_cpu_processes_than_cores_are_a_warning_of_plan(
    rolepool: Rolepool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolepool.placement.checks.num_cores", lambda: 2)
    few, many = (
        rolepool("plan", "trainer.device=cpu", f"trainer.n_gpus_per_node={count}")
        for count in (2, 4)
    )
    assert (few.code, few.err, many.code) == (0, "", 0)
    assert many.err == (
        "warning: trainer.n_gpus_per_node=4: 4 processes share 2 CPU cores and will be slow; use fewer processes\n"
    )


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ("trainer.device=cpu trainer.n_gpus_per_node=2", True),
        ("trainer.device=cpu trainer.n_gpus_per_node=2 trainer.snapshot_freq=-1", False),
        ("trainer.n_gpus_per_node=2", True),
        ("trainer.n_gpus_per_node=8", False),
        ("--inventory 2", False),
    ],
)
def test_plan_says_if_this_machine_has_too_little_shared_memory_for_snapshots(
    words: str, warns: bool, rolepool: Rolepool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolepool.planning.num_gpus", lambda: 2)
    monkeypatch.setattr("rolepool.placement.checks.num_cores", lambda: 2)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3 * 2**30))
    made = rolepool(
        "plan",
        "actor_rollout_ref.model.path=recipes/shapes/qwen2.5-0.5b",
        "--gpu-memory",
        "80",
        *words.split(),
    )
    assert made.code == 0
    warning = (
        "warning: snapshots need 22.1 GiB of /dev/shm, and 3.0 GiB are free; none is taken until there is room, "
        "and if a process dies, training resumes from the last checkpoint\n"
    )
    assert made.err == (warning if warns else "")
