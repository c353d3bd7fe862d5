"""Which steps count as bad, what is said about them, and when a run has diverged."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolepool.config import load_config
from rolepool.errors import DivergedError
from rolepool.metrics.run_folder import RunFolder
from rolepool.trainer.bad_steps import BadSteps
from rolepool.trainer.checkpoint import Checkpoints

GOOD, PARTLY_SKIPPED, BAD = (4, 0), (1, 3), (0, 4)


def bad_steps(tmp_path: Path, *words: str) -> BadSteps:
    loaded = load_config([], list(words))
    return BadSteps(loaded, Checkpoints(loaded.config, RunFolder(tmp_path), ["actor", "critic"]))


def row(**counts: tuple[int, int]) -> dict[str, float]:
    """Metrics of a step in which these roles made and skipped so many updates."""
    made = {f"{role}/updates": made for role, (made, _) in counts.items()}
    return {**made, **{f"{role}/skipped_updates": skipped for role, (_, skipped) in counts.items()}}


def test_only_steps_in_a_row_without_any_update_of_a_role_count(tmp_path: Path) -> None:
    steps = bad_steps(tmp_path, "trainer.max_bad_steps=2")
    for number, actor in enumerate([BAD, GOOD, BAD, PARTLY_SKIPPED, BAD]):
        steps.add(number, row(actor=actor, critic=GOOD))
        assert steps.reason == ("actor made no finite update in it" if actor is BAD else None)
    with pytest.raises(
        DivergedError, match="actor made no finite update in the last 2 steps, up to step 6 "
    ):
        steps.add(6, row(actor=BAD, critic=GOOD))


def test_steps_in_which_the_actor_waits_for_the_critic_are_not_its_bad_steps(
    tmp_path: Path,
) -> None:
    steps = bad_steps(tmp_path)
    for number in range(1, 6):
        steps.add(number, row(critic=GOOD))
        assert steps.reason is None


def test_steps_without_a_token_are_neither_good_nor_bad(tmp_path: Path) -> None:
    steps = bad_steps(tmp_path, "trainer.max_bad_steps=2")
    for number in range(1, 6):
        steps.add(number, row(actor=(0, 0), critic=(0, 0)))
        assert steps.reason is None
    steps.add(6, row(actor=BAD, critic=GOOD))
    steps.add(7, row(actor=(0, 0), critic=(0, 0)))
    with pytest.raises(DivergedError, match="up to step 8 "):
        steps.add(8, row(actor=BAD, critic=GOOD))


def test_the_error_names_the_diverged_roles_and_their_keys(tmp_path: Path) -> None:
    steps = bad_steps(
        tmp_path,
        "trainer.max_bad_steps=1",
        "critic.optim.lr=7.0",
        "actor_rollout_ref.actor.grad_clip=9",
    )
    with pytest.raises(DivergedError) as raised:
        steps.add(3, row(actor=BAD, critic=BAD))
    (line,) = raised.value.problems
    assert line == (
        "actor and critic made no finite update in the last 1 steps, up to step 3 (trainer.max_bad_steps=1): training "
        "has diverged; lower actor_rollout_ref.actor.optim.lr=1e-06 or actor_rollout_ref.actor.grad_clip=9.0 or "
        "critic.optim.lr=7.0 or critic.grad_clip=1.0, or look for rewards that are too large; there is no checkpoint"
    )


def test_skipped_updates_are_one_warning_per_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = bad_steps(tmp_path)
    for number, (actor, critic) in enumerate([(GOOD, GOOD), (PARTLY_SKIPPED, GOOD), (BAD, BAD)]):
        steps.add(number, row(actor=actor, critic=critic))
    assert [record.getMessage() for record in caplog.records] == [
        "step 1: skipped 3 of 4 updates of actor because the gradients are not finite",
        "step 2: skipped 4 of 4 updates of actor and 4 of 4 updates of critic because the gradients are not finite",
    ]
