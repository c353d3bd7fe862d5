"""Keys of the models: what each role loads, how it trains, how it generates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from rolepool.config.base import (
    Count,
    CountOrMinusOne,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Ratio,
    Section,
    follows,
)

LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Fsdp(Section):
    param_offload: bool = False
    """Keep the role's weights in host memory while it is not at work."""
    optimizer_offload: bool = False
    """Keep the role's optimizer states in host memory except during its update."""
    fsdp_size: CountOrMinusOne = -1
    """Number of ranks that one copy of the weights is sharded over; -1 is the whole pool. Must divide the pool."""


class RefFsdp(Section):
    param_offload: bool = False
    """Keep the reference's weights in host memory while it is not at work."""


class Optim(Section):
    lr: NonNegative = 1e-6
    """Learning rate of AdamW, after warm-up."""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.999)
    """AdamW's two decay rates."""
    lr_warmup_steps: Annotated[int, Field(ge=-1)] = -1
    """Steps of linear warm-up, from the first in which the role updates; -1 takes lr_warmup_steps_ratio instead."""
    lr_warmup_steps_ratio: Ratio = 0.0
    """Warm-up as a fraction of the steps in which the role updates; in force while lr_warmup_steps is -1."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after warm-up; a cosine spans the steps in which the role updates."""
    min_lr_ratio: Ratio = 0.0
    """Where the cosine schedule ends, as a fraction of lr."""


class CriticOptim(Optim):
    lr: NonNegative = 1e-5
    """Learning rate of AdamW, after warm-up."""


class PolicyModel(Section):
    path: str | None = None
    """Model folder in Hugging Face format, or hub id, of actor, rollout and reference."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass if keeping them would not fit on the GPU; `plan` says which."""
    use_remove_padding: bool = True
    """Pack sequences without padding."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Only for folders you trust."""
    lora_rank: CountOrZero = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: Count = 16
    """Scale of LoRA adapters."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Entries of the model's config.json to replace, e.g. {attention_dropout: 0.0}."""


class Actor(Section):
    strategy: Literal["fsdp2"] = "fsdp2"
    """How the weights are sharded over the pool."""
    ppo_mini_batch_size: Count = 256
    """Prompts in one optimizer step, over all ranks (times rollout.n sequences)."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward and backward pass on one GPU; null chooses one that fits."""
    use_dynamic_bsz: bool = False
    """Fill passes by tokens (ppo_max_token_len_per_gpu) instead of by a number of sequences."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Tokens in one pass on one GPU when use_dynamic_bsz is on."""
    ppo_epochs: Count = 1
    """Passes over each batch of rollouts."""
    shuffle: bool = False
    """Shuffle the batch before it is cut into mini-batches."""
    clip_ratio: NonNegative = 0.2
    """PPO's clip range around a probability ratio of 1."""
    clip_ratio_low: NonNegative = follows("actor_rollout_ref.actor.clip_ratio")
    """Clip range below 1."""
    clip_ratio_high: NonNegative = follows("actor_rollout_ref.actor.clip_ratio")
    """Clip range above 1."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Lower bound of dual-clip PPO for negative advantages."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How token losses become one number."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL term against the reference to the loss. Needs the ref role."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL term of the loss."""
    kl_loss_type: KlEstimator = "low_var_kl"
    """Estimator of the KL term of the loss. low_var_kl is at most 10 per token, and has no gradient there."""
    grad_clip: Positive = 1.0
    """Largest gradient norm; gradients above it are scaled down."""
    optim: Optim
    fsdp_config: Fsdp


class Ref(Section):
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward pass on one GPU; null chooses one that fits."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill passes by tokens instead of by a number of sequences."""
    log_prob_max_token_len_per_gpu: Count = follows("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Tokens in one pass on one GPU when log_prob_use_dynamic_bsz is on."""
    fsdp_config: RefFsdp


class ValKwargs(Section):
    n: Count = 1
    """Responses to each validation prompt."""
    temperature: NonNegative = 0.0
    """Temperature of validation; in force when val_kwargs.do_sample is on."""
    top_p: Fraction = 1.0
    """Nucleus of validation; in force when val_kwargs.do_sample is on."""
    do_sample: bool = False
    """Sample in validation; off decodes greedily."""


class Rollout(Section):
    name: Literal["native", "vllm"] = "native"
    """The engine that generates."""
    n: Count = 1
    """Responses to each prompt."""
    temperature: NonNegative = 1.0
    """Divides the logits before sampling; over 0."""
    top_p: Fraction = 1.0
    """Sample from the smallest set of tokens that holds this probability."""
    top_k: CountOrMinusOne = -1
    """Sample from the k most likely tokens; -1 from all."""
    do_sample: bool = True
    """Sample; off decodes greedily."""
    ignore_eos: bool = False
    """Go on to max_response_length past an end token."""
    tensor_model_parallel_size: Count = 1
    """Ranks that share one copy of the rollout's weights. Divides the pool's processes of each node, and the heads."""
    gpu_memory_utilization: Fraction = 0.5
    """Part of the GPU's memory (of the pool's share) for the rollout's weights and KV cache. Bounds nothing on CPU."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward pass of the actor's compute_log_prob on one GPU; null chooses one that fits."""
    enforce_eager: bool = False
    """Decode without CUDA graphs."""
    free_cache_engine: bool = True
    """Give the KV cache's memory back while the rollout is not generating."""
    calculate_log_probs: bool = False
    """Return log-probs of sampled tokens, for the metrics `training/rollout_probs_diff_*` against the actor's."""
    max_num_seqs: Count = 1024
    """Most sequences in generation at once on one copy of the weights."""
    max_num_batched_tokens: Count = 8192
    """Most prompt tokens in one prefill pass."""
    val_kwargs: ValKwargs


class ActorRolloutRef(Section):
    model: PolicyModel
    actor: Actor
    ref: Ref
    rollout: Rollout


class CriticModel(Section):
    path: str | None = follows("actor_rollout_ref.model.path")
    """Model folder or hub id whose trunk the critic starts from; a value head is added."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass if keeping them would not fit on the GPU; `plan` says which."""
    use_remove_padding: bool = follows("actor_rollout_ref.model.use_remove_padding")
    """Pack sequences without padding."""
    fsdp_config: Fsdp


class Critic(Section):
    enable: bool | None = None
    """Train a critic; null: when algorithm.adv_estimator is gae."""
    model: CriticModel
    optim: CriticOptim
    ppo_mini_batch_size: Count = follows("actor_rollout_ref.actor.ppo_mini_batch_size")
    """Prompts in one optimizer step, over all ranks (times rollout.n sequences)."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward and backward pass on one GPU; null chooses one that fits."""
    forward_micro_batch_size_per_gpu: Count | None = follows("critic.ppo_micro_batch_size_per_gpu")
    """Sequences in one forward pass of compute_values on one GPU; null chooses one that fits."""
    use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill passes by tokens (ppo_max_token_len_per_gpu) instead of by a number of sequences."""
    ppo_max_token_len_per_gpu: Count = 32768
    """Tokens in one pass on one GPU when use_dynamic_bsz is on."""
    ppo_epochs: Count = follows("actor_rollout_ref.actor.ppo_epochs")
    """Passes over each batch of rollouts."""
    shuffle: bool = follows("actor_rollout_ref.actor.shuffle")
    """Shuffle the batch before it is cut into mini-batches."""
    cliprange_value: NonNegative = 0.5
    """Clip range of the value function around its old values."""
    grad_clip: Positive = 1.0
    """Largest gradient norm; gradients above it are scaled down."""
    loss_agg_mode: LossAggregation = follows("actor_rollout_ref.actor.loss_agg_mode")
    """How token losses become one number."""


class RewardModelModel(Section):
    path: str | None = None
    """Sequence-classification model folder or hub id that scores whole responses."""


class RewardModel(Section):
    enable: bool = False
    """Score responses with a model; off scores them with a rule or custom_reward_function."""
    model: RewardModelModel
    micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward pass on one GPU; null chooses one that fits."""
    max_length: Count | None = None
    """Tokens that are scored of a text, counted from its end; null: all of prompt and response."""
    use_dynamic_bsz: bool = follows("critic.use_dynamic_bsz")
    """Fill passes by tokens (critic.ppo_max_token_len_per_gpu) instead of by a number of sequences."""
