"""Keys of the run: data, algorithm, trainer, placement, Ray."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict, StringConstraints, field_validator, model_validator

from rolepool.config.base import (
    Count,
    CountOrMinusOne,
    CountOrZero,
    Fraction,
    NonNegative,
    Paths,
    Positive,
    Ratio,
    Section,
    as_list,
)
from rolepool.config.model_keys import KlEstimator

MAX_NODES = 65_536
MAX_GPUS_PER_NODE = 1_024
MAX_SLOTS = 2**20


class Data(Section):
    train_files: Paths = ()
    """Parquet or JSONL files with training prompts."""
    val_files: Paths = ()
    """Parquet or JSONL files with validation prompts."""
    train_batch_size: Count = 1024
    """Prompts in one training step, over all ranks."""
    val_batch_size: Count | None = None
    """Prompts generated at once in validation; null: all."""
    max_prompt_length: Count = 512
    """Longest prompt in tokens."""
    max_response_length: Count = 512
    """Longest response in tokens."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt over max_prompt_length."""
    filter_overlong_prompts: bool = False
    """Leave prompts over max_prompt_length out."""
    shuffle: bool = True
    """Shuffle the training prompts in each epoch."""
    seed: CountOrZero | None = None
    """Seed of the shuffling; null: trainer.seed."""
    prompt_key: str = "prompt"
    """Column that holds the prompt."""
    train_max_samples: CountOrMinusOne = -1
    """Use the first so many training rows; -1 all."""
    val_max_samples: CountOrMinusOne = -1
    """Use the first so many validation rows; -1 all."""


class CustomRewardFunction(Section):
    path: str | None = None
    """Python file with the reward function; null: the built-in rule for the row's data_source."""
    name: str = "compute_score"
    """Name of the function in that file."""


class KlCtrl(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the coefficient, or steer it towards target_kl."""
    kl_coef: NonNegative = 0.001
    """(First) coefficient of the KL penalty in the reward."""
    horizon: Count = 10_000
    """How slowly the adaptive controller reacts, in sequences."""
    target_kl: Positive = 0.1
    """KL the adaptive controller steers towards."""


class Algorithm(Section):
    adv_estimator: Literal["gae", "grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = (
        "gae"
    )
    """How advantages are estimated. Only gae needs a critic."""
    gamma: Ratio = 1.0
    """Discount per token."""
    lam: Ratio = 1.0
    """GAE's lambda."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty against the reference from the reward. Needs the ref role."""
    kl_penalty: KlEstimator = "kl"
    """Estimator of the KL penalty in the reward."""
    kl_ctrl: KlCtrl
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation."""


class Trainer(Section):
    nnodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    """Number of nodes."""
    n_gpus_per_node: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_NODE)] = 8
    """GPUs used on every node; without GPUs the number of CPU slots, one process each."""
    total_epochs: Count = 30
    """Passes over the training prompts."""
    total_training_steps: Count | None = None
    """Stop after so many steps; null: after total_epochs."""
    project_name: str = "rolepool"
    """Project that loggers file the run under."""
    experiment_name: str = "default"
    """Name of the run."""
    logger: Annotated[
        tuple[Literal["console", "tensorboard", "wandb", "mlflow"], ...], Strict(False), BeforeValidator(as_list)
    ] = ("console",)
    """Where metrics go, beside metrics.jsonl in the run folder."""
    save_freq: CountOrMinusOne = -1
    """Save a checkpoint every so many steps; -1 never."""
    test_freq: CountOrMinusOne = -1
    """Validate every so many steps; -1 never."""
    val_before_train: bool = True
    """Validate before the first step, where data.val_files is given."""
    val_only: bool = False
    """Validate and stop."""
    critic_warmup: CountOrZero = 0
    """Steps in which only the critic trains, at the start."""
    max_bad_steps: Count = 3
    """End the run, with exit code 2, after so many steps in a row in which a role made no finite update."""
    balance_batch: bool = True
    """Give every rank about the same number of tokens."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Go on from the newest checkpoint of the run folder, from none, or from resume_from_path."""
    resume_from_path: str | None = None
    """Checkpoint folder to go on from, with resume_mode=resume_path."""
    max_actor_ckpt_to_keep: Count | None = None
    """Newest actor checkpoints to keep; null all."""
    max_critic_ckpt_to_keep: Count | None = None
    """Newest critic checkpoints to keep; null all."""
    default_local_dir: str = "runs/${trainer.experiment_name}"
    """The run folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Run on GPUs, on CPU slots, or on GPUs where there are any."""
    seed: CountOrZero = 1
    """Seed of everything that is random: weights, shuffling, sampling."""


class Split(Section):
    axis: Literal["auto", "gpu", "node"] = "auto"
    """Divide the GPUs of every node, or whole nodes; auto: inside nodes when each has two GPUs or more."""
    actor_gpus_per_node: Count | None = None
    """GPUs of every node for actor, rollout and reference; null: half, rounded up."""
    actor_nodes: Count | None = None
    """Nodes for actor, rollout and reference; null: half, rounded up."""
    share: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Put both pools on the same GPUs, each with this fraction of every GPU; null: GPUs of their own."""


class Pool(Section):
    per_node: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_GPUS_PER_NODE)], ...],
        Strict(False),
        Field(max_length=MAX_NODES),
    ]
    """Processes per node, one GPU each; 0 skips a node."""
    share: Fraction = 1.0
    """Fraction of each GPU that the pool takes, memory included."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_plain_list(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple | dict):
            raise ValueError("must be a list such as [2,2], or {per_node: [2,2], share: 0.5}")
        return value if isinstance(value, dict) else {"per_node": value}

    @field_validator("per_node")
    @classmethod
    def _hold_at_least_one_process(cls, per_node: tuple[int, ...]) -> tuple[int, ...]:
        if not any(per_node):
            raise ValueError("must hold at least one process")
        return per_node


PoolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", max_length=64)]


def _without_removed(pools: Any) -> Any:
    """An override `placement.pools.NAME=null` takes a pool of a file away."""
    return {name: pool for name, pool in pools.items() if pool is not None} if isinstance(pools, dict) else pools


class RolePools(Section):
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


class Placement(Section):
    strategy: Literal["standard", "split", "custom"] = "standard"
    """One pool for all roles; two pools (actor_rollout_ref_pool and critic_pool); or pools and roles written out."""
    split: Split
    pools: Annotated[dict[PoolName, Pool], BeforeValidator(_without_removed)] = Field(default_factory=dict)
    """With strategy=custom, pools by name: [processes per node], or {per_node: [1], share: 0.5}; null removes one."""
    roles: RolePools
    timeout_s: Positive = 60.0
    """Seconds to wait for the cluster to give what the plan needs."""
    mps: bool = False
    """Run CUDA MPS on nodes where pools share GPUs, from start to end of the run."""


class RayInit(Section):
    address: str | None = None
    """Address of a running Ray cluster to join; null starts a local one that ends with the run."""
    num_cpus: Count | None = None
    """CPUs the local Ray may use; null: one for each process of the plan, and one more."""


class RayKwargs(Section):
    ray_init: RayInit
