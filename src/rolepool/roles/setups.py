"""What each role is told when it is built, in addition to the config.

A run knows all of it (`RunSetup`). The `setup_type` of a role's class has what that role reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from rolepool.algorithm.losses import Loss
from rolepool.algorithm.policy_losses import compute_policy_loss_vanilla
from rolepool.placement.estimate import MicroBatch

PolicyLoss = Callable[..., Loss]
RewardFunction = Callable[..., Any]
"""A user's function. `rolepool.data.reward_functions` finds out what it takes and returns."""


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """What a run knows when it builds its roles."""

    num_training_steps: int
    dtype: torch.dtype
    micro_batches: Mapping[str, MicroBatch]
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    policy_loss: PolicyLoss
    reward: RewardFunction | None
    reads_weights: bool
    gets_weights: bool


class PartOfRunSetup:
    """Fields of `RunSetup`, under the same names."""

    @classmethod
    def of(cls, run: RunSetup) -> Self:
        """The fields of this class, from what the run knows."""
        values: dict[str, Any] = {}
        for field in fields(cls):  # type: ignore[arg-type]
            values[field.name] = getattr(run, field.name)
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Setup(PartOfRunSetup):
    """What every role with a model is told."""

    dtype: torch.dtype = torch.float32
    micro_batches: Mapping[str, MicroBatch] | None = None
    """The plan's micro-batches, by the name of the operation; None uses those that the keys set."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup(Setup):
    """What a role is told whose model is trained."""

    num_training_steps: int = 0
    reads_weights: bool = True
    """Whether the role reads its weights from the files of the model. If not, a saved state is
    loaded before its first call."""


@dataclass(frozen=True, kw_only=True)
class ActorSetup(TrainingSetup):
    policy_loss: PolicyLoss = compute_policy_loss_vanilla


@dataclass(frozen=True, kw_only=True)
class RolloutSetup(Setup):
    stop_token_ids: tuple[int, ...] = ()
    gets_weights: bool = False
    """Whether the actor's weights arrive before the first call, as in every run. Then the weights
    are not read from the files of the model, too."""


@dataclass(frozen=True, kw_only=True)
class RewardModelSetup(Setup):
    pad_token_id: int = 0
    """The pad token of the policy."""


@dataclass(frozen=True, kw_only=True)
class RuleRewardSetup(PartOfRunSetup):
    """What the role is told that scores texts with a Python function. It has no model."""

    reward: RewardFunction | None = None
    """The reward function that a Python program has given; None uses the one that the config
    names."""
