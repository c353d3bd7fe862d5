"""Keys of the run: data, algorithm, trainer, placement, Ray."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from rolepool.config.base import (
    Count,
    CountOrMinusOne,
    CountOrZero,
    Items,
    NonNegative,
    Positive,
    Ratio,
    Section,
)
from rolepool.config.functions import AdvEstimatorName, StepName, StrategyName
from rolepool.config.model_keys import KlEstimator
from rolepool.config.rollout_correction import Preset, as_number, read_bounds, read_rules

MAX_NODES = 65_536
MAX_GPUS_PER_NODE = 1_024
MAX_SLOTS = 2**20
MAX_STALENESS = 16
"""The driver holds about so many batches of responses in memory."""


class DataConfig(Section):
    train_files: Items[str] = ()
    """Parquet or JSONL files with training prompts, or Hugging Face datasets as hf:NAME:SPLIT
    (docs/training.md)."""
    val_files: Items[str] = ()
    """Parquet or JSONL files with validation prompts, or hf:NAME:SPLIT."""
    train_batch_size: Count = 1024
    """Prompts in one training step, over all ranks."""
    gen_batch_size: Count | None = None
    """Prompts in one batch of generation, with algorithm.filter_groups.enable=true; null means
    train_batch_size."""
    val_batch_size: Count | None = None
    """Prompts in one validation batch; null means all."""
    max_prompt_length: Count = 512
    """Longest prompt in tokens. The default is less if the policy has fewer positions."""
    max_response_length: Count = 512
    """Longest response in tokens. The default is less if the policy has fewer positions."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a prompt that is longer than max_prompt_length."""
    filter_overlong_prompts: bool = False
    """Drop prompts that are longer than max_prompt_length."""
    shuffle: bool = True
    """Shuffle the training prompts in each epoch."""
    seed: CountOrZero | None = None
    """Seed for shuffling; null uses trainer.seed."""
    prompt_key: str = "prompt"
    """Name of the prompt column."""
    answer_key: str | None = None
    """Column with the ground truth; null uses reward_model.ground_truth."""
    system_prompt: str | None = None
    """System message of every chat that does not begin with one. Prompts that are plain text then
    become chats."""
    apply_chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments for the chat template, such as {enable_thinking: false}."""
    train_max_samples: CountOrMinusOne = -1
    """Use only the first N training rows; -1 uses all."""
    val_max_samples: CountOrMinusOne = -1
    """Use only the first N validation rows; -1 uses all."""


class CustomRewardFunctionConfig(Section):
    path: str | None = None
    """Python file with the reward function (docs/rewards.md); null uses reward.functions."""
    name: str = "compute_score"
    """Name of the function in that file."""
    reward_kwargs: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments for the function, such as {strict: true}."""
    max_concurrency: Count | None = None
    """How many responses your functions score at the same time: calls of an async function (null:
    64), or processes for any other (null: one for each 8 CPUs, at most 8). Not used for a function
    that takes whole batches."""
    timeout_s: Positive = 60.0
    """Longest time in seconds for one call of your function (one response, or one batch), including
    retries. A call that takes longer is stopped, also inside C code, and its responses count as
    failed."""
    retries: CountOrZero = 3
    """How often a call of your function is repeated, within timeout_s, after a failed connection or
    HTTP status 408, 425, 429, 500, 502, 503 or 504. The wait is about 0.5 s and doubles up to 8
    s."""
    on_error: Literal["abort", "zero"] = "abort"
    """If your function raises an error or takes too long: end the run (abort), or give score 0 and
    count the response in reward/failed/mean (zero). A result that is not a finite number always
    ends the run."""


class RewardFunctionConfig(Section):
    function: str
    """A built-in rule, or FILE.py:FUNCTION."""
    weight: float = 1.0
    """Factor of its score in the sum."""

    @model_validator(mode="before")
    @classmethod
    def _accept_plain_text(cls, value: object) -> object:
        return {"function": value} if isinstance(value, str) else value


class RewardConfig(Section):
    functions: Items[RewardFunctionConfig] = ()
    """Built-in rules and your own functions whose weighted sum is the score of every row, such as
    [last_number, {function: my.py:brevity, weight: 0.1}] (docs/rewards.md). An empty list uses the
    built-in rule for the row's data_source."""


class EnvironmentConfig(Section):
    path: str | None = None
    """Python file with the environment; null imports the module that environment.name begins
    with."""
    name: str | None = None
    """The environment for conversations (docs/environments.md), a class with tools or an async
    function: a name in the file of environment.path, or module:name."""
    timeout_s: Positive = 10.0
    """Longest time in seconds for one call of a tool, which is then stopped."""
    memory_gb: Positive = 1.0
    """Memory in GiB that a tool may use in addition to that of its process at the start."""
    num_processes: Count = 4
    """Number of processes for tools on each rank of the rollout; each runs one tool at a time."""


class KlCtrlConfig(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the coefficient fixed, or adapt it so that the KL approaches target_kl."""
    kl_coef: NonNegative = 0.001
    """Coefficient of the KL penalty in the reward; the initial one if adaptive."""
    horizon: Count = 10_000
    """Sequences over which the adaptive controller reacts; larger is slower."""
    target_kl: Positive = 0.1
    """Target KL of the adaptive controller."""


def _check_bounds(threshold: float | str | None) -> float | str | None:
    if threshold is not None:
        read_bounds(threshold)
    return threshold


def _check_rules(names: str | None) -> str | None:
    if names is not None:
        read_rules(names)
    return names


Threshold = Annotated[float | str | None, BeforeValidator(as_number)]
WeightThreshold = Annotated[Threshold, AfterValidator(_check_bounds)]
RejectionRules = Annotated[str | None, AfterValidator(_check_rules)]


class RolloutCorrectionConfig(Section):
    """Corrections for responses that another policy has generated than the one that is trained:
    older weights, or an engine that rounds in another way."""

    preset: Preset | None = None
    """Values for the other keys of this section that you do not set, such as decoupled_token_is
    (docs/corrections.md has all of them)."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Multiply the policy loss by the probability of the actor divided by that of the engine, for
    each token or for each sequence. null does not."""
    rollout_is_threshold: WeightThreshold = 2.0
    """Bound of these weights: a number truncates larger ones, and 0.5_2.0 gives weight 0 to what is
    outside of the two numbers."""
    rollout_is_batch_normalize: bool = False
    """Divide these weights by their mean over the batch (with bypass_mode: over the
    mini-batch)."""
    rollout_rs: RejectionRules = None
    """Leave tokens or sequences out of the loss that are too far apart: token_k1, seq_sum_k1,
    seq_mean_k3, seq_max_k2 and others, or several with commas (docs/corrections.md). null keeps
    all."""
    rollout_rs_threshold: Threshold = None
    """Bound of what rollout_rs compares, or one for each rule, with commas: 0.5_2.0 for k1, which
    is a ratio (2.0 means 0.5_2.0), and a number for k2 and k3."""
    bypass_mode: bool = False
    """Use the log-probs that the engine returns as the old log-probs, and do not compute them again
    with the actor (docs/training.md). Not possible with top_p, top_k or greedy decoding."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """The policy loss with bypass_mode: the one of policy_loss.loss_mode (ppo_clip), or -A log_prob
    with the weights of rollout_is (reinforce)."""

    @property
    def weighs(self) -> bool:
        """Whether the policy loss has weights. With `bypass_mode`, the ratio of ppo_clip is already
        that of actor and engine, so it has no weights beside it."""
        is_in_ratio = self.bypass_mode and self.loss_type == "ppo_clip"
        return self.rollout_is is not None and not is_in_ratio

    @property
    def corrects(self) -> bool:
        """Whether tokens have weights, or are left out of the loss."""
        return self.weighs or self.rollout_rs is not None

    @property
    def corrects_before_update(self) -> bool:
        """Whether this is computed once for a step, from old log-probs of the actor."""
        return self.corrects and not self.bypass_mode

    @property
    def corrects_in_update(self) -> bool:
        """Whether each update computes this from its own log-probs, because there are no others."""
        return self.corrects and self.bypass_mode


class FilterGroupsConfig(Section):
    """Dynamic sampling, as in DAPO: a group is the rollout.n responses to one prompt."""

    enable: bool = False
    """Replace groups whose responses all have the same metric, because their advantages are 0, by
    groups of further prompts, until a step has data.train_batch_size groups (docs/training.md)."""
    metric: str | None = None
    """What is compared: score, or a number that the reward function returns, such as acc. null,
    reward, seq_reward and seq_final_reward mean score."""
    max_num_gen_batches: int = 0
    """How many batches of data.gen_batch_size prompts are generated for a step at most. If a step
    then has too few groups, the run ends with an error. 0 or less: no limit; the run ends if a
    whole epoch of prompts has no group to learn from."""


class AlgorithmConfig(Section):
    adv_estimator: AdvEstimatorName = "gae"
    """How advantages are estimated: gae (which needs a critic), grpo, grpo_passk, rloo, opo, gpg,
    remax, reinforce_plus_plus, reinforce_plus_plus_baseline, or your own module:function
    (docs/extending.md). grpo_vectorized and rloo_vectorized mean grpo and rloo."""
    gamma: Ratio = 1.0
    """Discount factor per token."""
    lam: Ratio = 1.0
    """GAE's lambda."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference from the reward; needs the ref role."""
    kl_penalty: KlEstimator = "kl"
    """Estimator of the KL penalty in the reward."""
    kl_ctrl: KlCtrlConfig
    norm_adv_by_std_in_grpo: bool = True
    """Divide the advantages of grpo and grpo_passk by the group's standard deviation."""
    max_staleness: Annotated[int, Field(ge=0, le=MAX_STALENESS)] = 0
    """How many steps generation runs ahead of training (docs/asynchrony.md). The responses of step
    n are generated with the weights after step n - 1 - max_staleness, always; 0 is synchronous
    training. Saves time if the rollout has a pool of its own."""
    filter_groups: FilterGroupsConfig
    rollout_correction: RolloutCorrectionConfig


class TrainerConfig(Section):
    nnodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    """Number of nodes."""
    n_gpus_per_node: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_NODE)] = Field(default=None)  # type: ignore[assignment]
    """GPUs on every node, or CPU processes without GPUs. null uses all GPUs of this machine, or one
    process per CPU core (a power of two, at most 8)."""
    total_epochs: Count = 30
    """Passes over the training prompts."""
    total_training_steps: Count | None = None
    """Stop after N steps; null stops after total_epochs."""
    project_name: str = "rolepool"
    """Project name for loggers."""
    experiment_name: str = "default"
    """Name of the run."""
    logger: Items[Literal["console", "verl", "tensorboard", "wandb", "mlflow", "file"]] = (
        "console",
    )
    """Where metrics are logged, beside metrics.jsonl (also called file) and train.log: console
    prints a short line for each step, verl the long line of train.log."""
    save_freq: CountOrMinusOne | None = None
    """Save a checkpoint every N steps and after the last step; null saves only after the last step,
    -1 never saves."""
    test_freq: CountOrMinusOne | None = None
    """Validate every N steps and after the last step; null validates only after the last step, -1
    never validates."""
    val_before_train: bool = True
    """Validate before the first step if data.val_files is set."""
    val_only: bool = False
    """Validate and stop."""
    critic_warmup: CountOrZero = 0
    """Steps at the start that train only the critic."""
    snapshot_freq: CountOrMinusOne = 1
    """Copy the state of trained models to shared memory every N steps. If a process dies, training
    resumes from the last copy, or with -1 from the last checkpoint."""
    max_restarts: CountOrZero = 3
    """How often in a row, without a completed step in between, dead processes are replaced, or a
    driver that was killed or whose Ray died is started again, before the run ends with an error
    (docs/training.md)."""
    max_bad_steps: Count = 3
    """Stop the run with exit code 2 after N steps in a row in which a role made no finite
    update."""
    stall_timeout_s: Positive | None = None
    """Report a stall if one call takes so many seconds; null means 60, or five times the longest
    call of that method so far if that is more. The first call of a method has at least 600 s."""
    on_stall: Literal["report", "restart", "abort"] = "restart"
    """After a stall is reported: do nothing more (report), kill the processes that are stopped or
    do not answer (restart), or end the run (abort)."""
    balance_batch: bool = True
    """Assign about the same number of tokens to every rank."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Resume from the newest checkpoint of the run folder (auto), from resume_from_path
    (resume_path), or not at all (disable)."""
    resume_from_path: str | None = None
    """Checkpoint folder to resume from, with resume_mode=resume_path."""
    max_actor_ckpt_to_keep: Count | None = None
    """Newest actor checkpoints to keep; null keeps all."""
    max_critic_ckpt_to_keep: Count | None = None
    """Newest critic checkpoints to keep; null keeps all."""
    rollout_data_dir: str | None = None
    """Folder for all samples: N.jsonl has a line for each response of step N, with input, output,
    gts (the ground truth), score, step, and other numbers of the reward function. null writes
    none."""
    validation_data_dir: str | None = None
    """Folder for all samples of each validation, in the format of rollout_data_dir. null writes
    none."""
    log_val_generations: CountOrZero = 0
    """Log the first N samples of each validation as a table in wandb or mlflow."""
    default_local_dir: str = "runs/${trainer.experiment_name}"
    """The run folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Train on GPUs (cuda), on CPU processes (cpu), or on GPUs if there are any (auto)."""
    seed: CountOrZero = 1
    """Random seed for weights, shuffling and sampling."""
    deterministic: bool = False
    """Compute with deterministic kernels, so that the same run on the same machine gives the same
    numbers, bit for bit (docs/training.md). Slower on a GPU. An operation without such a kernel
    ends the run."""
    compile_cache_dir: str | None = "auto"
    """Where code that is compiled for a GPU is kept, so that later runs start faster
    (docs/performance.md). auto is rolepool/compiled in $XDG_CACHE_HOME or ~/.cache; null leaves it
    to torch and Triton."""
    extensions: Items[str] = ()
    """Modules (or .py files) to import before the config is checked and in every process
    (docs/extending.md)."""
    step: StepName | None = None
    """Your own step as module:function (docs/extending.md); null uses the step that
    algorithm.adv_estimator needs."""


class SplitConfig(Section):
    axis: Literal["auto", "gpu", "node"] = "auto"
    """Divide the GPUs of every node (gpu) or whole nodes (node); auto chooses gpu if each node has
    two GPUs or more."""
    actor_gpus_per_node: Count | None = None
    """GPUs per node for actor, rollout and reference; null uses half, rounded up."""
    actor_nodes: Count | None = None
    """Nodes for actor, rollout and reference; null uses half, rounded up."""
    share: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Put both pools on the same GPUs, each with this fraction of every GPU; null gives each pool
    its own GPUs."""


def _not_empty(per_node: tuple[int, ...]) -> tuple[int, ...]:
    if not any(per_node):
        raise ValueError("must hold at least one process")
    return per_node


NumProcesses = Annotated[int, Field(ge=0, le=MAX_GPUS_PER_NODE)]


class PoolConfig(Section):
    per_node: Annotated[
        tuple[NumProcesses, ...],
        Field(strict=False, max_length=MAX_NODES),
        AfterValidator(_not_empty),
    ]
    """Number of processes on each node, one GPU each; 0 skips a node."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of each GPU, including its memory, that the pool uses."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_plain_list(cls, value: object) -> object:
        if not isinstance(value, list | tuple | dict):
            raise ValueError("must be a list such as [2,2], or {per_node: [2,2], share: 0.5}")
        return value if isinstance(value, dict) else {"per_node": value}


PoolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", max_length=64)]


def _without_removed(pools: object) -> object:
    """The override `placement.pools.NAME=null` removes a pool that a file defines."""
    if not isinstance(pools, dict):
        return pools  # validation says what is wrong with it
    return {name: pool for name, pool in pools.items() if pool is not None}


class RolePoolsConfig(Section, extra="allow"):
    """The pool of each role. Added roles are here, too; the loader accepts only names of roles."""

    __pydantic_extra__: dict[str, str | None]

    actor_rollout: str | None = None
    """Pool of actor and rollout together."""
    actor: str | None = None
    """Pool of the actor alone."""
    rollout: str | None = None
    """Pool of the rollout alone."""
    ref: str | None = None
    """Pool of the reference."""
    critic: str | None = None
    """Pool of the critic."""
    reward_model: str | None = None
    """Pool of the reward model."""


class PlacementConfig(Section):
    strategy: StrategyName = "standard"
    """One pool for all roles (standard), actor_rollout_ref_pool and critic_pool (split),
    placement.pools and placement.roles (custom), the placement that is predicted to be the best
    (auto), or your own module:function (docs/extending.md)."""
    split: SplitConfig
    pools: Annotated[dict[PoolName, PoolConfig], BeforeValidator(_without_removed)] = Field(
        default_factory=dict
    )
    """Pools by name, for strategy=custom: [processes per node], or {per_node: [1], share: 0.5};
    null removes one."""
    roles: RolePoolsConfig
    timeout_s: Positive = 60.0
    """Seconds to wait for the resources of the plan."""
    on_node_loss: Literal["wait", "shrink"] = "wait"
    """If a node is lost: wait placement.timeout_s for another one (wait), or plan the pools again
    on the nodes that are left (shrink)."""
    mps: bool = False
    """Run CUDA MPS during the run on nodes where pools share GPUs."""
    profile: str | None = None
    """The run folder from which strategy=auto predicts. null uses the newest one with the same
    models beside the run's, or else the first steps of the run."""
    rebalance: bool = False
    """Look for a better placement during training, and move there if that pays."""
    rebalance_gain: NonNegative = 0.1
    """Least predicted gain for which the run moves, as a fraction of the step time."""

    @property
    def chooses(self) -> bool:
        """Whether the placement is chosen by prediction."""
        return self.strategy == "auto"


class RayInitConfig(Section):
    address: str | None = None
    """Address of a running Ray cluster; null starts a local one that stops with the run."""
    num_cpus: Count | None = None
    """CPUs of the local Ray; null uses one for each process of the plan plus one, and at least
    8."""


class RayKwargsConfig(Section):
    ray_init: RayInitConfig
