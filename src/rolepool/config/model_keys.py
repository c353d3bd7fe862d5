"""Keys of the models: what each role loads, how it trains, how it generates."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict, field_validator

from rolepool.config.base import (
    Count,
    CountOrMinusOne,
    CountOrZero,
    Fraction,
    Items,
    NonNegative,
    Positive,
    Ratio,
    Section,
    follows,
)
from rolepool.config.functions import OTHER_ENGINES, EngineName, FormatName, PolicyLossName

LossAggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
KlEstimator = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
]
Beta = Annotated[float, Field(ge=0, lt=1)]


class RefFsdpConfig(Section):
    param_offload: bool = False
    """Keep the role's weights in host memory while the role is idle."""


class FsdpConfig(RefFsdpConfig):
    optimizer_offload: bool = False
    """Keep the role's optimizer states in host memory except during its update."""
    fsdp_size: CountOrMinusOne = -1
    """Number of ranks that share one copy of the weights; must divide the pool. -1 uses the whole
    pool."""


class OptimConfig(Section):
    lr: NonNegative = 1e-6
    """Learning rate of AdamW, after warm-up."""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.999)
    """AdamW's two decay rates."""
    lr_warmup_steps: Annotated[int, Field(ge=-1)] = -1
    """Linear warm-up steps, from the first step that updates the role; -1 uses
    lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Ratio = 0.0
    """Warm-up as a fraction of the steps that update the role, if lr_warmup_steps is -1."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Schedule after warm-up; cosine covers the steps that update the role."""
    min_lr_ratio: Ratio = 0.0
    """Final learning rate of the cosine schedule, as a fraction of lr."""


class CriticOptimConfig(OptimConfig):
    lr: NonNegative = 1e-5
    """Learning rate of AdamW, after warm-up."""


class PolicyModelConfig(Section):
    path: str | None = None
    """Model of actor, rollout and reference: a folder in Hugging Face format, or a hub id."""
    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer and its chat template; null uses the model's."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass if they do not fit on the GPU; `rolepool plan`
    shows this."""
    use_remove_padding: bool = True
    """Pack sequences without padding."""
    trust_remote_code: bool = False
    """Run Python code from the model folder; only for folders that you trust."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of LoRA adapters; not implemented yet, only 0 works, which trains all weights."""
    lora_alpha: Annotated[int, Field(ge=0)] = 16
    """Scale of LoRA adapters."""
    override_config: dict[str, object] = Field(default_factory=dict)
    """Entries of the model's config.json to replace, for example {attention_dropout: 0.0}."""

    @property
    def tokenizer(self) -> str | None:
        """Where the tokenizer is."""
        return self.tokenizer_path or self.path


class PolicyLossConfig(Section):
    loss_mode: PolicyLossName = "vanilla"
    """Policy loss: vanilla (PPO with dual clip), gspo, gpg, clip_cov, kl_cov, geo_mean, cispo, or
    your own module:function (docs/extending.md). geo_mean always uses the mean over sequences, the
    others follow loss_agg_mode (the authors of gspo use seq-mean-token-mean). clip_cov and kl_cov
    compare the tokens of one micro-batch, so they depend on its size."""
    clip_cov_ratio: Fraction = 0.0002
    """Fraction of a micro-batch's tokens whose loss clip_cov removes; at least one token."""
    clip_cov_lb: float = 1.0
    """Lower limit of the covariance of tokens that clip_cov removes."""
    clip_cov_ub: float = 5.0
    """Upper limit of the covariance of tokens that clip_cov removes."""
    kl_cov_ratio: Fraction = 0.0002
    """Fraction of a micro-batch's tokens to which kl_cov adds a KL term; at least one token."""
    ppo_kl_coef: NonNegative = 0.1
    """Weight of the KL term of kl_cov."""


class ActorConfig(Section):
    strategy: Literal["fsdp2"] = "fsdp2"
    """How the weights are sharded over the pool."""
    ppo_mini_batch_size: Count = 256
    """Prompts in one optimizer step, over all ranks; each has rollout.n sequences. If 256 does not
    divide data.train_batch_size, the default is the largest divisor below 256."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one micro-batch on one GPU; null chooses a size that fits."""
    use_dynamic_bsz: bool = False
    """Limit micro-batches by tokens (ppo_max_token_len_per_gpu), not by sequences."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Most tokens in one micro-batch on one GPU if use_dynamic_bsz is true."""
    ppo_epochs: Count = 1
    """Passes over each batch of rollouts."""
    shuffle: bool = False
    """Shuffle the batch before it is split into mini-batches."""
    policy_loss: PolicyLossConfig
    clip_ratio: NonNegative = 0.2
    """Clip range of PPO's probability ratio around 1."""
    clip_ratio_low: NonNegative = follows("actor_rollout_ref.actor.clip_ratio")
    """Clip range below 1."""
    clip_ratio_high: NonNegative = follows("actor_rollout_ref.actor.clip_ratio")
    """Clip range above 1."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Limit of dual-clip PPO for tokens with negative advantage."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How token losses become one number. token-sum does not divide by anything."""
    loss_scale_factor: Positive | None = None
    """Divisor of loss_agg_mode=seq-mean-token-sum-norm; null uses data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL term against the reference to the loss; needs the ref role."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL term of the loss."""
    kl_loss_type: KlEstimator = "low_var_kl"
    """Estimator of the KL term. low_var_kl is capped at 10 per token; a capped token has no
    gradient. With a + at the end, as in k3+, it has the gradient of k2."""
    grad_clip: Positive = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    optim: OptimConfig
    fsdp_config: FsdpConfig


class RefConfig(Section):
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one micro-batch on one GPU; null chooses a size that fits."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Limit micro-batches by tokens (log_prob_max_token_len_per_gpu), not by sequences."""
    log_prob_max_token_len_per_gpu: Count = follows(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )
    """Most tokens in one micro-batch if log_prob_use_dynamic_bsz is true."""
    fsdp_config: RefFsdpConfig


class ValKwargs(Section):
    n: Count = 1
    """Number of responses to each validation prompt."""
    temperature: NonNegative = 0.0
    """Temperature in validation if val_kwargs.do_sample is true."""
    top_p: Fraction = 1.0
    """Top-p in validation if val_kwargs.do_sample is true."""
    top_k: CountOrMinusOne = -1
    """Top-k in validation if val_kwargs.do_sample is true."""
    do_sample: bool = False
    """Sample in validation; false decodes greedily."""


class EngineKwargsConfig(Section):
    vllm: dict[str, object] = Field(default_factory=dict)
    """Further arguments of vLLM's LLM class, for example {enable_prefix_caching: false}."""

    @field_validator("vllm")
    @classmethod
    def _check_vllm(cls, arguments: dict[str, object]) -> dict[str, object]:
        if "gpu_memory_utilization" in arguments:
            raise ValueError(
                "vLLM must not measure free memory while other roles load; set "
                "actor_rollout_ref.rollout.gpu_memory_utilization, or kv_cache_memory_bytes here"
            )
        return arguments


class MultiTurnConfig(Section):
    enable: bool = False
    """Generate conversations of several turns with the environment of environment.name."""
    max_assistant_turns: Count | None = None
    """Most turns of the model in a conversation; null sets no limit. data.max_response_length
    limits all its tokens."""
    max_turn_tokens: Count | None = None
    """Most tokens of one turn of the model; null sets no limit."""
    max_user_turns: Count | None = None
    """Most turns of the environment, which answer tool calls; null sets no limit."""
    max_tool_response_length: Count = 256
    """Most characters of a tool's answer; the middle of a longer one is removed."""
    format: FormatName = "hermes"
    """How tool calls are written: hermes, which is <tool_call>{"name": ..., "arguments":
    {...}}</tool_call>, or your own module:function, from the text of a turn to a list of (name,
    arguments)."""


class RolloutConfig(Section):
    name: EngineName = "native"
    """Rollout engine (docs/engines.md): native, transformers, vllm, or your own module:class
    (docs/extending.md). sglang and trtllm can be planned, but need fallback to train."""
    fallback: Literal["native"] | None = None
    """The engine in place of vllm, sglang or trtllm. null uses vllm, and does not train with the
    others."""
    engine_kwargs: EngineKwargsConfig
    vllm_python: str = ".venv-vllm/bin/python"
    """The Python of vLLM's environment, which scripts/setup_vllm.sh makes."""
    vllm_start_timeout_s: Positive = 1800.0
    """How long vLLM may take to start. It starts while the models of other roles are loaded."""
    parity_check: bool | None = None
    """Compare the engine's log-probs with the actor's in every step, and stop if they differ
    (docs/engines.md). null does so for all engines except native. Not possible with top_p, top_k,
    or greedy decoding at a temperature other than 1."""
    parity_limit: Positive | None = None
    """Largest mean error of the engine's logits that these log-probs may show (docs/engines.md);
    null is 0.0002 on CPU slots (float32) and 0.2 on GPUs (16 bits)."""
    n: Count = 1
    """Number of responses to each prompt; grpo, rloo and others compare them and need at least
    2."""
    temperature: NonNegative = 1.0
    """Sampling temperature; must be greater than 0."""
    top_p: Fraction = 1.0
    """Sample from the fewest tokens whose total probability exceeds this value."""
    top_k: CountOrMinusOne = -1
    """Sample from the k most likely tokens; -1 uses all tokens."""
    do_sample: bool = True
    """Sample; false decodes greedily."""
    ignore_eos: bool = False
    """Ignore end tokens and always generate max_response_length tokens."""
    stop_token_ids: Items[CountOrZero] = ()
    """Tokens that end a response, in addition to the end tokens of the tokenizer, config.json and
    generation_config.json; `rolepool plan` shows all."""
    tensor_model_parallel_size: Count = 1
    """Number of ranks that share one copy of the rollout's weights; must divide the pool's
    processes on each node, and the model's heads."""
    gpu_memory_utilization: Fraction = 0.5
    """Fraction of the GPU's memory (or of the pool's share) for the rollout's weights and KV cache;
    not used on CPU."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one micro-batch of the actor's compute_log_prob; null chooses a size that
    fits."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Limit micro-batches of compute_log_prob by tokens (log_prob_max_token_len_per_gpu), not by
    sequences."""
    log_prob_max_token_len_per_gpu: Count = follows(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )
    """Most tokens in one micro-batch of compute_log_prob if log_prob_use_dynamic_bsz is true."""
    enforce_eager: bool = False
    """Decode without CUDA graphs."""
    free_cache_engine: bool = True
    """Free the KV cache while the rollout is idle."""
    calculate_log_probs: bool = False
    """Return log-probs of sampled tokens, for the metrics `training/rollout_probs_diff_*`, which
    need old log-probs of the actor (algorithm.rollout_correction.bypass_mode=false)."""
    max_num_seqs: Count = 1024
    """Most sequences that one copy of the weights generates at the same time."""
    max_num_batched_tokens: Count = 8192
    """Most prompt tokens in one prefill micro-batch."""
    weights: Literal["auto", "full", "delta"] = "auto"
    """What the actor sends to a rollout in another pool (docs/engines.md): all weights in every
    step (full), or only the values that changed, with their positions (delta). Both use a process
    group of the two pools. auto does so on CPU slots, with full, and uses Ray's shared memory on
    GPUs, because a death in the middle of a transfer has not been tried with NCCL."""
    val_kwargs: ValKwargs
    multi_turn: MultiTurnConfig

    @property
    def engine(self) -> str:
        """The engine that generates: `name`, or `fallback` in place of an engine of another
        project."""
        if self.fallback is not None and self.name in ("vllm", *OTHER_ENGINES):
            return self.fallback
        return self.name

    @property
    def has_actors_distribution(self) -> bool:
        """Whether tokens are chosen with the probabilities that the actor computes, softmax(logits
        / temperature)."""
        if not self.do_sample:
            return self.temperature == 1
        return self.top_k == -1 and self.top_p == 1

    @property
    def checks_parity(self) -> bool:
        if self.parity_check is None:
            is_wanted = self.engine != "native"
        else:
            is_wanted = self.parity_check
        return is_wanted and self.has_actors_distribution


class ActorRolloutRefConfig(Section):
    model: PolicyModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig


class CriticModelConfig(Section):
    path: str | None = follows("actor_rollout_ref.model.path")
    """Model folder or hub id whose trunk initializes the critic; a value head is added."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass if they do not fit on the GPU; `rolepool plan`
    shows this."""
    use_remove_padding: bool = follows("actor_rollout_ref.model.use_remove_padding")
    """Pack sequences without padding."""
    fsdp_config: FsdpConfig


class CriticConfig(Section):
    enable: bool | None = None
    """Train a critic; null trains one if algorithm.adv_estimator needs it. Set true if your own one
    needs values."""
    model: CriticModelConfig
    optim: CriticOptimConfig
    ppo_mini_batch_size: Count = follows("actor_rollout_ref.actor.ppo_mini_batch_size")
    """Prompts in one optimizer step, over all ranks; each has rollout.n sequences."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one micro-batch on one GPU; null chooses a size that fits."""
    forward_micro_batch_size_per_gpu: Count | None = follows("critic.ppo_micro_batch_size_per_gpu")
    """Sequences in one micro-batch of compute_values; null chooses a size that fits."""
    use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Limit micro-batches by tokens (ppo_max_token_len_per_gpu), not by sequences."""
    ppo_max_token_len_per_gpu: Count = 32768
    """Most tokens in one micro-batch on one GPU if use_dynamic_bsz is true."""
    forward_max_token_len_per_gpu: Count = follows("critic.ppo_max_token_len_per_gpu")
    """Most tokens in one micro-batch of compute_values if use_dynamic_bsz is true."""
    ppo_epochs: Count = follows("actor_rollout_ref.actor.ppo_epochs")
    """Passes over each batch of rollouts."""
    shuffle: bool = follows("actor_rollout_ref.actor.shuffle")
    """Shuffle the batch before it is split into mini-batches."""
    cliprange_value: NonNegative = 0.5
    """Clip range of new values around the old ones."""
    grad_clip: Positive = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    loss_agg_mode: LossAggregation = follows("actor_rollout_ref.actor.loss_agg_mode")
    """How token losses become one number."""


class RewardModelModelConfig(Section):
    path: str | None = None
    """Sequence-classification model folder or hub id that scores whole responses."""
    input_tokenizer: str | None = follows("actor_rollout_ref.model.path")
    """Folder or hub id of the policy's tokenizer. Texts are tokenized again if the reward model has
    another tokenizer or chat template; null never does so."""
    trust_remote_code: bool = follows("actor_rollout_ref.model.trust_remote_code")
    """Allow code from the reward model's folder to run."""


class RewardModelConfig(Section):
    enable: bool = False
    """Score responses with a model; false scores them with a rule or custom_reward_function."""
    model: RewardModelModelConfig
    micro_batch_size_per_gpu: Count | None = None
    """Sequences in one micro-batch on one GPU; null chooses a size that fits."""
    max_length: Count | None = None
    """Score only the last N tokens of prompt and response; null scores all, or the last
    data.max_prompt_length + data.max_response_length of a text that is tokenized again."""
    use_dynamic_bsz: bool = follows("critic.use_dynamic_bsz")
    """Limit micro-batches by tokens (forward_max_token_len_per_gpu), not by sequences."""
    forward_max_token_len_per_gpu: Count = follows("critic.forward_max_token_len_per_gpu")
    """Most tokens in one micro-batch on one GPU if use_dynamic_bsz is true."""


class OverlongBufferConfig(Section):
    enable: bool = False
    """Subtract a penalty from the scores of long responses; needs
    reward_model.reward_manager=dapo."""
    len: Annotated[int, Field(ge=0)] = 0
    """The penalty begins this number of tokens before max_resp_len and grows linearly."""
    penalty_factor: NonNegative = 0.0
    """The penalty of a response with max_resp_len tokens."""
    log: bool = False
    """Log the penalty as reward/overlong_reward/mean and the fraction of such responses as
    reward/overlong/mean."""


class RewardKwargsConfig(Section):
    overlong_buffer_cfg: OverlongBufferConfig
    max_resp_len: Count = follows("data.max_response_length")
    """Number of response tokens at which the penalty is penalty_factor."""


def _known_manager(name: object) -> object:
    if name not in ("naive", "batch", "prime", "dapo"):
        fix = "to score in another way, write a function and set custom_reward_function.path (docs/rewards.md)"
        raise ValueError(f"must be naive, batch, prime or dapo; {fix}")
    return name


class MainRewardModelConfig(RewardModelConfig):
    """The section `reward_model`, which has keys for rewards without a model, too."""

    reward_manager: Annotated[
        Literal["naive", "batch", "prime", "dapo"], BeforeValidator(_known_manager)
    ] = "naive"
    """How scores of rules and functions become rewards: as they are (naive), or with DAPO's penalty
    for long responses (dapo), which reward_kwargs.overlong_buffer_cfg sets. verl's names batch and
    prime mean naive."""
    reward_kwargs: RewardKwargsConfig
