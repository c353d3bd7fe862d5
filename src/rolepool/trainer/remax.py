"""A ReMax step: a PPO step without a critic, whose baseline is the score of the greedy response to each prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolepool.config import Config
from rolepool.trainer.step import Roles, StepCalls, learn

if TYPE_CHECKING:
    from rolepool.protocol import DataProto
    from rolepool.trainer.advantages import Estimator


def remax_step(config: Config, roles: Roles, estimator: Estimator, prompts: DataProto, number: int) -> StepCalls:
    """Generate, also greedily, score both, then continue like a PPO step."""
    rollouts = roles.rollout.generate_sequences(prompts)
    scores = roles.reward.compute_scores(rollouts.union(prompts))
    once = prompts[:: config.actor_rollout_ref.rollout.n]  # the samples of a prompt are next to each other
    greedy = roles.rollout.generate_sequences(once, purpose="baseline")
    baselines = roles.reward.compute_scores(greedy.union(once))
    calls = {"baseline": [greedy, baselines]}
    return learn(config, roles, estimator, prompts, number, rollouts, scores, baselines, calls)
