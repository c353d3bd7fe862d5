"""Launch scripts of verl: 26 public ones with all their keys, other names of keys, keys without
effect, YAML files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rolepool.command_line import Parser, load_words
from rolepool.config import LoadedConfig, load_config
from rolepool.config.other_keys import VERL_KEYS, renamed
from rolepool.config.schema import all_keys, all_sections
from rolepool.config.unknown_keys import unknown_key
from rolepool.errors import ConfigError
from rolepool.planning import Hardware, summarise

ROOT = Path(__file__).parents[1]
SCRIPTS: dict[str, list[str]] = json.loads((ROOT / "verl_scripts.json").read_text())

# For each script: how many of its keys rolepool has, how many have no effect, and the keys that are
# refused.
TABLE: dict[str, tuple[int, int, list[str]]] = {
    "grpo_trainer__run_deepseek7b_llm_math": (37, 0, []),
    "grpo_trainer__run_deepseek7b_llm_seq_balance": (36, 0, []),
    "grpo_trainer__run_gptoss_20b": (38, 3, ["actor_rollout_ref.actor.fsdp_config.model_dtype"]),
    "grpo_trainer__run_qwen2-7b_math_trtllm": (42, 6, []),
    "grpo_trainer__run_qwen2_5-3b_gsm8k_grpo_lora": (41, 2, []),
    "grpo_trainer__run_qwen2_5-3b_gsm8k_grpo_lora_from_adapter": (
        38,
        3,
        ["actor_rollout_ref.model.lora_adapter_path"],
    ),
    "grpo_trainer__run_qwen3-8b": (37, 0, []),
    "grpo_trainer__run_seed_oss_36b": (42, 5, []),
    "ppo_trainer__run_deepseek7b_llm_modelscope": (38, 0, []),
    "ppo_trainer__run_deepseek7b_llm_sp2": (38, 2, []),
    "ppo_trainer__run_gemma": (37, 0, []),
    "ppo_trainer__run_qwen2-7b_rm": (43, 8, []),
    "ppo_trainer__run_qwen2-7b_rm_legacy": (44, 4, []),
    "ppo_trainer__run_qwen2-7b_rm_reward_loop_colocate": (44, 10, []),
    "ppo_trainer__run_qwen2-7b_rm_seq_balance": (43, 8, []),
    "ppo_trainer__run_qwen2-7b_rm_seq_balance_fused_kernels": (43, 10, []),
    "ppo_trainer__run_qwen2-7b_rm_seq_balance_nsys": (46, 20, []),
    "ppo_trainer__run_qwen2.5-32b": (38, 0, []),
    "ppo_trainer__run_qwen2.5-3b_rm_legacy": (44, 4, []),
    "ppo_trainer__run_qwen2.5-3b_rm_reward_loop_colocate": (43, 8, []),
    "reinforce_plus_plus_trainer__run_qwen2-7b_math_rf": (37, 0, []),
    "remax_trainer__run_qwen2.5-3b_seq_balance": (36, 0, []),
    "remax_trainer__run_qwen2.5-7b_seq_balance": (36, 0, []),
    "rollout_correction__run_qwen2_5_7b_fsdp": (27, 0, []),
    "rollout_correction__run_qwen2_5_7b_fsdp_multi_rs": (27, 1, []),
    "split_placement__run_deepseek7b_llm": (34, 0, []),
}


def load(*overrides: str, files: tuple[str, ...] = ()) -> LoadedConfig:
    return load_config(files, overrides)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config((), overrides)
    return list(caught.value.problems)


def key_of(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


NO_VLLM = "actor_rollout_ref.rollout.vllm_python=/nowhere/python"
"""Whether this machine has an environment with vLLM does not matter."""


# The scripts


def test_the_table_has_all_scripts() -> None:
    assert list(TABLE) == list(SCRIPTS)
    assert max(len(refused) for _, _, refused in TABLE.values()) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_planned_after_replacing_the_launcher(name: str) -> None:
    words, (num_set, num_without_effect, refused) = SCRIPTS[name], TABLE[name]
    if refused:
        assert [problem.partition("=")[0] for problem in problems(*words)] == refused
    loaded = load(*(word for word in words if key_of(word) not in refused), NO_VLLM)
    assert (len(loaded.set_keys), len(loaded.without_effect)) == (num_set + 1, num_without_effect)
    # Each key is one that rolepool has, or one without effect.
    said = {setting.partition("=")[0] for setting in loaded.without_effect} | set(refused)
    assert {renamed(key_of(word)) for word in words} <= loaded.set_keys | said | {
        "data.apply_chat_template_kwargs.reasoning_effort"
    }
    made = summarise(loaded, Hardware(None, 80 * 2**30))
    assert made.problems == []
    engine = loaded.config.actor_rollout_ref.rollout.name
    assert engine in ("vllm", "sglang", "trtllm")
    why = f"there is no {NO_VLLM}" if engine == "vllm" else "not implemented yet"
    assert any(f"actor_rollout_ref.rollout.name={engine}: {why}" in line for line in made.warnings)


# Keys


def test_no_key_of_rolepool_is_renamed() -> None:
    assert [key for key in all_keys() if renamed(key) != key] == []


def test_other_names_stand_for_keys_that_exist() -> None:
    for setting, key in {
        "reward.custom_reward_function.path=f.py": "custom_reward_function.path",
        "reward.reward_model.enable=false": "reward_model.enable",
        "reward.reward_model.model_path=m": "reward_model.model.path",
        "reward_model.model_path=m": "reward_model.model.path",
        "critic.fsdp.param_offload=true": "critic.model.fsdp_config.param_offload",
        "critic.kl_ctrl.kl_coef=0.1": "algorithm.kl_ctrl.kl_coef",
        "actor_rollout_ref.actor.optim.warmup_style=cosine": "actor_rollout_ref.actor.optim.lr_scheduler_type",
        "critic.optim.clip_grad=2.0": "critic.grad_clip",
        "ray_init.num_cpus=4": "ray_kwargs.ray_init.num_cpus",
    }.items():
        assert load(setting).set_keys == {key}
        assert load_config([{key_of(setting): None}]).set_keys == set(), (
            "null in a file does not replace the key"
        )


def test_every_other_name_of_a_value_is_accepted() -> None:
    for key, values in VERL_KEYS.same_values.items():
        for written, meant in values.items():
            assert load_config([{key: written}]).value_of(key) == meant
    assert load("trainer.test_freq=False").config.trainer.test_freq == -1


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("data.return_raw_chat=True", "rewards get the prompt"),
        ("actor_rollout_ref.actor.use_torch_compile=False", "rolepool decides this itself"),
        ("actor_rollout_ref.model.use_fused_kernels=True", "rolepool decides this itself"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=1", "whole sequences"),
        ("actor_rollout_ref.rollout.enable_chunked_prefill=False", "another engine"),
        ("actor_rollout_ref.rollout.mode=async", "another engine"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.chunked_prefill_size=32",
            "another engine",
        ),
        ("actor_rollout_ref.actor.profiler.ranks=[0,4]", "rolepool report"),
        ("global_profiler.global_tool_config.nsys.discrete=True", "rolepool report"),
        (
            "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template=true",
            "environment.name names the class",
        ),
        (
            "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
            "environment.name names the class",
        ),
        ("actor_rollout_ref.rollout.response_length=512", "set data.max_response_length"),
        ("data.image_key=images", "only texts are read"),
        ("reward_model.reward_loop_source=register", "custom_reward_function.path"),
        ("ray_kwargs.ray_init.runtime_env.py_executable='uv run'", "workers use the Python"),
        ("critic.strategy=fsdp", "FSDP2"),
        ("actor_rollout_ref.hybrid_engine=True", "placement.roles"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=null", "over all ranks"),
    ],
)
def test_a_key_without_effect_is_accepted_and_explained(setting: str, reason: str) -> None:
    loaded = load(setting)
    ((said, why),) = loaded.without_effect.items()
    assert said.partition("=")[0] == key_of(setting)
    assert reason in why
    assert loaded.set_keys == set()
    assert loaded.warnings == []


def test_a_key_that_repeats_the_value_of_another_is_accepted() -> None:
    words = ["actor_rollout_ref.model.path=a/model", "data.max_response_length=77"]
    words += ["actor_rollout_ref.ref.model.path=${actor_rollout_ref.model.path}"]
    loaded = load(*words, "actor_rollout_ref.rollout.response_length=77")
    assert [one.partition("=")[0] for one in loaded.without_effect] == [
        "actor_rollout_ref.ref.model.path",
        "actor_rollout_ref.rollout.response_length",
    ]
    refused = problems(*words, "actor_rollout_ref.rollout.response_length=78")
    assert refused == [
        "actor_rollout_ref.rollout.response_length=78: not supported: set data.max_response_length"
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["critic.ppo_max_token_len_per_gpu=8", "algorithm.adv_estimator=grpo"],
            "there is no critic",
        ),
        (
            ["trainer.resume_from_path=/x", "trainer.resume_mode=auto"],
            "trainer.resume_mode=auto does not use it",
        ),
    ],
)
def test_a_key_of_rolepool_that_nothing_reads_is_accepted_and_explained(
    words: list[str], reason: str
) -> None:
    assert load(*words).without_effect == {words[0]: reason}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "needs more memory"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=64", "use the key that ends with _per_gpu"),
        ("critic.model.enable_activation_offload=true", "needs more memory"),
    ],
)
def test_a_request_that_is_not_met_but_changes_no_result_is_warned_of(
    setting: str, reason: str
) -> None:
    (warning,) = load(setting).warnings
    assert warning.startswith(f"{setting}: no effect: ")
    assert reason in warning


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "only FSDP2 is supported; remove it",
        ),
        ("critic.strategy=megatron", "only FSDP2 is supported"),
        (
            "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
            "trained weights are float32; remove it",
        ),
        (
            "data.tool_config_path=tools.yaml",
            "environment.name names the class or function with the tools",
        ),
        (
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
            "environment.name names the class",
        ),
        (
            "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
            "environment.name names the class",
        ),
        ("actor_rollout_ref.rollout.use_fire_sampling=true", "rollout.temperature; remove it"),
        ("actor_rollout_ref.rollout.prompt_length=7", "set data.max_prompt_length"),
        ("actor_rollout_ref.actor.freeze_vision_tower=true", "have no vision tower; remove it"),
        ("actor_rollout_ref.ref.model.path=another/model", "the policy before training; remove it"),
        (
            "actor_rollout_ref.model.hf_config_path=/x",
            "set override_config to replace entries of it",
        ),
        ("data.image_key=pictures", "only texts are read; remove it"),
        ("reward_model.reward_loop_module_path=mine", "set custom_reward_function.path"),
        ("reward_model.reward_loop_class_name=Mine", "set custom_reward_function.path"),
        ("reward_model.reward_loop_source=importlib", "set custom_reward_function.path"),
        ("ray_kwargs.ray_init.runtime_env.env_vars.A=x", "set variables in your shell"),
        ("algorithm.rollout_is=true", "set algorithm.rollout_correction.rollout_is"),
        (
            "actor_rollout_ref.actor.tis_imp_ratio_cap=2",
            "algorithm.rollout_correction.rollout_is=token",
        ),
        ("algorithm.rollout_correction.rollout_rs_threshold_lower=0.5", "such as 0.5_2.0"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=0.0001", "add seq_max_k2"),
        ("algorithm.rollout_correction.use_policy_gradient=true", "loss_type=reinforce"),
        ("reward_model.enable_resource_pool=true", "set placement.roles.reward_model"),
        (
            "actor_rollout_ref.rollout.pipeline_model_parallel_size=2",
            "use tensor_model_parallel_size",
        ),
        ("actor_rollout_ref.ref.sync_ref_model=true", "keeps its weights"),
    ],
)
def test_a_key_that_would_change_results_is_refused_with_the_reason(
    setting: str, reason: str
) -> None:
    (problem,) = problems(setting)
    assert problem.startswith(f"{setting}: not supported: ")
    assert reason in problem


def test_reasons_name_keys_that_exist() -> None:
    for other in VERL_KEYS.other_keys:
        for named in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", other.reason):
            assert (
                named in all_keys() or named in all_sections() or named == "chat_template.jinja"
            ), other


def test_micro_batch_sizes_have_no_effect_with_a_token_limit() -> None:
    loaded = load("critic.use_dynamic_bsz=true", "critic.ppo_micro_batch_size_per_gpu=5")
    expected = {
        "critic.ppo_micro_batch_size_per_gpu=5": "critic.use_dynamic_bsz=true limits micro-batches by tokens"
    }
    assert loaded.without_effect == expected
    assert (
        summarise(loaded, Hardware((8,), 80 * 2**30)).problems == []
    )  # 5 does not divide anything


def test_a_reference_may_name_a_key_without_effect(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "actor_rollout_ref: {rollout: {prompt_length: 77}}\n"
        "data: {max_prompt_length: '${actor_rollout_ref.rollout.prompt_length}'}\n"
        "critic: {ulysses_sequence_parallel_size: '${oc.select:nothing,1}'}\n"
    )
    loaded = load(files=(str(file),))
    assert loaded.config.data.max_prompt_length == 77
    assert "critic.ulysses_sequence_parallel_size=1" in loaded.without_effect
    assert problems("data.max_prompt_length=${actor_rollout_ref.rollout.prompt_length}")


# Engines


def test_another_engine_needs_a_fallback_to_train() -> None:
    name, fallback = (
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.fallback=native",
    )
    (problem,) = load(name, NO_VLLM).why_not_trained()
    assert fallback in problem
    loaded = load(name, fallback)
    assert loaded.why_not_trained() == []
    assert loaded.config.actor_rollout_ref.rollout.engine == "native"
    assert loaded.without_effect == {name: "fallback=native generates"}
    kwargs = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    swap_space = f"+{kwargs}.swap_space=32"
    assert load(name, swap_space).config.actor_rollout_ref.rollout.engine_kwargs.vllm == {
        "swap_space": 32
    }
    assert load(swap_space).without_effect == {kwargs: "the engine is native"}
    own = load("actor_rollout_ref.rollout.name=my.module:Engine", fallback)
    assert own.config.actor_rollout_ref.rollout.engine == "my.module:Engine"


def test_plan_says_where_training_will_not_start() -> None:
    loaded = load("trainer.test_freq=5", "actor_rollout_ref.model.lora_rank=8")
    warnings = summarise(loaded, Hardware(None, None)).warnings
    for start in (
        "trainer.test_freq=5: there are no validation prompts",
        "actor_rollout_ref.model.lora_rank=8: not",
    ):
        assert any(line.startswith(f"training does not start: {start}") for line in warnings)


# Suggestions


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.model.use_something_else",
        "actor_rollout_ref.rollout.temperature_schedule",
        "actor_rollout_ref.actor.sync_every",
        "data.adarft.beta",
        "trainer.notify",
        "reward_model.server.name",
        "algorithm.codapo_top_k",
        "critic.model.path_to_tokenizer",
    ],
)
def test_nothing_is_suggested_if_no_key_is_meant(key: str) -> None:
    assert unknown_key(key) == "unknown key; `rolepool config` lists all keys"


# Files


@pytest.mark.parametrize("file", ["ppo_trainer_old.yaml", "ppo_trainer_new.yaml"])
def test_the_complete_config_of_verl_loads(file: str) -> None:
    loaded = load(files=(str(ROOT / "verl_configs" / file),))
    assert loaded.config.data.train_batch_size == 1024
    assert loaded.config.actor_rollout_ref.actor.ppo_mini_batch_size == 256
    assert len(loaded.set_keys) > 90
    assert loaded.warnings == []


def write_files(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_defaults_list_is_merged_in_its_order(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        mine="defaults:\n- model_engine: dp\n- actor@actor_rollout_ref.actor: ${model_engine}_actor\n- data\n- _self_\n"
        "- late\ndata: {seed: 3, max_prompt_length: 30}\nhydra: {run: {dir: x}}\n",
        model_engine__dp="{}",
        actor__dp_actor="defaults:\n- ../optim@optim: adam\n- base\n- _self_\nclip_ratio: 0.3\n",
        actor__base="clip_ratio: 0.1\ngrad_clip: 0.5\n",
        optim__adam="lr: 0.125\n",
        data="data: {seed: 1, max_response_length: 10}\n",
        late="data: {max_prompt_length: 40}\n",
    )
    config = load(files=(str(tmp_path / "mine.yaml"),)).config
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio, actor.grad_clip, actor.optim.lr) == (0.3, 0.5, 0.125)
    assert (config.data.seed, config.data.max_prompt_length, config.data.max_response_length) == (
        3,
        40,
        10,
    )


def test_the_base_config_of_verl_need_not_be_there(tmp_path: Path) -> None:
    searchpath = "hydra: {searchpath: [file://verl/trainer/config]}\n"
    write_files(
        tmp_path, mine=f"{searchpath}defaults: [ppo_trainer, _self_]\ntrainer: {{seed: 7}}\n"
    )
    assert load(files=(str(tmp_path / "mine.yaml"),)).config.trainer.seed == 7
    write_files(tmp_path, mine="defaults: [my_base]\n")
    with pytest.raises(ConfigError, match=r"my_base\.yaml is not in"):
        load(files=(str(tmp_path / "mine.yaml"),))


def test_the_options_of_hydra_name_a_file(tmp_path: Path) -> None:
    write_files(tmp_path, mine="trainer: {seed: 7, nnodes: 2}\n")

    def loaded(*arguments: str) -> LoadedConfig:
        return load_words(Parser("train", "", words="FILE").parse(list(arguments)))

    config = loaded(f"--config-path={tmp_path}", "--config-name=mine", "trainer.nnodes=1").config
    assert (config.trainer.seed, config.trainer.nnodes) == (7, 1)
    assert (
        loaded("--config-path", str(tmp_path), "--config-name", "mine.yaml").config.trainer.nnodes
        == 2
    )
    assert loaded("--config-name=ppo_trainer").config == load().config
    with pytest.raises(ConfigError, match=r"other\.yaml"):
        loaded("--config-path", str(tmp_path), "--config-name", "other")


def test_every_pattern_can_match() -> None:
    for pattern in VERL_KEYS.renamed:
        re.compile(pattern)
    for other in VERL_KEYS.other_keys:
        assert other.reason
        for pattern in other.keys:
            re.compile(pattern)
