"""The schedule: what a step on paper says about its calls, and what overlaps under a placement."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolepool.config import load_config
from rolepool.placement import build_plan
from rolepool.placement.plan import Schedule
from rolepool.placement.roles import OPERATIONS, ROLE_SPECS
from rolepool.planning import Hardware, summarise
from rolepool.trainer.paper import schedule_of
from rolepool.trainer.step import Step, generate, learn_from

WITH_REFERENCE = "actor_rollout_ref.actor.use_kl_loss=true"
WITH_REWARD_MODEL = "reward_model.enable=true reward_model.model.path=some/model"
WITH_KL_IN_REWARD = "algorithm.use_kl_in_reward=true"
SPLIT = "placement.strategy=split"


def scheduled(words: str = "") -> Schedule:
    return schedule_of(load_config([], words.split()).config)


def overlaps(words: str = "") -> list[tuple[str, str]]:
    config = load_config([], ["trainer.n_gpus_per_node=8", *words.split()]).config
    return schedule_of(config).overlaps(build_plan(config).roles)


# The graph


def test_the_operations_of_a_step_come_in_the_order_of_the_table() -> None:
    """Legends and stacks are in the order of OPERATIONS."""
    for words in (f"{WITH_REFERENCE} {WITH_REWARD_MODEL}", "algorithm.adv_estimator=remax"):
        made = list(dict.fromkeys(call.operation for call in scheduled(words).calls))
        if (
            "baseline" in made
        ):  # greedy responses are generated while the others are scored, and shown beside them
            made.insert(1, made.pop(made.index("baseline")))
        assert made.pop() == "next_gen"
        in_table = [name for name in OPERATIONS if name in made]
        assert made == in_table


def test_every_operation_belongs_to_the_role_that_the_table_says() -> None:
    role_of = {
        operation.name: role for role, spec in ROLE_SPECS.items() for operation in spec.operations
    }
    for call in scheduled(f"{WITH_REFERENCE} {WITH_REWARD_MODEL}").calls:
        if call.roles:
            assert role_of[call.operation.removeprefix("next_")] in call.roles


@pytest.mark.parametrize(
    ("words", "one", "other", "independent"),
    [
        ("", "reward", "values", True),
        ("", "gen", "reward", False),
        ("", "update_critic", "old_log_prob", True),
        (WITH_KL_IN_REWARD, "update_critic", "old_log_prob", False),
        (WITH_KL_IN_REWARD, "update_critic", "ref", False),
        (WITH_REFERENCE, "update_actor", "ref", False),
        ("", "update_critic", "update_actor", True),
        ("", "update_weights", "next_gen", False),
        ("", "update_critic", "next_gen", True),
        ("", "values", "update_critic", False),
        ("algorithm.adv_estimator=remax", "baseline", "old_log_prob", True),
        ("algorithm.adv_estimator=remax", "baseline", "update_actor", False),
    ],
)
def test_operations_are_independent_if_neither_needs_the_other(
    words: str, one: str, other: str, independent: bool
) -> None:
    found = [{first.operation, second.operation} for first, second in scheduled(words).independent]
    assert ({one, other} in found) == independent


def test_every_epoch_is_a_call_and_warm_up_steps_are_not_the_ones_looked_at() -> None:
    words = "critic.ppo_epochs=3 actor_rollout_ref.actor.ppo_epochs=2 trainer.critic_warmup=5"
    operations = [call.operation for call in scheduled(words).calls]
    assert (operations.count("update_critic"), operations.count("update_actor")) == (3, 2)


def test_a_schedule_of_many_epochs_is_not_larger() -> None:
    many, few = (
        scheduled(f"actor_rollout_ref.actor.ppo_epochs={epochs}") for epochs in (100_000, 3)
    )
    assert many == few


SECOND_PHASES: list[int] = []
"""The number of each step whose second phase was made, which `counted_step` adds."""


def counted_learn(config: Any, roles: Any, estimator: Any, generated: Any) -> Any:
    SECOND_PHASES.append(generated.number)
    return learn_from(config, roles, estimator, generated)


counted_step: Step[Any] = Step(generate, counted_learn)


def one_function(*arguments: Any) -> Any:
    return counted_step(*arguments)


def test_of_the_next_step_only_the_beginning_is_made() -> None:
    for name, numbers in {"counted_step": [1], "one_function": [1, 2]}.items():
        SECOND_PHASES.clear()
        assert scheduled(f"trainer.step={__name__}:{name}") == scheduled()
        assert numbers == SECOND_PHASES


# Under a placement


def test_in_one_pool_only_a_rule_reward_overlaps() -> None:
    assert overlaps() == [("reward", "values"), ("reward", "old_log_prob")]
    assert overlaps(f"{WITH_REWARD_MODEL} {WITH_REFERENCE}") == []


UPDATES = [
    ("update_critic", "update_actor"),
    ("update_critic", "update_weights"),
    ("update_critic", "next_gen"),
]


def test_in_two_pools_the_critic_works_beside_the_actor() -> None:
    assert overlaps(SPLIT) == [
        ("reward", "values"),
        ("reward", "old_log_prob"),
        ("values", "old_log_prob"),
        ("old_log_prob", "update_critic"),
        *UPDATES,
    ]
    assert overlaps(f"{SPLIT} {WITH_REFERENCE} {WITH_REWARD_MODEL}") == [
        ("reward", "old_log_prob"),
        ("reward", "ref"),
        ("values", "old_log_prob"),
        ("values", "ref"),
        ("old_log_prob", "update_critic"),
        ("ref", "update_critic"),
        *UPDATES,
    ]


def test_if_the_reward_needs_log_probs_the_critics_update_does_too() -> None:
    assert [
        pair for pair in overlaps(f"{SPLIT} {WITH_KL_IN_REWARD}") if "update_critic" in pair
    ] == UPDATES


def test_with_the_rollout_alone_the_critic_updates_beside_the_next_generation() -> None:
    pools = "placement.pools.train=[2] placement.pools.gen=[2] trainer.n_gpus_per_node=4"
    roles = " ".join(f"placement.roles.{role}=train" for role in ("actor", "critic", "ref"))
    words = f"placement.strategy=custom {pools} {roles} placement.roles.rollout=gen placement.roles.reward_model=gen"
    assert overlaps(f"{words} {WITH_REWARD_MODEL}") == [
        ("reward", "values"),
        ("reward", "old_log_prob"),
        ("update_critic", "next_gen"),
    ]


STALE = "algorithm.max_staleness=1"
ALONE = """
placement.strategy=custom trainer.n_gpus_per_node=4 placement.pools.train=[2] placement.pools.gen=[2]
placement.roles.actor=train placement.roles.critic=train placement.roles.rollout=gen
"""


def with_generation(pairs: list[tuple[str, str]]) -> list[str]:
    """The operations that overlap with a generation."""
    found = {
        first if second == "gen" else second for first, second in pairs if "gen" in (first, second)
    }
    return sorted(found)


def test_with_staleness_a_rollout_in_its_own_pool_generates_beside_training() -> None:
    assert with_generation(overlaps(ALONE)) == []
    trained = ["old_log_prob", "update_actor", "update_critic", "values"]
    assert with_generation(overlaps(f"{ALONE} {STALE}")) == trained
    assert with_generation(overlaps(f"{ALONE} algorithm.max_staleness=2")) == trained
    assert ("update_weights", "next_gen") not in overlaps(f"{ALONE} {STALE}")


def test_with_staleness_in_one_pool_generation_overlaps_with_nothing() -> None:
    assert with_generation(overlaps(STALE)) == []
    assert with_generation(overlaps(f"{SPLIT} {STALE}")) == ["update_critic", "values"]


@pytest.mark.parametrize("k", [1, 2, 16])
def test_with_staleness_a_step_has_the_same_calls_and_learns_from_earlier_generations(
    k: int,
) -> None:
    words = f"{WITH_REFERENCE} trainer.critic_warmup=2"
    calls = scheduled(f"{words} algorithm.max_staleness={k}").calls
    assert [call.operation for call in calls] == [call.operation for call in scheduled(words).calls]
    num_calls = len(calls) - 1
    of_step = {call.operation: call for call in calls}
    generation = -k * num_calls  # the position of the first call of the step k steps earlier
    assert generation in of_step["values"].after
    assert min(min(call.after, default=0) for call in calls) == generation
    assert num_calls - 1 in of_step["next_gen"].after, "the weights of this step"


def test_the_plan_says_what_staleness_does() -> None:
    def said(words: str) -> str:
        loaded = load_config([], ["trainer.n_gpus_per_node=4", *words.split()])
        return summarise(loaded, Hardware((4,), None)).settings.get("staleness", "")

    assert said("") == ""
    assert said(f"{ALONE} algorithm.max_staleness=2") == "generation runs 2 steps ahead of training"
    assert said(STALE) == (
        "generation runs 1 step ahead of training; it does not run beside the actor's updates, "
        "because both are in global_pool"
    )


def test_the_greedy_baseline_of_remax_appears_by_itself() -> None:
    pools = "placement.pools.train=[1] placement.pools.gen=[1] trainer.n_gpus_per_node=2 placement.strategy=custom"
    found = overlaps(
        f"algorithm.adv_estimator=remax {pools} placement.roles.actor=train placement.roles.rollout=gen"
    )
    assert ("baseline", "old_log_prob") in found


# The step's code

MYPY_SNIPPET = """
from rolepool.protocol import DataProto
from rolepool.trainer.step import Roles


def step(roles: Roles, prompts: DataProto) -> None:
    rollouts = roles.rollout.generate_sequences(prompts)
"""
CALLS = {
    "roles.reward.compute_scores(rollouts.union(prompts))": None,
    "roles.reward.compute_score(rollouts)": 'has no attribute "compute_score"',
    "roles.actor.update_actor()": 'Missing positional argument "data"',
    "roles.actor.compute_log_prob(rollouts, 1)": "Too many arguments",
    "roles.critic.compute_values(rollouts)": 'of "CriticCalls | None" has no attribute',
    'roles.rollout.generate_sequences(prompts, purpose="trian")': "incompatible type",
}


def test_a_misspelt_method_or_a_missing_argument_is_an_error_of_mypy(
    tmp_path: Path, root: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    file, begin = tmp_path / "snippet.py", MYPY_SNIPPET.count("\n") + 1
    file.write_text(MYPY_SNIPPET + "".join(f"    {call}\n" for call in CALLS), encoding="utf-8")
    options = [
        "--config-file",
        str(root / "pyproject.toml"),
        "--cache-dir",
        str(root / ".mypy_cache"),
    ]
    said = python("-m", "mypy", *options, str(file)).stdout.splitlines()
    for line, (call, error) in enumerate(CALLS.items(), start=begin):
        found = [text for text in said if f"snippet.py:{line}: error" in text]
        assert len(found) == (error is not None), (call, said)
        assert error is None or error in found[0]


def test_the_step_and_its_schedule_import_neither_torch_nor_ray(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = "import sys, rolepool.trainer.paper; print([name for name in ('torch', 'ray') if name in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"
