"""Keys of verl that rolepool does not have: other names of its own keys, keys without effect, keys that it refuses.

Owns the tables and the decision about one key and its value. Does not load anything.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

RENAMED = {
    r"reward\.(custom_reward_function|reward_model)": r"\1",
    r"reward\.reward_manager\.name": r"reward_model.reward_manager",
    r"reward\.reward_kwargs": r"reward_model.reward_kwargs",
    r"(reward_model|custom_reward_function)\.overlong_buffer": r"reward_model.reward_kwargs.overlong_buffer_cfg",
    r"reward_model\.model_path": r"reward_model.model.path",
    r"critic\.(fsdp|fsdp_config)": r"critic.model.fsdp_config",
    r"critic\.kl_ctrl": r"algorithm.kl_ctrl",
    r"(critic|actor_rollout_ref\.actor)\.optim\.warmup_style": r"\1.optim.lr_scheduler_type",
    r"(critic|actor_rollout_ref\.actor)\.optim\.clip_grad": r"\1.grad_clip",
    r"(actor_rollout_ref\.actor)\.((clip|kl)_cov_\w+|ppo_kl_coef|loss_mode)": r"\1.policy_loss.\2",
    r"ray_init": r"ray_kwargs.ray_init",
}
"""Other names of keys and sections, as patterns. A new name may be renamed again by a later pattern."""

SAME_VALUES: dict[str, dict[Any, Any]] = {
    "actor_rollout_ref.actor.strategy": {"fsdp": "fsdp2"},
    "actor_rollout_ref.actor.optim.min_lr_ratio": {None: 0.0},
    "critic.optim.min_lr_ratio": {None: 0.0},
    "actor_rollout_ref.rollout.name": {"???": "native"},
    "custom_reward_function.name": {None: "compute_score"},
    "trainer.save_freq": {0: -1},
    "trainer.test_freq": {0: -1},
}
"""Other ways to write a value, by key. false is 0."""

NULL_IS_UNSET = ("reward_model.", "custom_reward_function.")
"""Sections in which null in a file means that the key is not set: newer files of verl have these sections twice."""

Works = Literal["any", "warned", "off"]
"""Which values of a key are accepted: any value; any value, and the user is warned unless it is off; or off alone."""


class OtherKey(NamedTuple):
    """A key, or a section, of another trainer."""

    pattern: str
    works: Works
    reason: str
    """Why it has no effect, or why it is refused and what to write instead."""
    same: tuple[Any, ...] = ()
    """Values that mean what rolepool does in any case. They count as off."""

    def is_off(self, value: Any) -> bool:
        """Whether the value asks for nothing that rolepool does not do."""
        is_size_one = value == 1 and self.pattern.endswith("size")
        return value in (None, False, "", "???") or value in ([], {}, *self.same) or is_size_one


_ROLLOUT = r"actor_rollout_ref\.rollout"
_FSDP = r"(actor_rollout_ref\.(actor|ref)|(critic|reward_model)\.model)\.fsdp_config"
_OWN_CHOICE = "rolepool decides this itself, and the results do not depend on it"
_ENGINE = "it is a setting of another engine"
_PROFILER = "every run records the operations of every rank; see `rolepool report`"
_LORA = "LoRA is not implemented yet"
_ONE_TURN = "a response has one turn; tools are not supported"
_OFF_POLICY = "rolepool does not correct differences between rollout and actor; remove it"
_DAPO_GROUPS = "prompts are not sampled again; remove it"

OTHER_KEYS = (
    OtherKey(r"(.+\.)?_target_", "any", "it names a class of verl"),
    OtherKey(r"distillation\.enabled", "off", "distillation is not implemented; remove it"),
    OtherKey(r"hydra|transfer_queue|model_engine|distillation|skip", "any", "it is a part of verl alone"),
    OtherKey(r"(.+\.)?(global_)?profiler", "any", _PROFILER),
    OtherKey(r"trainer\.(profile_\w+|\w+_nsight_options|npu_profile)", "any", _PROFILER),
    OtherKey(r".+\.megatron", "off", "only FSDP2 is supported; remove it"),
    OtherKey(r".+\.ulysses_sequence_parallel_size", "warned", "every GPU holds whole sequences and needs more memory"),
    OtherKey(r".+\.(\w+_)?micro_batch_size", "warned", "it counts over all ranks; use the key that ends with _per_gpu"),
    OtherKey(r".+\.checkpoint", "any", "a checkpoint has all that a run needs to resume"),
    OtherKey(r".+\.rollout_n", "any", "actor_rollout_ref.rollout.n holds for all roles"),
    OtherKey(r".+\.(nccl_timeout|data_loader_seed|load_weight|use_shm|use_prefix_grouper)", "any", _OWN_CHOICE),
    OtherKey(r".+\.(use_torch_compile|use_liger|use_fused_kernels|fused_kernel_options|tiled_mlp)", "any", _OWN_CHOICE),
    OtherKey(r".+\.(entropy_from_logits_\w+|entropy_checkpointing|use_fused_loss|turbo_config)", "any", _OWN_CHOICE),
    OtherKey(r".+\.(pad_to_length\w*|\w*prefix_tree\w*|return_last_hidden_state)", "any", _OWN_CHOICE),
    OtherKey(r".+\.external_lib", "off", "set trainer.extensions to import a module"),
    OtherKey(r".+\.enable_activation_offload", "warned", "activations stay on the GPU, which needs more memory"),
    OtherKey(r".+\.(router_replay|enable_rollout_routing_replay)\.mode", "off", "remove it", ("disabled",)),
    OtherKey(r".+\.(router_replay|enable_rollout_routing_replay)", "off", "every pass chooses its experts itself"),
    OtherKey(r".+\.(mtp|qat)\.(enable|enable_train|enable_rollout)", "off", "it is not implemented; remove it"),
    OtherKey(r".+\.(mtp|qat)", "any", "it is not enabled"),
    OtherKey(r"(critic|reward_model|.+\.ref)\.strategy", "off", "only FSDP2 is supported", ("fsdp", "fsdp2")),
    # Sharding
    OtherKey(r"reward_model\.model\.fsdp_config\.param_offload", "warned", "the reward model stays on its GPUs"),
    OtherKey(r"reward_model\.model\.fsdp_config", "any", "every GPU of its pool holds the whole reward model"),
    OtherKey(rf"{_FSDP}\.(wrap_policy|forward_prefetch|reshard_after_forward|use_orig_params)", "any", _OWN_CHOICE),
    OtherKey(rf"{_FSDP}\.(forward_only|full_determinism|seed|grad_offload|use_no_sync_\w+)", "any", _OWN_CHOICE),
    OtherKey(rf"{_FSDP}\.offload_policy", "off", "use param_offload and optimizer_offload"),
    OtherKey(rf"{_FSDP}\.strategy", "off", "only FSDP2 is supported", ("fsdp", "fsdp2")),
    OtherKey(r".+\.ref\.fsdp_config\.(fsdp_size|optimizer_offload|model_dtype)", "any", _OWN_CHOICE),
    OtherKey(rf"{_FSDP}\.model_dtype", "off", "trained weights are float32; remove it", ("fp32", "float32")),
    OtherKey(rf"{_FSDP}\.(dtype|mixed_precision)", "off", "GPUs compute in bfloat16", ("bf16", "bfloat16")),
    # Optimizer
    OtherKey(r".+\.optim\.(optimizer|optimizer_impl)", "off", "the optimizer is AdamW", ("AdamW", "torch.optim")),
    OtherKey(r".+\.optim\.total_training_steps", "off", "set trainer.total_training_steps", (-1,)),
    OtherKey(r".+\.optim\.num_cycles", "off", "the cosine falls once, to min_lr_ratio", (0.5,)),
    OtherKey(r".+\.optim\.zero_indexed_step", "off", "the first step of warm-up has a learning rate above 0", (True,)),
    OtherKey(r".+\.optim\.override_optimizer_config", "off", "AdamW has lr, betas and weight_decay"),
    # Data
    OtherKey(r"data\.return_(raw_chat|raw_input_ids|full_prompt)", "any", "rewards get the prompt and all columns"),
    OtherKey(r"data\.(\w+_workers|use_shm|validation_shuffle|trust_remote_code)", "any", _OWN_CHOICE),
    OtherKey(r"data\.tokenizer", "off", "the tokenizer is the one of actor_rollout_ref.model.path"),
    OtherKey(r"data\.reward_fn_key", "off", "rename that column to data_source", ("data_source",)),
    OtherKey(r"data\.(custom_cls|sampler)\.(path|class_path)", "off", "write the rows to data.train_files"),
    OtherKey(r"data\.datagen\.path", "off", "write the rows to data.train_files"),
    OtherKey(r"data\.(custom_cls|sampler|datagen)", "any", "no class is named"),
    OtherKey(r"data\.gen_batch_size", "warned", "data.train_batch_size prompts are generated in each step"),
    OtherKey(r"data\.((image|video|audio)\w*|return_multi_modal_inputs|mm_\w+)", "any", "only texts are read"),
    OtherKey(r"data\.(tool_config_path|function_tool_path|mcp\w*)", "off", _ONE_TURN),
    # Models
    OtherKey(r"actor_rollout_ref\.hybrid_engine", "off", "to separate actor and rollout set placement.roles", (True,)),
    OtherKey(r".+\.custom_chat_template", "off", "write it to the model's folder as chat_template.jinja"),
    OtherKey(r".+\.(hf_config_path|tokenizer_path|load_tokenizer)", "any", "it is read from the model's folder"),
    OtherKey(r".+\.lora\.rank|.+\.lora_rank", "off", _LORA, (0,)),
    OtherKey(r".+\.(lora_adapter_path|adapter_path)", "off", f"{_LORA}; merge the adapter into the model's folder"),
    OtherKey(r".+\.(lora|lora_alpha|target_modules|exclude_modules|target_parameters)", "any", _LORA),
    OtherKey(r"(critic|reward_model)\.model\.(trust_remote_code|override_config)", "any", "the policy's key holds"),
    OtherKey(r"reward_model\.model\.use_remove_padding", "any", _OWN_CHOICE),
    # Actor and reference
    OtherKey(r".+\.actor\.(freeze_vision_tower|calculate_\w+)", "any", _OWN_CHOICE),
    OtherKey(r".+\.actor\.use_remove_padding", "any", "actor_rollout_ref.model.use_remove_padding holds"),
    OtherKey(r".+\.actor\.(tau_pos|tau_neg|policy_loss\.dro_beta)", "any", "no loss of rolepool uses it"),
    OtherKey(r"critic\.loss_scale_factor", "off", "the critic's loss has no such factor; remove it"),
    OtherKey(r".+\.actor\.(tis_imp_ratio_cap|behave_imp_weight_cap)", "off", _OFF_POLICY, (-1,)),
    OtherKey(r".+\.actor\.use_rollout_log_probs", "off", "the actor computes the old log-probs; remove it"),
    OtherKey(r".+\.actor\.use_gpg_loss", "off", "set actor_rollout_ref.actor.policy_loss.loss_mode=gpg"),
    OtherKey(r".+\.actor\.use_token_level_loss", "off", "set actor_rollout_ref.actor.loss_agg_mode", (True,)),
    OtherKey(r".+\.ref\.sync_ref_model", "off", "the reference keeps its weights; remove it"),
    OtherKey(r".+\.ref\.(ref_model_\w+|model)", "any", "the reference keeps its weights"),
    # Rollout
    OtherKey(rf"{_ROLLOUT}\.(mode|load_format|dtype|layered_summon|engine_kwargs|swap_space)", "any", _ENGINE),
    OtherKey(rf"{_ROLLOUT}\.(enable_chunked_prefill|enable_prefix_caching|disable_log\w+)", "any", _ENGINE),
    OtherKey(rf"{_ROLLOUT}\.(cudagraph_capture_sizes|logprobs_mode|scheduling_policy|trace)", "any", _ENGINE),
    OtherKey(rf"{_ROLLOUT}\.(multi_stage_wake_up|prometheus|server|checkpoint_engine|skip_\w+)", "any", _ENGINE),
    OtherKey(rf"{_ROLLOUT}\.(update_weights_bucket_megabytes|limit_images|use_fire_sampling)", "any", _ENGINE),
    OtherKey(rf"{_ROLLOUT}\.(chat_scheduler|router_config_path|moe_load_\w+|full_determinism)", "any", _ENGINE),
    OtherKey(rf"{_ROLLOUT}\.seed", "any", "trainer.seed is the seed of all samples"),
    OtherKey(rf"{_ROLLOUT}\.disaggregation\.enabled", "off", "an engine's prefill and decoding share its GPUs"),
    OtherKey(rf"{_ROLLOUT}\.disaggregation", "any", "it is not enabled"),
    OtherKey(
        rf"{_ROLLOUT}\.(prompt_length|response_length|max_model_len)",
        "any",
        "data.max_prompt_length and data.max_response_length hold",
    ),
    OtherKey(rf"{_ROLLOUT}\.(data|expert|pipeline_model)_parallel_size", "off", "use tensor_model_parallel_size"),
    OtherKey(rf"{_ROLLOUT}\.(nnodes|n_gpus_per_node)", "any", "placement.roles.rollout names the rollout's pool"),
    OtherKey(rf"{_ROLLOUT}\.multi_turn\.enable", "off", _ONE_TURN),
    OtherKey(rf"{_ROLLOUT}\.(multi_turn|agent|custom)", "any", _ONE_TURN),
    OtherKey(rf"{_ROLLOUT}\.quantization\w*", "off", "weights are not quantized; remove it"),
    OtherKey(rf"{_ROLLOUT}\.over_sample_rate", "off", "every response is finished; remove it", (0,)),
    # Rewards
    OtherKey(r"reward(_model)?\.(num_workers|use_reward_loop|launch_reward_fn_async)", "any", _OWN_CHOICE),
    OtherKey(r"reward(_model)?\.reward_loop\w*|reward\.reward_manager", "any", _OWN_CHOICE),
    OtherKey(r"reward_model\.(rollout|inference)", "any", "the reward model runs in its pool, without an engine"),
    OtherKey(r"(reward(_model)?\.)?sandbox_fusion(\.|_)url", "off", "call it in custom_reward_function"),
    OtherKey(r"(reward(_model)?\.)?sandbox_fusion", "any", "there is no url"),
    OtherKey(r"reward_model\.enable_resource_pool", "off", "set placement.roles.reward_model to a pool of its own"),
    OtherKey(r"reward_model\.(n_gpus_per_node|nnodes)", "any", "placement.roles.reward_model names its pool"),
    # Algorithm and trainer
    OtherKey(r"algorithm\.filter_groups\.enable", "off", _DAPO_GROUPS),
    OtherKey(r"algorithm\.filter_groups", "any", _DAPO_GROUPS),
    OtherKey(r"algorithm\.use_pf_ppo", "off", "samples are not weighted; remove it"),
    OtherKey(r"algorithm\.pf_ppo", "any", "samples are not weighted"),
    OtherKey(r"algorithm\.(rollout_correction\.)?(rollout_is|rollout_rs|bypass_mode)", "off", _OFF_POLICY),
    OtherKey(r"algorithm\.rollout_\w+", "any", "rollout_is is not set"),
    OtherKey(r"trainer\.(balance_keep_minibatch|checkpoint_callback_class)", "off", "it is not implemented; remove it"),
    OtherKey(r"trainer\.(use_legacy_worker_impl|use_v1|v1|ray_wait_register_center_timeout)", "any", _OWN_CHOICE),
    OtherKey(r"trainer\.(esi_redundant_time|\w+_ckpt_\w+|default_hdfs_dir|dump_high_\w+)", "any", _OWN_CHOICE),
    OtherKey(
        r"trainer\.(log_val_generations|rollout_data_dir|validation_data_dir)", "warned", "samples are not stored"
    ),
    OtherKey(r"ray_kwargs\.(timeline_json_file|ray_init\.runtime_env)", "off", "set variables in your shell"),
)
"""The first pattern that matches decides. A section stands for all keys below it."""


def renamed(path: str) -> str:
    """The name that rolepool has for this key; the same name if it has no other."""
    for pattern, name in RENAMED.items():
        path = re.sub(rf"^{pattern}(?=\.|$)", name, path)
    return path


def find_other(path: str) -> OtherKey | None:
    """The entry for a key that rolepool does not have. The entry for a section holds for all keys below it."""
    return next((key for key in OTHER_KEYS if re.fullmatch(rf"(?:{key.pattern})(\..*)?", path)), None)
