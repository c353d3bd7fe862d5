"""`bypass_mode`: which configs it allows, what a plan and a prediction say, and which columns are
sent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from synthetic_runs import GPU_SECONDS, write_run

from commands import Outcome
from rolepool.config import load_config
from rolepool.errors import ConfigError
from rolepool.models.parity import Apart, logit_error
from rolepool.placement import Role
from rolepool.placement.estimate import default_micro_batches
from rolepool.protocol.worker import keys_read_by
from rolepool.roles.actor_critic import Actor
from rolepool.roles.setups import ActorSetup
from rolepool.trainer.paper import schedule_of

Rolepool = Callable[..., Outcome]
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
ROLLOUT = "actor_rollout_ref.rollout"


def operations(*words: str) -> list[str]:
    return [call.operation for call in schedule_of(load_config([], words).config).calls]


# Configs


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=5", "do_sample=false"])
def test_tokens_must_be_chosen_with_the_probabilities_that_the_actor_computes(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [BYPASS, f"{ROLLOUT}.{setting}"])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{BYPASS}: contradicts {ROLLOUT}.{setting}: ")
    assert line.endswith("remove bypass_mode, or the keys that change how tokens are chosen")


def test_a_temperature_and_decoding_of_a_validation_are_allowed() -> None:
    load_config([], [BYPASS, f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.val_kwargs.top_p=0.9"])


def test_verls_older_name_means_the_same() -> None:
    word = "algorithm.rollout_correction.bypass_old_logprob_for_rollout=true"
    assert load_config([], [word]).config.bypasses_old_log_prob


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("actor_rollout_ref.actor.use_rollout_log_probs=true", f"set {BYPASS}"),
        ("algorithm.rollout_correction.loss_type=reinforce", f"set {BYPASS}"),
    ],
)
def test_other_keys_of_verl_say_what_to_write(setting: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [setting])
    assert fix in str(caught.value)
    load_config([], [BYPASS, "algorithm.rollout_correction.loss_type=ppo_clip"])


# Plans and predictions


@pytest.mark.parametrize("estimator", ["gae", "grpo", "remax"])
def test_the_step_has_every_operation_except_old_log_prob(estimator: str) -> None:
    words = [f"algorithm.adv_estimator={estimator}", "algorithm.use_kl_in_reward=true"]
    words.append(f"{ROLLOUT}.n=2")
    computed = operations(*words)
    assert "old_log_prob" in computed
    computed.remove("old_log_prob")
    assert operations(*words, BYPASS) == computed


def test_the_plan_says_it_and_has_no_micro_batches_of_it(rolepool: Rolepool) -> None:
    out = rolepool("plan", BYPASS).out
    line = "old log-probs: those of the rollout engine; there is no old_log_prob"
    assert line in " ".join(out.split())
    document = json.loads(rolepool("plan", "--json", BYPASS).out)
    assert "old_log_prob" not in document["memory"]["micro_batches"]
    assert not any("old_log_prob" in pair for pair in document["overlaps"])
    assert "old log-probs" not in rolepool("plan").out


def test_a_step_of_the_user_may_still_compute_them() -> None:
    keys = [BYPASS, "trainer.step=rolepool.trainer.step:ppo_step"]
    assert "old_log_prob" in default_micro_batches(load_config([], keys).config, Role.Actor)
    keys.pop()
    assert "old_log_prob" not in default_micro_batches(load_config([], keys).config, Role.Actor)


def test_a_prediction_leaves_out_its_time(rolepool: Rolepool, tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "standard", "standard"))

    def step_s(*words: str) -> float:
        done = rolepool("predict", run, *words, "--", "standard")
        assert done.code == 0, done.err
        (seconds,) = re.findall(r"^standard +([\d.]+) s ", done.out, re.MULTILINE)
        return float(seconds)

    saved_s = step_s() - step_s("--set", BYPASS)
    assert saved_s == pytest.approx(GPU_SECONDS["old_log_prob"] / 4, rel=0.1), "on each of 4 GPUs"


# What is sent and compared


@pytest.mark.parametrize("check", [False, True])
def test_an_update_reads_the_version_only_to_compare_log_probs(check: bool) -> None:
    words = [BYPASS, f"{ROLLOUT}.parity_check={str(check).lower()}"]
    keys = keys_read_by(Actor, (load_config([], words).config, ActorSetup()), {})["update_actor"]
    assert keys is not None and "old_log_probs" in keys
    assert ("weights_version" in keys) == check
    without = load_config([], words[1:]).config
    assert "weights_version" not in (
        keys_read_by(Actor, (without, ActorSetup()), {})["update_actor"] or ()
    )


def test_the_difference_of_micro_batches_is_that_of_all_their_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = -torch.rand(6, 8, generator=generator)
    theirs = ours + 0.1 * torch.randn(6, 8, generator=generator)
    mask = torch.rand(6, 8, generator=generator) < 0.7
    theirs[~mask] = torch.nan  # nobody sampled it
    apart = Apart()
    for rows in (slice(0, 2), slice(2, 6)):
        apart.add(theirs[rows], ours[rows], mask[rows])
    difference = apart.read()
    assert difference.num_tokens == int(mask.sum())
    expected = logit_error(theirs[mask], ours[mask], temperature=0.7)
    assert difference.logit_error(0.7) == pytest.approx(expected) and expected > 0
    assert apart.read().num_tokens == 0, "the next step begins with nothing"
