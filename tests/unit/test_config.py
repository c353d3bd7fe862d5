"""The config: what a user may write, what it becomes, and what is said about what cannot be."""

from __future__ import annotations

import pickle
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rolepool.config import Config, LoadedConfig, load_config, show
from rolepool.config.schema import all_keys
from rolepool.config.unknown_keys import unknown_key
from rolepool.errors import ConfigError, RolepoolError

NOT_SAID = object()
"""The document names the key and gives no default."""

OPTIM = {
    "lr": 1e-6,
    "weight_decay": 0.01,
    "betas": NOT_SAID,
    "lr_warmup_steps": -1,
    "lr_warmup_steps_ratio": 0,
    "lr_scheduler_type": "constant",
    "min_lr_ratio": NOT_SAID,
}
FSDP = {"param_offload": False, "optimizer_offload": False, "fsdp_size": -1}

# CONFIG_KEYS.md, row by row.
EXPECTED: dict[str, dict[str, Any]] = {
    "data": {
        "train_files": NOT_SAID,
        "val_files": NOT_SAID,
        "train_batch_size": 1024,
        "gen_batch_size": None,
        "val_batch_size": None,
        "max_prompt_length": 512,
        "max_response_length": 512,
        "truncation": "error",
        "filter_overlong_prompts": False,
        "shuffle": True,
        "seed": None,
        "prompt_key": "prompt",
        "answer_key": None,
        "system_prompt": None,
        "apply_chat_template_kwargs": {},
        "train_max_samples": -1,
        "val_max_samples": -1,
    },
    "actor_rollout_ref.model": {
        "path": NOT_SAID,
        "enable_gradient_checkpointing": True,
        "use_remove_padding": True,
        "trust_remote_code": False,
        "lora_rank": 0,
        "lora_alpha": 16,
        "override_config": NOT_SAID,
        "tokenizer_path": None,
    },
    "actor_rollout_ref.actor": {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": 256,
        "ppo_micro_batch_size_per_gpu": None,
        "use_dynamic_bsz": False,
        "ppo_max_token_len_per_gpu": 16384,
        "ppo_epochs": 1,
        "shuffle": False,
        "clip_ratio": 0.2,
        "clip_ratio_low": NOT_SAID,
        "clip_ratio_high": NOT_SAID,
        "clip_ratio_c": 3.0,
        "policy_loss.loss_mode": "vanilla",
        "policy_loss.clip_cov_ratio": 0.0002,
        "policy_loss.clip_cov_lb": 1.0,
        "policy_loss.clip_cov_ub": 5.0,
        "policy_loss.kl_cov_ratio": 0.0002,
        "policy_loss.ppo_kl_coef": 0.1,
        "loss_scale_factor": None,
        "loss_agg_mode": "token-mean",
        "entropy_coeff": 0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
        "grad_clip": 1.0,
        **{f"optim.{name}": default for name, default in OPTIM.items()},
        **{f"fsdp_config.{name}": default for name, default in FSDP.items()},
    },
    "actor_rollout_ref.ref": {
        "log_prob_micro_batch_size_per_gpu": None,
        "log_prob_use_dynamic_bsz": NOT_SAID,
        "log_prob_max_token_len_per_gpu": NOT_SAID,
        "fsdp_config.param_offload": False,
    },
    "actor_rollout_ref.rollout": {
        "name": "native",
        "fallback": None,
        "engine_kwargs.vllm": {},
        "vllm_python": ".venv-vllm/bin/python",
        "vllm_start_timeout_s": 1800,
        "parity_check": None,
        "parity_limit": None,
        "weights": "auto",
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "do_sample": True,
        "ignore_eos": False,
        "stop_token_ids": [],
        "tensor_model_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "log_prob_micro_batch_size_per_gpu": None,
        "log_prob_use_dynamic_bsz": NOT_SAID,
        "log_prob_max_token_len_per_gpu": NOT_SAID,
        "enforce_eager": False,
        "free_cache_engine": True,
        "calculate_log_probs": False,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "multi_turn.enable": False,
        "multi_turn.max_assistant_turns": None,
        "multi_turn.max_turn_tokens": None,
        "multi_turn.max_user_turns": None,
        "multi_turn.max_tool_response_length": 256,
        "multi_turn.format": "hermes",
        "val_kwargs.n": 1,
        "val_kwargs.temperature": 0,
        "val_kwargs.top_p": 1,
        "val_kwargs.top_k": -1,
        "val_kwargs.do_sample": False,
    },
    "critic": {
        "enable": None,
        "model.path": NOT_SAID,
        "model.enable_gradient_checkpointing": True,
        "model.use_remove_padding": NOT_SAID,
        **{f"optim.{name}": default for name, default in {**OPTIM, "lr": 1e-5}.items()},
        "ppo_mini_batch_size": NOT_SAID,
        "ppo_micro_batch_size_per_gpu": NOT_SAID,
        "forward_micro_batch_size_per_gpu": NOT_SAID,
        "use_dynamic_bsz": NOT_SAID,
        "ppo_max_token_len_per_gpu": 32768,
        "forward_max_token_len_per_gpu": 32768,
        "ppo_epochs": NOT_SAID,
        "shuffle": NOT_SAID,
        "cliprange_value": 0.5,
        "grad_clip": 1.0,
        "loss_agg_mode": NOT_SAID,
        **{f"model.fsdp_config.{name}": default for name, default in FSDP.items()},
    },
    "reward_model": {
        "enable": False,
        "model.path": NOT_SAID,
        "model.input_tokenizer": NOT_SAID,
        "model.trust_remote_code": NOT_SAID,
        "micro_batch_size_per_gpu": NOT_SAID,
        "max_length": NOT_SAID,
        "use_dynamic_bsz": NOT_SAID,
        "forward_max_token_len_per_gpu": 32768,
        "reward_manager": "naive",
        "reward_kwargs.overlong_buffer_cfg.enable": False,
        "reward_kwargs.overlong_buffer_cfg.len": 0,
        "reward_kwargs.overlong_buffer_cfg.penalty_factor": 0,
        "reward_kwargs.overlong_buffer_cfg.log": False,
        "reward_kwargs.max_resp_len": 512,
    },
    "custom_reward_function": {
        "path": None,
        "name": "compute_score",
        "reward_kwargs": {},
        "max_concurrency": None,
        "timeout_s": 60.0,
        "retries": 3,
        "on_error": "abort",
    },
    "reward": {"functions": []},
    "algorithm": {
        "adv_estimator": "gae",
        "gamma": 1,
        "lam": 1,
        "use_kl_in_reward": False,
        "kl_penalty": "kl",
        "kl_ctrl.type": "fixed",
        "kl_ctrl.kl_coef": 0.001,
        "kl_ctrl.horizon": 10000,
        "kl_ctrl.target_kl": 0.1,
        "norm_adv_by_std_in_grpo": True,
        "rollout_correction.preset": None,
        "rollout_correction.rollout_is": None,
        "rollout_correction.rollout_is_threshold": 2.0,
        "rollout_correction.rollout_is_batch_normalize": False,
        "rollout_correction.rollout_rs": None,
        "rollout_correction.rollout_rs_threshold": None,
        "max_staleness": 0,
        "filter_groups.enable": False,
        "filter_groups.metric": None,
        "filter_groups.max_num_gen_batches": 0,
        "rollout_correction.bypass_mode": False,
        "rollout_correction.loss_type": "ppo_clip",
    },
    "trainer": {
        "nnodes": 1,
        "n_gpus_per_node": NOT_SAID,
        "total_epochs": 30,
        "total_training_steps": None,
        "project_name": NOT_SAID,
        "experiment_name": NOT_SAID,
        "logger": ["console"],
        "save_freq": None,
        "test_freq": None,
        "val_before_train": True,
        "val_only": False,
        "critic_warmup": 0,
        "max_bad_steps": 3,
        "snapshot_freq": 1,
        "stall_timeout_s": None,
        "on_stall": "restart",
        "max_restarts": 3,
        "balance_batch": True,
        "resume_mode": "auto",
        "resume_from_path": NOT_SAID,
        "max_actor_ckpt_to_keep": NOT_SAID,
        "max_critic_ckpt_to_keep": NOT_SAID,
        "rollout_data_dir": None,
        "validation_data_dir": None,
        "log_val_generations": 0,
        "default_local_dir": NOT_SAID,
        "device": "auto",
        "seed": NOT_SAID,
        "deterministic": False,
        "compile_cache_dir": "auto",
        "extensions": [],
        "step": None,
    },
    "placement": {
        "strategy": "standard",
        "split.axis": "auto",
        "split.actor_gpus_per_node": NOT_SAID,
        "split.actor_nodes": NOT_SAID,
        "split.share": None,
        "pools": NOT_SAID,
        "roles.actor_rollout": NOT_SAID,
        "roles.actor": NOT_SAID,
        "roles.rollout": NOT_SAID,
        "roles.ref": NOT_SAID,
        "roles.critic": NOT_SAID,
        "roles.reward_model": NOT_SAID,
        "timeout_s": 60,
        "on_node_loss": "wait",
        "mps": False,
        "profile": None,
        "rebalance": False,
        "rebalance_gain": 0.1,
    },
    "environment": {
        "path": None,
        "name": None,
        "timeout_s": 10,
        "memory_gb": 1,
        "num_processes": 4,
    },
    "ray_kwargs": {"ray_init.address": NOT_SAID, "ray_init.num_cpus": None},
}
EXPECTED_KEYS = {
    f"{group}.{name}": default for group, keys in EXPECTED.items() for name, default in keys.items()
}

CHOICES = {
    "reward_model.reward_manager": "naive batch prime dapo",
    "actor_rollout_ref.rollout.name": "native transformers vllm sglang trtllm",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla gspo gpg clip_cov kl_cov geo_mean cispo",
    "actor_rollout_ref.actor.loss_agg_mode": (
        "token-mean token-sum seq-mean-token-sum seq-mean-token-mean seq-mean-token-sum-norm"
    ),
    "actor_rollout_ref.actor.kl_loss_type": "kl+ k1+ abs+ mse+ k2+ low_var_kl+ k3+",
    "algorithm.adv_estimator": (
        "gae grpo grpo_passk grpo_vectorized rloo rloo_vectorized opo gpg remax reinforce_plus_plus"
        " reinforce_plus_plus_baseline"
    ),
    "algorithm.kl_penalty": "kl k1 abs mse k2 low_var_kl k3",
    "algorithm.kl_ctrl.type": "fixed adaptive",
    "trainer.device": "auto cpu cuda",
    "placement.split.axis": "auto gpu node",
}


def load(*overrides: str) -> LoadedConfig:
    return load_config(overrides=overrides)


def value(key: str, *overrides: str) -> object:
    return load(*overrides).value_of(key)


def problems(*overrides: str, files: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    assert all("\n" not in problem for problem in caught.value.problems)
    return list(caught.value.problems)


def only_problem(*overrides: str) -> str:
    (problem,) = problems(*overrides)
    return problem


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


# The schema


def test_every_documented_key_exists_with_its_default() -> None:
    assert EXPECTED_KEYS.keys() <= all_keys().keys()
    said = {key: default for key, default in EXPECTED_KEYS.items() if default is not NOT_SAID}
    defaults = load()
    assert {key: defaults.value_of(key) for key in said} == said


def test_there_is_no_key_beyond_the_documented_ones() -> None:
    assert set(all_keys()) == set(EXPECTED_KEYS)


@pytest.mark.parametrize("key", CHOICES)
def test_every_documented_choice_is_accepted(key: str) -> None:
    strategy = ("placement.strategy=split",) if key.startswith("placement.split") else ()
    for choice in CHOICES[key].split():
        assert value(key, f"{key}={choice}", *strategy) == choice


def test_every_key_says_what_it_means_in_one_sentence_or_more() -> None:
    without = [
        key.path for key in all_keys().values() if not re.fullmatch(r"\(?[A-Z].*\.", key.doc)
    ]
    assert without == []


def test_the_config_page_is_the_generated_one_and_has_a_row_for_every_key(root: Path) -> None:
    generated = runpy.run_path(str(root / "scripts" / "write_config_docs.py"))["markdown"]()
    page = (root / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == generated, "run `python scripts/write_config_docs.py`"
    assert re.findall(r"^\| `([\w.]+)` \|", page, flags=re.MULTILINE) == list(all_keys())


def test_the_config_is_frozen_at_every_depth() -> None:
    config = load().config
    for section, name in (
        (config, "trainer"),
        (config.trainer, "nnodes"),
        (config.actor_rollout_ref.actor.optim, "lr"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 2)


def test_the_whole_config_survives_a_trip_through_yaml(tmp_path: Path) -> None:
    loaded = load(
        "placement.strategy=custom",
        "placement.pools={big: [4,4], small: {per_node: [2], share: 0.5}}",
        "placement.roles.actor_rollout=big",
        "placement.roles.critic=small",
        "trainer.experiment_name=007",
        "critic.optim.lr=3e-7",
        "actor_rollout_ref.model.override_config={rope: {theta: 1e6}, names: [a, null]}",
    )
    file = write(tmp_path, "resolved.yaml", loaded.to_yaml())
    assert load_config([file]).config == loaded.config


def test_the_keys_that_the_user_set_are_known(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "trainer: {nnodes: 1}\nplacement: {pools: {}}")
    loaded = load_config([file], ["data={seed: 3}", "+critic.shuffle=true"])
    assert loaded.set_keys == {"trainer.nnodes", "placement.pools", "data.seed", "critic.shuffle"}


# Overrides in Hydra's spelling


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.nnodes=2", 2),
        ("+trainer.nnodes=2", 2),
        ("++trainer.nnodes=2", 2),
        ("trainer.nnodes= 2 ", 2),
        ("critic.optim.lr=1e-6", 1e-6),
        ("critic.optim.lr=1E-6", 1e-6),
        ("critic.optim.lr=.5", 0.5),
        ("critic.optim.lr=1", 1.0),
        ("critic.shuffle=true", True),
        ("critic.shuffle=False", False),
        ("critic.enable=null", None),
        ("critic.enable=", None),
        ("trainer.logger=[console,wandb]", ["console", "wandb"]),
        ("trainer.logger=['console', \"wandb\"]", ["console", "wandb"]),
        ("trainer.logger=[]", []),
        ("critic.optim.betas=[0.9,0.95]", [0.9, 0.95]),
        ("data.train_files=a.parquet", ["a.parquet"]),
        ("data.train_files=[a.parquet,b.parquet]", ["a.parquet", "b.parquet"]),
        ("data.train_files=[a.parquet,hf:b/c:train]", ["a.parquet", "hf:b/c:train"]),
        ("data.train_files=hf:b/c:train", ["hf:b/c:train"]),
        ("data.train_files=null", []),
        ("actor_rollout_ref.model.override_config={a:1}", {"a": 1}),
        (
            "actor_rollout_ref.model.override_config={a: 1, b: {c: [x]}}",
            {"a": 1, "b": {"c": ["x"]}},
        ),
        (
            "actor_rollout_ref.model.override_config={a:{b:null},c:1e-6}",
            {"a": {"b": None}, "c": 1e-6},
        ),
    ],
)
def test_an_override_is_read_as_hydra_reads_it(override: str, expected: object) -> None:
    assert value(override.split("=")[0].lstrip("+"), override) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("007", "007"),
        ("1e-6", "1e-6"),
        ("true", "true"),
        ("2024-01-01", "2024-01-01"),
        ("a=b", "a=b"),
        ("it's", "it's"),
        ("a: b", "a: b"),
        ("[x", "[x"),
        ("# no comment", "# no comment"),
        ("'a b'", "a b"),
        ('"a: b"', "a: b"),
        ('"null"', "null"),
        ("", ""),
        ("ünï", "ünï"),
    ],
)
def test_a_text_key_takes_a_bare_word_as_written(written: str, expected: str) -> None:
    assert value("trainer.experiment_name", f"trainer.experiment_name={written}") == expected


def test_null_empties_a_text_key_that_may_be_empty() -> None:
    assert (
        value("critic.model.path", "actor_rollout_ref.model.path=a", "critic.model.path=null")
        is None
    )
    assert only_problem("trainer.experiment_name=null") == (
        "trainer.experiment_name=null: must be text; put it in quotes"
    )


def test_a_later_override_wins() -> None:
    assert value("trainer.nnodes", "trainer.nnodes=2", "trainer.nnodes=3") == 3


def test_a_group_may_be_set_with_a_dict() -> None:
    config = load("trainer={nnodes: 2, seed: 7}").config
    assert (config.trainer.nnodes, config.trainer.seed, config.trainer.total_epochs) == (2, 7, 30)


def test_pools_may_be_set_one_by_one_or_together() -> None:
    rest = (
        "placement.strategy=custom",
        "placement.roles.actor_rollout=a",
        "placement.roles.critic=b",
    )
    one_by_one = load(
        "placement.pools.a=[2,0,4]", "placement.pools.b={per_node: [1], share: 0.5}", *rest
    )
    in_parts = load(
        "placement.pools.a=[2,0,4]",
        "placement.pools.b.per_node=[1]",
        "placement.pools.b.share=0.5",
        *rest,
    )
    together = load("placement.pools={a:[2,0,4],b:{per_node:[1],share:0.5}}", *rest)
    one_after_another = load(
        "placement.pools={a: [2,0,4]}", "placement.pools={b: {per_node: [1], share: 0.5}}", *rest
    )
    assert one_by_one.config == in_parts.config == together.config == one_after_another.config
    assert one_by_one.config.placement.pools["a"].per_node == (2, 0, 4)
    assert one_by_one.config.placement.pools["b"].share == 0.5


@pytest.mark.parametrize("written", ["~trainer.nnodes", "~trainer.nnodes=2"])
def test_deleting_a_key_is_refused_with_what_to_write(written: str) -> None:
    assert only_problem(written).endswith(
        ": keys cannot be deleted; do not set trainer.nnodes to use its default"
    )


@pytest.mark.parametrize(
    "written", ["=5", "+=5", "+++trainer.nnodes=1", "trainer..nnodes=1", "1a=2", "a b=1", "nnodes"]
)
def test_what_is_no_override_is_refused_with_an_example(written: str) -> None:
    assert (
        only_problem(written)
        == f"{written}: not an override; write key=value, such as trainer.nnodes=2"
    )


@pytest.mark.parametrize(
    "written",
    [
        "trainer.nnodes=[1",
        "trainer.nnodes={a",
        "trainer.nnodes=" + "[" * 3000,
        "trainer.nnodes=" + "[" * 500 + "]" * 500,
        "trainer.nnodes=0x" + "F" * 5000,
        "trainer.nnodes=" + "9" * 5000,
        "trainer.nnodes=!!python/object:os.system {}",
        "trainer.nnodes='a",
        "trainer.nnodes=&a [*a]",
        "actor_rollout_ref.model.override_config={a: !!binary /w==}",
        "actor_rollout_ref.model.override_config={a: !!set {x}}",
        "trainer.experiment_name=\udcff",
    ],
    ids=lambda written: written[:40].encode("ascii", "backslashreplace").decode(),
)
def test_what_is_no_yaml_is_refused_in_one_short_line(written: str) -> None:
    problem = only_problem(written)
    assert "not valid YAML" in problem
    assert len(problem) < 300
    problem.encode()


def test_a_value_left_open_is_not_taken_for_the_default(tmp_path: Path) -> None:
    expected = "trainer.nnodes=???: has no value yet; set one, or remove the key to use its default"
    assert only_problem("trainer.nnodes=???") == expected
    assert problems(files=(write(tmp_path, "a.yaml", "trainer:\n  nnodes: ???"),)) == [expected]


# References


def test_a_reference_stands_for_the_other_keys_value() -> None:
    assert value("data.seed", "data.seed=${trainer.seed}", "trainer.seed=9") == 9
    assert value(
        "trainer.project_name",
        "trainer.project_name=x_${trainer.experiment_name}_${data.seed}",
        "data.seed=1",
    ) == ("x_default_1")
    assert value(
        "trainer.logger",
        "trainer.project_name=wandb",
        "trainer.logger=[console,'${trainer.project_name}']",
    ) == [
        "console",
        "wandb",
    ]


def test_a_reference_may_go_over_another_reference(tmp_path: Path) -> None:
    file = write(
        tmp_path, "a.yaml", "data: {seed: '${critic.ppo_epochs}'}\ntrainer: {seed: '${data.seed}'}"
    )
    assert load_config([file], ["critic.ppo_epochs=5"]).config.trainer.seed == 5


def test_a_default_follows_its_key_until_it_is_set() -> None:
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=64"
    assert value("critic.ppo_mini_batch_size", mini) == 64
    assert value("critic.ppo_mini_batch_size", mini, "critic.ppo_mini_batch_size=32") == 32
    assert value("critic.model.path", "actor_rollout_ref.model.path=some/model") == "some/model"
    assert (
        value("actor_rollout_ref.actor.clip_ratio_high", "actor_rollout_ref.actor.clip_ratio=0.3")
        == 0.3
    )
    assert value("trainer.default_local_dir", "trainer.experiment_name=007") == "runs/007"


@pytest.mark.parametrize(
    "written",
    [
        "trainer.seed=${nope.x}",
        "trainer.seed=${trainer.seed}",
        "data.train_files=${data}",
        "trainer.seed=${oc.env:NO_SUCH}",
    ],
)
def test_a_reference_to_nothing_or_to_itself_is_refused(written: str) -> None:
    assert only_problem(written).startswith(f"{written}: the reference cannot be resolved (")


def test_two_keys_that_refer_to_each_other_are_both_reported() -> None:
    found = problems("trainer.seed=${data.seed}", "data.seed=${trainer.seed}")
    assert [problem.split("=")[0] for problem in found] == ["trainer.seed", "data.seed"]


def test_a_reference_to_a_value_of_another_type_is_a_wrong_type() -> None:
    assert (
        only_problem("trainer.seed=${trainer.device}")
        == "trainer.seed=auto: must be an integer, at least 0"
    )


@pytest.mark.parametrize(
    "written", ["trainer.seed=${", "trainer.experiment_name=${", "trainer.experiment_name=a${b"]
)
def test_a_reference_left_open_is_one_problem(written: str) -> None:
    assert only_problem(written).startswith(f"{written}: ")


# Files


def test_files_are_merged_from_left_to_right_and_overrides_come_last(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", "trainer: {nnodes: 2, seed: 1, n_gpus_per_node: 4}")
    two = write(tmp_path, "two.yaml", "trainer:\n  seed: 2\n  n_gpus_per_node: 2\n")
    trainer = load_config([one, two], ["trainer.n_gpus_per_node=1"]).config.trainer
    assert (trainer.nnodes, trainer.seed, trainer.n_gpus_per_node) == (2, 2, 1)


def test_pools_of_several_files_come_together(tmp_path: Path) -> None:
    one = write(
        tmp_path,
        "one.yaml",
        "placement: {strategy: custom, pools: {a: [2]}, roles: {actor_rollout: a}}",
    )
    two = write(tmp_path, "two.yaml", "placement: {pools: {b: [1]}, roles: {critic: b}}")
    three = write(tmp_path, "three.yaml", "placement: {pools: {b: {per_node: [3]}}}")
    pools = load_config([one, two, three]).config.placement.pools
    assert {name: pool.per_node for name, pool in pools.items()} == {"a": (2,), "b": (3,)}


def test_lists_are_replaced_and_not_joined(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", "trainer: {logger: [console, wandb]}")
    assert load_config([one], ["trainer.logger=[tensorboard]"]).config.trainer.logger == (
        "tensorboard",
    )


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_config([write(tmp_path, "empty.yaml", "# nothing\n")]).config == load().config


def test_a_number_in_scientific_notation_is_a_number_in_files_too(tmp_path: Path) -> None:
    assert (
        load_config(
            [write(tmp_path, "a.yaml", "critic: {optim: {lr: 1e-6}}")]
        ).config.critic.optim.lr
        == 1e-6
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b\n", "must contain keys and values, not a list"),
        ("a: [1\n", "line 2, column 1: not valid YAML (did not find expected ',' or ']'); fix it"),
        (
            "a: 1\n a: 2\n",
            "line 2, column 3: not valid YAML (mapping values are not allowed in this context); fix it",
        ),
        (
            "trainer:\n  seed: 1\n  seed: 2\n",
            "line 3, column 3: not valid YAML (found duplicate key seed); fix it",
        ),
        ("x: !!binary /w==", "bytes"),
    ],
)
def test_a_file_that_holds_no_keys_is_one_problem_with_its_name(
    tmp_path: Path, text: str, expected: str
) -> None:
    file = write(tmp_path, "bad.yaml", text)
    (problem,) = problems(files=(file,))
    assert re.match(re.escape(f"config file {show(file)}") + "(: |, line)", problem)
    assert expected in problem


def test_a_file_that_is_not_text_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00\x01a: 1")
    assert len(problems(files=(str(tmp_path / "bad.yaml"),))) == 1


@pytest.mark.parametrize("file", ["nowhere.yaml", "recipes", "x" * 300, "a\0b"])
def test_a_missing_file_is_one_problem(file: str) -> None:
    (problem,) = problems(files=(file,))
    assert problem.startswith("config file ")


def test_keys_of_a_file_are_checked_as_overrides_are(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "a.yaml",
        "trainer: {nodes: 2, nnodes: two}\ndata: null\ncritic: {strategy: other}\n1: 2\n",
    )
    assert problems(files=(file,)) == [
        "trainer.nodes=2: unknown key; did you mean trainer.nnodes?",
        "data=null: is a section; set one of its keys, such as data.train_files, data.val_files",
        "1=2: unknown key; `rolepool config` lists all keys",
        "critic.strategy=other: not supported: only FSDP2 is supported",
        "trainer.nnodes=two: must be an integer, at least 1, at most 65536",
    ]


# Wrong keys


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainer.nnode", "trainer.nnodes"),
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
        ("nnodes", "trainer.nnodes"),
        ("rollout.temperature", "actor_rollout_ref.rollout.temperature"),
        (
            "actor_rollout_ref.actor.ppo_mini_batchsize",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
        ),
        ("actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio"),
        ("actor_rollout_ref.rollout.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_coef"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("placement.split.share_", "placement.split.share"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(written: str, meant: str) -> None:
    assert only_problem(f"{written}=1") == f"{written}=1: unknown key; did you mean {meant}?"


@pytest.mark.parametrize("key", list(all_keys()))
def test_a_slip_in_any_key_is_answered_with_that_key(key: str) -> None:
    middle = len(key) - 3
    assert unknown_key(key[:middle] + key[middle + 1 :]) == f"unknown key; did you mean {key}?"


def test_a_key_like_no_other_is_sent_to_the_list() -> None:
    assert only_problem("zzz.qqq=1") == "zzz.qqq=1: unknown key; `rolepool config` lists all keys"


def test_a_group_is_not_a_key() -> None:
    assert only_problem("trainer=5") == (
        "trainer=5: is a section; set one of its keys, such as trainer.nnodes, trainer.n_gpus_per_node"
    )


# Wrong values


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("trainer.nnodes=two", "must be an integer, at least 1, at most 65536"),
        ("trainer.nnodes=1.5", "must be an integer, at least 1, at most 65536"),
        ("trainer.nnodes=1.0", "must be an integer, at least 1, at most 65536"),
        ("trainer.nnodes=true", "must be an integer, at least 1, at most 65536"),
        ("trainer.nnodes=null", "must be an integer, at least 1, at most 65536"),
        ("trainer.nnodes=[1]", "must be an integer, at least 1, at most 65536"),
        ("trainer.total_training_steps=x", "must be an integer, at least 1 or null"),
        ("critic.optim.lr=fast", "must be a number, at least 0"),
        ("critic.optim.lr=true", "must be a number, at least 0"),
        ("critic.shuffle=1", "must be true or false"),
        ("critic.shuffle=maybe", "must be true or false"),
        ("trainer.logger=5", "must be a list, each one of console, verl, tensorboard, wandb, mlflow, file"),
        ("placement.pools=5", "must be a mapping, such as {name: value}"),
        ("placement.pools=[2]", "must be a mapping, such as {name: value}"),
        ("trainer.logger={a:1}", "must be a list, each one of console, verl, tensorboard, wandb, mlflow, file"),
        ("data.seed={a:1}", "must be an integer, at least 0 or null"),
        ("trainer.nnodes=0", "must be an integer, at least 1, at most 65536"),
        ("trainer.nnodes=-1", "must be an integer, at least 1, at most 65536"),
        ("trainer.nnodes=65537", "must be less than or equal to 65536"),
        ("trainer.n_gpus_per_node=1025", "must be less than or equal to 1024"),
        ("data.seed=-1", "must be an integer, at least 0 or null"),
        ("data.train_batch_size=2147483648", "must be less than or equal to 2147483647"),
        ("trainer.save_freq=-2", "must be an integer, at least -1 or null"),
        ("trainer.save_freq=-2", "must be an integer, at least -1 or null"),
        ("actor_rollout_ref.rollout.top_p=0", "must be a number, greater than 0, at most 1"),
        ("actor_rollout_ref.rollout.top_p=1.01", "must be less than or equal to 1"),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "must be a number, greater than 1"),
        ("algorithm.gamma=-0.1", "must be a number, at least 0, at most 1"),
        ("placement.split.share=0.6", "must be less than or equal to 0.5"),
        ("trainer.device=tpu", "must be one of auto, cpu, cuda"),
        ("actor_rollout_ref.actor.strategy=megatron", "must be one of fsdp2"),
        ("data.truncation=5", "must be one of error, left, right, middle"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_answered_with_key_value_and_what_is_allowed(
    override: str, allowed: str
) -> None:
    assert only_problem(override) == f"{override}: {allowed}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "trainer.logger=[console,files]",
            "trainer.logger.1=files: must be 'console', 'verl', 'tensorboard', 'wandb', 'mlflow' or 'file'",
        ),
        ("critic.optim.betas=[0.9,1]", "critic.optim.betas.1=1: must be less than 1"),
        (
            "critic.optim.betas=[0.9]",
            "critic.optim.betas.1: Field required; see `rolepool config critic.optim.betas`",
        ),
        ("placement.pools.a=[]", "placement.pools.a.per_node=[]: must hold at least one process"),
        (
            "placement.pools.a=[0,0]",
            "placement.pools.a.per_node=[0,0]: must hold at least one process",
        ),
        (
            "placement.pools.a=[-1]",
            "placement.pools.a.per_node.0=-1: must be greater than or equal to 0",
        ),
        (
            "placement.pools.a=2",
            "placement.pools.a=2: must be a list such as [2,2], or {per_node: [2,2], share: 0.5}",
        ),
        ("placement.pools.a={share: 0.5}", "placement.pools.a.per_node: Field required"),
        (
            "placement.pools.a={per_node: [1], gpus: 2}",
            "placement.pools.a.gpus=2: Extra inputs are not permitted",
        ),
        (
            "placement.pools.a={per_node: [1], share: 0}",
            "placement.pools.a.share=0: must be greater than 0",
        ),
        ("placement.pools={'a b': [1]}", "placement.pools.a b=a b: String should match pattern"),
        (
            "placement.pools={1: [1]}",
            "placement.pools.1=1: must be a valid string; put it in quotes",
        ),
    ],
)
def test_a_wrong_value_inside_a_list_or_a_pool_is_named_by_its_place(
    override: str, expected: str
) -> None:
    assert only_problem(override, "placement.strategy=custom").startswith(expected)


@pytest.mark.parametrize("written", [".inf", "-.inf", ".nan", "1e400"])
def test_a_number_must_be_finite(written: str) -> None:
    assert only_problem(f"algorithm.gamma={written}").endswith(": must be a finite number")


def test_a_long_value_is_shown_shortened() -> None:
    problem = only_problem("trainer.nnodes=" + "x" * 1000)
    assert problem == f"trainer.nnodes={'x' * 77}...: must be an integer, at least 1, at most 65536"


def test_a_value_with_line_breaks_is_shown_on_one_line() -> None:
    assert (
        only_problem("trainer.device=a\nb") == "trainer.device=a b: must be one of auto, cpu, cuda"
    )


def test_a_wrong_value_that_others_follow_is_reported_once() -> None:
    assert only_problem("actor_rollout_ref.actor.ppo_mini_batch_size=0") == (
        "actor_rollout_ref.actor.ppo_mini_batch_size=0: must be an integer, at least 1"
    )


# Contradictions

OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("critic.enable=false", "critic.enable=false: algorithm.adv_estimator=gae needs a critic"),
        ("reward_model.enable=true", "reward_model.model.path=null: reward_model.enable=true needs a model"),
        ("reward_model.reward_manager=mine",
         "reward_model.reward_manager=mine: must be naive, batch, prime or dapo; to score in another way, write"),
        (f"{OVERLONG}.enable=true {OVERLONG}.len=9",
         f"{OVERLONG}.enable=true: the penalty is for rules and functions with the manager dapo"),
        (f"{OVERLONG}.enable=true reward_model.reward_manager=dapo",
         f"{OVERLONG}.len=0: must be from 1 to reward_kwargs.max_resp_len=512"),
        ("custom_reward_function.reward_kwargs={a:1}", "custom_reward_function.reward_kwargs: they are only used with"),
        ("actor_rollout_ref.rollout.temperature=0", "do_sample=false and do not set the temperature"),
        ("actor_rollout_ref.rollout.temperature=0 actor_rollout_ref.rollout.do_sample=false", "must be greater than 0"),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=true", "val_kwargs.temperature=0: must be greater than 0"),
        ("data.train_batch_size=1000 actor_rollout_ref.actor.ppo_mini_batch_size=256 critic.ppo_mini_batch_size=100",
         "actor_rollout_ref.actor.ppo_mini_batch_size=256: must divide data.train_batch_size=1000; use 250"),
        ("critic.ppo_mini_batch_size=300",
         "critic.ppo_mini_batch_size=300: must divide data.train_batch_size=1024; use 256"),
        ("actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000",
         "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000: one sequence may have 1024 tokens"),
        ("trainer.deterministic=true actor_rollout_ref.rollout.name=vllm",
         "trainer.deterministic=true: the engine vllm generates in a process of its own"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path=null: trainer.resume_mode=resume_path; set"),
        ("placement.split.axis=node", "placement.split.axis=node: is for placement.strategy=split"),
        ("placement.strategy=custom placement.split.share=0.5",
         "placement.split.share=0.5: is for placement.strategy=split"),
        ("placement.pools.a=[2]", "placement.pools.a: is for placement.strategy=custom"),
        ("placement.strategy=split placement.roles.critic=a",
         "placement.roles.critic: is for placement.strategy=custom"),
        ("placement.strategy=split placement.split.axis=node placement.split.actor_gpus_per_node=2",
         "placement.split.axis=node: contradicts placement.split.actor_gpus_per_node=2"),
        ("placement.strategy=split placement.split.axis=gpu placement.split.actor_nodes=2",
         "placement.split.axis=gpu: contradicts placement.split.actor_nodes=2"),
        ("placement.strategy=split placement.split.share=0.5 placement.split.actor_nodes=2",
         "placement.split.actor_nodes=2: contradicts placement.split.share=0.5"),
        ("placement.strategy=split placement.split.actor_nodes=1 placement.split.actor_gpus_per_node=1",
         "placement.split.actor_gpus_per_node=1: contradicts placement.split.actor_nodes=1"),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_refused(overrides: str, expected: str) -> None:
    assert expected in only_problem(*overrides.split())


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm.adv_estimator=grpo critic.enable=false",
        "algorithm.adv_estimator=grpo critic.ppo_mini_batch_size=300",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0 actor_rollout_ref.rollout.do_sample=false",
        "critic.ppo_max_token_len_per_gpu=10",
        "trainer.test_freq=5 data.val_files=a.parquet",
        "placement.strategy=split placement.split.axis=gpu placement.split.actor_gpus_per_node=2",
        "placement.strategy=split placement.split.share=0.5",
    ],
)
def test_values_that_only_look_contradictory_are_accepted(overrides: str) -> None:
    assert isinstance(load(*overrides.split()).config, Config)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "trainer: {nnodes: zero}\ncritic: {strategy: megatron}")
    found = problems(
        "trainer.nodes=2",
        "data.train_batch_size=0",
        "data.shuffle=[1",
        "nonsense",
        "trainer.seed=${nope}",
        "critic.enable=false",
        files=(file, "missing.yaml"),
    )
    beginnings = [
        "config file missing.yaml: cannot be read",
        "trainer.nodes=2: unknown key",
        "data.shuffle=[1: not valid YAML",
        "nonsense: not an override",
        "trainer.seed=${nope}: the reference",
        "critic.strategy=megatron: not supported",
        "data.train_batch_size=0: must be an integer, at least 1",
        "trainer.nnodes=zero: must be an integer",
        "critic.enable=false: algorithm.adv_estimator=gae",
    ]
    assert len(found) == len(beginnings)
    assert all(
        problem.startswith(beginning) for problem, beginning in zip(found, beginnings, strict=True)
    ), found


def test_a_rule_about_a_wrong_value_is_not_reported_on_top() -> None:
    assert only_problem(
        "data.train_batch_size=x", "actor_rollout_ref.actor.ppo_mini_batch_size=100"
    ) == ("data.train_batch_size=x: must be an integer, at least 1")


def test_the_same_problem_twice_is_said_once() -> None:
    assert only_problem("trainer.nodes=2", "trainer.nodes=2").startswith(
        "trainer.nodes=2: unknown key"
    )


def test_an_error_survives_the_trip_between_processes() -> None:
    error = ConfigError(["one", "two"])
    arrived = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert isinstance(arrived, RolepoolError)
    assert (type(arrived), arrived.problems, str(arrived)) == (
        ConfigError,
        ("one", "two"),
        "one\ntwo",
    )


def test_a_single_item_of_a_list_needs_no_brackets():
    assert load_config([], ["trainer.logger=tensorboard"]).config.trainer.logger == ("tensorboard",)


def test_a_pool_written_as_a_list_takes_a_share_and_null_removes_a_pool():
    pools = load_config(
        [],
        [
            "placement.strategy=custom",
            "placement.pools.a=[2]",
            "placement.pools.a.share=0.5",
            "placement.pools.b=[1]",
            "placement.pools.b=null",
        ],
    ).config.placement.pools
    assert {name: (pool.per_node, pool.share) for name, pool in pools.items()} == {"a": ((2,), 0.5)}


# Functions by name


@pytest.mark.parametrize(
    "key", ["algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"]
)
def test_a_function_of_the_user_is_checked_for_its_form_and_not_imported(key: str) -> None:
    assert value(key, f"{key}=no_such_package.module:function") == "no_such_package.module:function"
    for wrong in ("nope", "module:", ":function", "a.b:c.d", "my file.py:f"):
        problem = only_problem(f"{key}={wrong}")
        assert problem.startswith(
            f"{key}={wrong}: must be one of {'gae, grpo' if 'adv' in key else 'vanilla'}"
        )
        assert problem.endswith("or a function of your own as module:function")


def test_an_estimator_of_the_user_has_a_critic_only_if_it_is_enabled() -> None:
    own = "algorithm.adv_estimator=my_module:my_estimator"
    assert not load(own).config.uses_critic
    assert load(own, "critic.enable=true").config.uses_critic
