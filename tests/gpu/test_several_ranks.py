"""Several ranks on one GPU: however roles are placed and sharded, a training is the training of one
rank.

NCCL 2.30 and newer lets ranks share a GPU. scripts/test_gpu.sh preloads one if it is named.
Trainings are compared that learn from the same responses. Which responses each of them samples
itself is compared, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from trainings import DEVICE, Outcome, Training

from rolepool.protocol.columns import lengths_of

pytestmark = pytest.mark.gpu

NUM_STEPS = 3
SMALL = f"""
data.train_batch_size=16 data.max_prompt_length=8 data.max_response_length=4
actor_rollout_ref.actor.ppo_mini_batch_size=8 critic.ppo_mini_batch_size=8 critic.ppo_epochs=1
actor_rollout_ref.actor.optim.lr=1e-4 critic.optim.lr=1e-4 actor_rollout_ref.actor.use_kl_loss=true
actor_rollout_ref.actor.entropy_coeff=0.001 algorithm.use_kl_in_reward=true
actor_rollout_ref.rollout.n=2 trainer.total_training_steps={NUM_STEPS}
"""
TWO = "trainer.n_gpus_per_node=2"
FOUR = "trainer.n_gpus_per_node=4"
APART = "trainer.n_gpus_per_node=3 placement.strategy=custom placement.pools={most:[2],one:[1]}"
SCORED = "reward_model.enable=true"
TOOLS = SMALL.replace("max_response_length=4", "max_response_length=8")


def replaying(keys: str, ranks: int, replays: str = "one_rank", **more: Any) -> Training:
    return Training(f"{SMALL} {keys}", ranks=ranks, replays=replays, **more)


TRAININGS = {
    "one_rank": Training(f"{SMALL} trainer.n_gpus_per_node=1"),
    "fsdp_2": replaying(TWO, 2),
    "fsdp_2_compiled": replaying(TWO, 2, compiles=True),
    "fsdp_4": replaying(FOUR, 4),
    "hsdp_2x2": replaying(
        f"{FOUR} actor_rollout_ref.actor.fsdp_config.fsdp_size=2 "
        "critic.model.fsdp_config.fsdp_size=2",
        4,
    ),
    "two_pools_of_2": replaying(f"{FOUR} placement.strategy=split", 4),
    "tensor_parallel_2": replaying(
        f"{TWO} actor_rollout_ref.rollout.tensor_model_parallel_size=2", 2
    ),
    "rollout_apart": replaying(
        f"{APART} placement.roles={{actor:most,critic:most,ref:most,rollout:one}}", 3
    ),
    "rollout_apart_tensor_parallel": replaying(
        f"{FOUR} placement.strategy=custom placement.pools={{most:[2],two:[2]}} "
        "placement.roles={actor:most,critic:most,ref:most,rollout:two} "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
        "actor_rollout_ref.rollout.weights=delta",
        4,
    ),
    "scored_one_rank": Training(f"{SMALL} {SCORED} trainer.n_gpus_per_node=1"),
    "scored_apart": replaying(
        f"{SCORED} {APART} placement.roles="
        "{actor:most,critic:most,ref:most,rollout:most,reward_model:one}",
        3,
        replays="scored_one_rank",
    ),
    "tools_one_rank": Training(f"{TOOLS} trainer.n_gpus_per_node=1", recipe="demo_tools"),
    "tools_fsdp_2": Training(
        f"{TOOLS} {TWO}", recipe="demo_tools", ranks=2, replays="tools_one_rank"
    ),
}
POOLS = {
    "fsdp_2": [2],
    "fsdp_2_compiled": [2],
    "fsdp_4": [4],
    "hsdp_2x2": [4],
    "two_pools_of_2": [2, 2],
    "tensor_parallel_2": [2],
    "rollout_apart": [2, 1],
    "rollout_apart_tensor_parallel": [2, 2],
    "scored_apart": [2, 1],
    "tools_fsdp_2": [2],
}
"""The processes of each pool."""

COMPARED = (
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/values/mean",
    "response_length/mean",
)
RELATIVE, ABSOLUTE = (0.03, 0.003) if DEVICE == "cuda" else (1e-6, 1e-9)
"""How far metrics may be apart.

A GPU computes in 16 bits, in which each number has an error of up to 0.4%. Ranks multiply matrices
of other shapes, so other kernels add up the products. The noise of a mean over all tokens is much
smaller: with all weights in bfloat16, 2 and 4 ranks on a CPU differed from one rank by at most 0.4%
in gradient norms, and by 0.0007 in losses, which can be near zero. A rank whose rows are lost, or
gradients that are averaged instead of added, change gradient norms by a third or more. On a CPU the
tests compute in float64.
"""
MOST_OTHER_ROWS = 0.1 if DEVICE == "cuda" else 0.0
"""The part of the responses that may be sampled differently. The same 16 bits change the
probability of a token by less than 1%, and a response has four tokens or a few more. In bfloat16 on
a CPU it was 1 of 96."""

Trained = Callable[[str], Outcome]


def marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.trains(name, TRAININGS[name].replays))


@pytest.mark.trains("one_rank")
def test_the_training_that_others_are_compared_with_learns(trained: Trained) -> None:
    outcome = trained("one_rank")
    rows = list(outcome.metrics.values())
    assert len(rows) == NUM_STEPS
    spans = [recorded.span for recorded in outcome.run.spans if recorded.span.role in ROLES]
    assert {span.device.partition(":")[0] for span in spans} == {DEVICE}
    for row in rows:
        assert row["actor/updates"] == 2
        assert row["actor/grad_norm"] > 0.1
    assert rows[-1]["critic/vf_loss"] < 0.9 * rows[0]["critic/vf_loss"]


@pytest.mark.parametrize("name", [marked(name) for name in POOLS])
def test_losses_and_rewards_are_those_of_one_rank(name: str, trained: Trained) -> None:
    replayed = TRAININGS[name].replays
    assert replayed is not None
    one_rank, several = trained(replayed), trained(name)
    assert sizes_of_pools(several) == Counter(POOLS[name])
    problems = differences(one_rank, several)
    print(f"{name}: largest differences {worst_of(one_rank, several)}")
    assert not problems, "\n".join(problems)


@pytest.mark.trains("tools_one_rank")
def test_the_tool_of_the_comparison_is_called(trained: Trained) -> None:
    rows = trained("tools_one_rank").metrics.values()
    assert max(row["num_tool_calls/max"] for row in rows) >= 1
    assert all(row["num_tool_errors/max"] == 0 for row in rows)


@pytest.mark.parametrize("name", [marked(name) for name in POOLS])
def test_responses_are_those_of_one_rank(name: str, trained: Trained) -> None:
    replayed = TRAININGS[name].replays
    assert replayed is not None
    one_rank, several = trained(replayed), trained(name)
    num_rows = num_other = 0
    for step in range(1, NUM_STEPS + 1):
        expected = sequences_of(one_rank.rollouts(step))
        assert sequences_of(several.rollouts(step)) == expected, "it learns from others"
        own = sequences_of(several.rollouts(step, "own"))
        num_rows += len(own)
        num_other += sum(one != other for one, other in zip(own, expected, strict=True))
    print(f"{name}: {num_other} of {num_rows} responses differ from those of one rank")
    assert num_other <= MOST_OTHER_ROWS * num_rows


def sizes_of_pools(outcome: Outcome) -> Counter[int]:
    """The processes that have worked in each pool."""
    ranks: dict[str, set[int]] = {}
    for recorded in outcome.run.spans:
        if recorded.span.device.startswith(DEVICE) and recorded.span.role in ROLES:
            ranks.setdefault(recorded.span.pool, set()).add(recorded.span.rank)
    return Counter(map(len, ranks.values()))


ROLES = ("actor", "critic", "ref", "rollout", "reward_model")


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """One line for each metric that is not the same."""
    lines = []
    assert [*found.metrics] == [*expected.metrics] == [*range(1, NUM_STEPS + 1)]
    for step, row in expected.metrics.items():
        for name in COMPARED:
            right, value = row[name], found.metrics[step][name]
            if abs(value - right) > ABSOLUTE + RELATIVE * abs(right):
                lines.append(f"step {step} {name}: {value} is not {right}")
    return lines


def worst_of(expected: Outcome, found: Outcome) -> str:
    """For each metric its largest difference, for a look at the tolerances."""
    worst = {
        name: max(
            abs(found.metrics[step][name] - row[name]) for step, row in expected.metrics.items()
        )
        for name in COMPARED
    }
    return ", ".join(f"{name} {difference:.1e}" for name, difference in worst.items())


def sequences_of(rollouts: Any) -> list[list[int]]:
    """Prompt and response of each row, as tokens."""
    column = rollouts.batch["input_ids"]
    lengths = lengths_of(column).tolist()
    return [row.tolist() for row in torch.split(column.values(), lengths)]
