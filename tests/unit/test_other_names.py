"""Names of other trainers, as keys and as options, are answered with the keys of rolepool."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import rolepool as rp
from rolepool.config.other_names import TABLE, hint_for_key, hint_for_option
from rolepool.config.schema import all_keys
from rolepool.config.unknown_keys import keys_meant_by, unknown_key
from rolepool.errors import ConfigError

Rolepool = Callable[..., Any]
TABLES = {"first_tries": TABLE.first_tries, "trl": TABLE.trl, "openrlhf": TABLE.openrlhf}


@pytest.mark.parametrize("names", TABLES.values(), ids=TABLES)
def test_every_key_that_is_offered_exists_and_no_name_is_one(names: dict[str, str]) -> None:
    for name, meaning in names.items():
        key, _, remark = meaning.partition(" ")
        assert key in all_keys(), name
        assert re.fullmatch(r"(\(.+\))?", remark), name
        in_remark = re.findall(
            r"(?<![\w/])(?:actor_rollout_ref|algorithm|placement|trainer)\.[\w.]+", remark
        )
        assert set(in_remark) <= all_keys().keys(), name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name) and name not in all_keys()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("max_steps", "trainer.total_training_steps"),
        ("trainer.max_steps", "trainer.total_training_steps"),
        ("batch_size", "data.train_batch_size"),
        ("data.batch_size", "data.train_batch_size"),
        ("lr", "actor_rollout_ref.actor.optim.lr"),
        ("learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("critic.learning_rate", "critic.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("reward.path", "custom_reward_function.path"),
        ("reward_model.model_name", "reward_model.model.path"),
        ("epochs", "trainer.total_epochs"),
        ("max_epochs", "trainer.total_epochs"),
        ("per_device_train_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("num_generations", "actor_rollout_ref.rollout.n"),
        ("max_completion_length", "data.max_response_length"),
        ("beta", "actor_rollout_ref.actor.kl_loss_coef"),
        ("Num-Train-Epochs", "trainer.total_epochs"),
        ("train_batch_size", "data.train_batch_size"),
        ("rollout_batch_size", "data.train_batch_size"),
        ("trainer.nodes", "trainer.nnodes"),  # similar names still win over the table
        ("rollout.temperature", "actor_rollout_ref.rollout.temperature"),
    ],
)
def test_a_name_that_people_try_is_answered_with_the_key(written: str, meant: str) -> None:
    assert keys_meant_by(written)[0] == meant
    assert unknown_key(written).startswith(f"unknown key; did you mean {meant}")


def test_a_name_with_another_meaning_says_so() -> None:
    meant = "did you mean actor_rollout_ref.actor.kl_loss_coef (used with actor_rollout_ref.actor.use_kl_loss=true)?"
    assert unknown_key("beta") == f"unknown key; {meant}"
    key, option = hint_for_key("train_batch_size"), hint_for_option("train_batch_size")
    assert key is not None and option is not None
    assert (key.key, key.remark) == ("data.train_batch_size", "")
    assert option.key == "actor_rollout_ref.actor.ppo_mini_batch_size", (
        "OpenRLHF's counts responses of an update"
    )


def test_options_of_openrlhf_are_answered_with_the_overrides_to_write(rolepool: Rolepool) -> None:
    options = "--pretrain Qwen/Qwen3-0.6B --train_batch_size 128 --rollout_batch_size=1024 --n_samples_per_prompt 8"
    options += " --init_kl_coef 0.01 --actor_num_gpus_per_node 8 --gradient_checkpointing --use_wandb my-secret"
    options += " --trainer.nnodes 2 --fly"
    for command in ("train", "plan"):
        ended = rolepool(command, *options.split())
        assert (ended.code, ended.out) == (2, "")
        begin = f"error: rolepool {command}: "
        assert [line.removeprefix(begin) for line in ended.err.splitlines()] == [
            "--pretrain: is not an option; write actor_rollout_ref.model.path=Qwen/Qwen3-0.6B",
            "--train_batch_size: is not an option; write actor_rollout_ref.actor.ppo_mini_batch_size=... "
            "(it counts prompts, not responses)",
            "--rollout_batch_size: is not an option; write data.train_batch_size=1024",
            "--n_samples_per_prompt: is not an option; write actor_rollout_ref.rollout.n=8",
            "--init_kl_coef: is not an option; write algorithm.kl_ctrl.kl_coef=... "
            "(used with algorithm.use_kl_in_reward=true)",
            "--actor_num_gpus_per_node: is not an option; write placement.split.actor_gpus_per_node=... "
            "(used with placement.strategy=split)",
            "--gradient_checkpointing: is not an option; "
            "write actor_rollout_ref.model.enable_gradient_checkpointing=true",
            "--use_wandb: is not an option; write trainer.logger=... (trainer.logger=[console,wandb])",
            "--trainer.nnodes: is not an option; write trainer.nnodes=2",
            f"unrecognized arguments: --fly; see `rolepool {command} --help`",
        ]


def test_only_programs_that_take_overrides_suggest_them_and_another_setting_is_no_value(
    rolepool: Rolepool,
) -> None:
    assert rolepool("report", "runs/a", "--model", "b").err == (
        "error: rolepool report: unrecognized arguments: --model; see `rolepool report --help`\n"
    )
    assert rolepool("plan", "--pretrain", "trainer.nnodes=2").err == (
        "error: rolepool plan: --pretrain: is not an option; write actor_rollout_ref.model.path=...\n"
    )
    assert len(rolepool("plan", "--a\nb").err.splitlines()) == 1


def test_names_of_trl_are_answered_in_python_too() -> None:
    with pytest.raises(ConfigError) as raised:
        rp.train(
            num_generations=8,
            max_completion_length=64,
            data={"train_batch_size": 4, "dataset_name": "a/b"},
        )
    lines = [problem for problem in raised.value.problems if "unknown key" in problem]
    assert lines == [
        "num_generations=8: unknown key; did you mean actor_rollout_ref.rollout.n?",
        "max_completion_length=64: unknown key; did you mean data.max_response_length?",
        "data.dataset_name=a/b: unknown key; did you mean data.train_files (hf:NAME:SPLIT is a dataset of the hub)?",
    ]
