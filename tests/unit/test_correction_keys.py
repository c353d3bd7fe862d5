"""The keys of `algorithm.rollout_correction`: what they accept, what a plan says, what is sent, and
what the driver makes of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import Outcome
from rolepool.config import LoadedConfig, load_config
from rolepool.config.functions import POLICY_LOSSES, policy_losses
from rolepool.config.rollout_correction import PRESETS
from rolepool.errors import ConfigError
from rolepool.protocol import DataProto, pad_ragged, unpad
from rolepool.protocol.worker import keys_read_by
from rolepool.roles.actor_critic import Actor, Critic
from rolepool.roles.setups import ActorSetup, TrainingSetup
from rolepool.roles.trained_role import count_losses
from rolepool.trainer.advantages import Estimated, Estimator, describe
from rolepool.trainer.paper import schedule_of

Rolepool = Callable[..., Outcome]
KEY = "algorithm.rollout_correction"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=true"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


def load(*words: str) -> LoadedConfig:
    return load_config(
        [], [f"{KEY}.{word}" if "." not in word.partition("=")[0] else word for word in words]
    )


def problem(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*words)
    (line,) = caught.value.problems
    return line


# Presets


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_the_keys_that_the_user_does_not_set(preset: str) -> None:
    keys = load(f"preset={preset}", LOG_PROBS).config.algorithm.rollout_correction
    default = load().config.algorithm.rollout_correction.model_dump()
    assert keys.model_dump() == {**default, "preset": preset, **PRESETS[preset]}


def test_a_key_of_the_user_wins_over_a_preset_also_if_it_is_null_or_the_default() -> None:
    preset = "preset=decoupled_geo_rs_token_tis"
    for key, value in (("rollout_is", None), ("rollout_rs_threshold", "0.9_1.2")):
        written = "null" if value is None else value
        for words in ([preset, f"{key}={written}"], [f"{key}={written}", preset]):
            keys = load(*words, LOG_PROBS).config.algorithm.rollout_correction
            assert getattr(keys, key) == value
            assert keys.rollout_rs == "seq_mean_k1"


def test_a_preset_without_effect_is_explained() -> None:
    words = ["preset=decoupled_token_is", "rollout_is=null", "rollout_is_threshold=2.0"]
    reasons = load(*words).without_effect
    assert (
        reasons[f"{KEY}.preset=decoupled_token_is"] == "all keys that it sets are set by themselves"
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_a_saved_config_sets_all_keys_and_nothing_is_said_of_it(preset: str) -> None:
    saved = load(f"preset={preset}", LOG_PROBS).config
    again = load_config([saved.model_dump(mode="json")])
    assert again.config == saved
    assert not [key for key in again.without_effect if key.startswith(KEY)]


def test_two_bounds_stay_text_although_yaml_would_read_a_number() -> None:
    for written, value in (("0.5_5", "0.5_5"), ("2", 2.0), ("2.5", 2.5), ("'0.5_2.0'", "0.5_2.0")):
        keys = load("rollout_is=token", LOG_PROBS, f"rollout_is_threshold={written}")
        assert keys.config.algorithm.rollout_correction.rollout_is_threshold == value
        again = load_config([keys.config.model_dump(mode="json")]).config
        assert again == keys.config


# What is refused: the key, its value, and what to write


@pytest.mark.parametrize(
    ("words", "setting", "fix"),
    [
        (["rollout_is=tokens"], "rollout_is=tokens", "must be one of token, sequence or null"),
        (["rollout_is_threshold=0"], "rollout_is_threshold=0", "must be greater than 0"),
        (["rollout_is_threshold=x"], "rollout_is_threshold=x", "two numbers such as 0.5_2.0"),
        (["rollout_is_threshold=2_2"], "rollout_is_threshold=2_2", "must be below the upper"),
        (["rollout_is_threshold=5_0.5"], "rollout_is_threshold=5_0.5", "write 0.5_5.0"),
        (
            ["rollout_is=token", "rollout_is_threshold=null"],
            "rollout_is_threshold=null",
            "set a number such as 2.0",
        ),
        (["rollout_rs=geometric"], "rollout_rs=geometric", "must be one of token_k1, token_k2"),
        (["rollout_rs=seq_max_k1"], "rollout_rs=seq_max_k1", "must be one of token_k1"),
        (["rollout_rs=token_k1"], "rollout_rs_threshold=null", "set one, such as 0.5_2.0"),
        (
            ["rollout_rs=token_k1", "rollout_rs_threshold=0.5"],
            "rollout_rs_threshold=0.5",
            "an upper bound above 1, or two bounds",
        ),
        (
            ["rollout_rs=token_k1,seq_sum_k3", "rollout_rs_threshold=0.5_2"],
            "rollout_rs_threshold=0.5_2",
            "seq_sum_k3 has only an upper bound; write 2.0",
        ),
        (
            ["rollout_rs=token_k2,seq_sum_k3", "rollout_rs_threshold=1,2,3"],
            "rollout_rs_threshold=1,2,3",
            "one threshold for all, or 2 with commas",
        ),
        (["loss_type=reinforce"], "loss_type=reinforce", f"set {KEY}.bypass_mode=true, or"),
        (
            ["loss_type=reinforce", "bypass_mode=true", f"{LOSS_MODE}=gspo"],
            "loss_type=reinforce",
            "set only one of them",
        ),
        (
            ["rollout_is=token", "actor_rollout_ref.rollout.top_p=0.9"],
            "rollout_is=token",
            "remove the correction, or the keys that change how tokens are chosen",
        ),
        (["preset=tis"], "preset=tis", "must be one of decoupled_token_is"),
    ],
)
def test_a_bad_combination_is_one_line(words: list[str], setting: str, fix: str) -> None:
    line = problem(*words, LOG_PROBS)
    assert line.startswith(f"{KEY}.{setting}: ")
    assert fix in line


@pytest.mark.parametrize(
    "words", [["rollout_is=token"], ["rollout_rs=token_k2", "rollout_rs_threshold=1"]]
)
def test_a_correction_needs_the_log_probs_of_the_engine(
    words: list[str], rolepool: Rolepool
) -> None:
    line = problem(*words)
    assert line.startswith(f"{KEY}.{words[0]}: ") and line.endswith(f"set {LOG_PROBS}")
    done = rolepool("plan", *(f"{KEY}.{word}" for word in words))
    assert done.code == 2 and line in done.err
    load(*words, "bypass_mode=true")  # which has them in any case


def test_settings_that_decide_nothing_are_explained() -> None:
    reasons = load("rollout_is=token", "bypass_mode=true", "rollout_rs_threshold=1").without_effect
    assert reasons == {
        f"{KEY}.rollout_is=token": "with bypass_mode and ppo_clip, the ratio of the loss is its weight",
        f"{KEY}.rollout_rs_threshold=1": "rollout_rs is not set",
    }


# Losses of the user

WITHOUT = """
from rolepool import register_policy_loss

@register_policy_loss("without_weights")
def without_weights(log_prob, **kwargs):
    return log_prob.sum(), {}

@register_policy_loss("with_weights")
def with_weights(log_prob, rollout_is_weights=None, **kwargs):
    return log_prob.sum(), {}
"""


@pytest.fixture
def own_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_losses.py").write_text(WITHOUT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield
    sys.modules.pop("own_losses", None)
    for name in ("without_weights", "with_weights"):
        POLICY_LOSSES.pop(name, None)
        policy_losses._functions.pop(name, None)


@pytest.mark.usefixtures("own_losses")
@pytest.mark.parametrize("by", ["module:function", "extension"])
def test_a_loss_of_the_user_must_name_the_argument_to_get_weights(by: str) -> None:
    more = ["trainer.extensions=[own_losses]"] if by == "extension" else []
    prefix = "" if by == "extension" else "own_losses:"
    loss = f"{LOSS_MODE}={prefix}without_weights"
    line = problem("rollout_is=token", LOG_PROBS, loss, *more)
    assert line.startswith(
        f"{loss}: it has no argument rollout_is_weights, which {KEY}.rollout_is=token"
    )
    assert line.endswith("remove rollout_is")
    load("rollout_is=token", LOG_PROBS, f"{LOSS_MODE}={prefix}with_weights", *more)
    # Rejection is a mask, which every loss gets.
    load("rollout_rs=token_k2", "rollout_rs_threshold=1", LOG_PROBS, loss, *more)


# Plans, and what is sent


def test_a_plan_says_how_the_rollout_is_corrected(rolepool: Rolepool) -> None:
    words = [f"{KEY}.preset=decoupled_geo_rs_token_tis", LOG_PROBS]
    out = " ".join(rolepool("plan", *words).out.split())
    line = "weights of token ratios, bounded by 2.0; left out of losses by seq_mean_k1, bounded by 0.999_1.001"
    assert f"rollout correction: {line}" in out
    assert "rollout correction" not in rolepool("plan").out


def calls_before(operation: str, *words: str) -> set[str]:
    """The operations that a call waits for on paper."""
    config = load_config([], words).config
    calls = schedule_of(config).calls
    (call,) = [call for call in calls if call.operation == operation]
    return {calls[number].operation for number in call.after}


def test_the_driver_waits_for_old_log_probs_only_to_correct() -> None:
    words = [LOG_PROBS, "algorithm.adv_estimator=gae"]
    assert "old_log_prob" not in calls_before("adv", *words)
    assert "old_log_prob" in calls_before("adv", *words, f"{KEY}.rollout_is=token")
    in_update = [f"{KEY}.preset=bypass_pg_is"]
    assert calls_before("adv", *words, *in_update) == calls_before("adv", *words)


def test_updates_get_no_further_column_without_a_correction() -> None:
    for words in ((), (LOG_PROBS,), (f"{KEY}.preset=bypass_pg_geo_rs",)):
        made, _ = estimated(*words)
        assert set(made.batch.batch.keys()) == {"advantages", "returns"}


def test_weights_are_sent_to_the_actor_and_the_mask_to_both() -> None:
    config = load().config
    of_actor = keys_read_by(Actor, (config, ActorSetup()), {})["update_actor"]
    of_critic = keys_read_by(Critic, (config, TrainingSetup()), {})["update_critic"]
    assert of_actor is not None and {"rollout_is_weights", "loss_mask"} <= set(of_actor)
    assert of_critic is not None and "loss_mask" in of_critic
    assert "rollout_is_weights" not in of_critic


# The driver

LENGTHS = torch.tensor([3, 1, 2, 3])
ACTOR = [[-1.0, -1.0, -2.0], [-0.5, 0, 0], [-3.0, -1.0, 0], [-1.0, -1.0, -1.0]]
ENGINE = [[-1.5, -1.0, -1.0], [-0.5, 0, 0], [-1.0, -1.5, 0], [-1.0, -1.0, -1.0]]


class Future:
    calls = ()

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.batch = DataProto.from_dict(tensors)
        self.asked: list[str] = []

    def get(self, keys: Any = None) -> DataProto:
        if keys is None:
            return self.batch
        self.asked += keys
        return self.batch.select([key for key in keys if key in self.batch.batch])


def estimated(*words: str) -> tuple[Estimated, Future]:
    widths = ["data.max_prompt_length=4", "data.max_response_length=3"]
    config = load_config([], [*widths, *words]).config
    actor, engine = (torch.tensor(rows, dtype=torch.float64) for rows in (ACTOR, ENGINE))
    rollouts = Future(
        {
            "num_prompt_tokens": torch.full((4,), 2),
            "num_response_tokens": LENGTHS,
            "rollout_log_probs": unpad(engine, LENGTHS),
        }
    )
    per_token = [Future({"values": unpad(torch.zeros(4, 3), LENGTHS)})]
    if config.algorithm.rollout_correction.corrects_before_update:
        per_token.append(Future({"old_log_probs": unpad(actor, LENGTHS)}))
    scores = Future({"scores": torch.arange(4.0)})
    prompts = DataProto.from_dict(non_tensors={"uid": np.arange(4)})
    made = Estimator(config).estimate(prompts, rollouts, scores, None, *per_token)  # type: ignore[arg-type]
    return made, rollouts


def test_the_driver_adds_weights_and_a_mask_to_what_updates_read() -> None:
    words = [f"{KEY}.rollout_is=token", f"{KEY}.rollout_is_threshold=1.5"]
    words += [f"{KEY}.rollout_rs=seq_sum_k1", f"{KEY}.rollout_rs_threshold=0.4_2.5", LOG_PROBS]
    made, rollouts = estimated(*words)
    assert "rollout_log_probs" in rollouts.asked
    ratios = (torch.tensor(ACTOR).double() - torch.tensor(ENGINE).double()).exp()
    mask = torch.arange(3) < LENGTHS[:, None]
    weights = torch.where(mask, ratios.clamp(max=1.5), 0.0)
    columns = made.batch.batch
    assert columns["rollout_is_weights"].dtype == torch.float64, "that of the log-probs"
    torch.testing.assert_close(pad_ragged(columns["rollout_is_weights"]), weights)
    # The ratio of the third response is exp(-1.5), which is below 0.4.
    kept = mask.clone()
    kept[2] = False
    assert torch.equal(pad_ragged(columns["loss_mask"]), kept)
    assert made.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 9)
    assert made.metrics["rollout_corr/rollout_is_max"] == 1.5
    # Advantages and lengths are those of all tokens: a rejected response has its score.
    plain, other = estimated()
    assert "rollout_log_probs" not in other.asked
    for name in ("advantages", "returns"):
        assert torch.equal(pad_ragged(columns[name]), pad_ragged(plain.batch.batch[name]))
    assert torch.equal(made.mask, mask) and made.lengths == plain.lengths


def test_a_step_of_the_user_that_hands_over_no_log_probs_is_told_so() -> None:
    config = load("rollout_is=token", LOG_PROBS).config
    sizes = Future(
        {
            "num_prompt_tokens": torch.full((4,), 2),
            "num_response_tokens": LENGTHS,
            "rollout_log_probs": unpad(torch.tensor(ENGINE), LENGTHS),
        }
    )
    values = Future({"values": unpad(torch.zeros(4, 3), LENGTHS)})
    with pytest.raises(ConfigError, match=r"it gives the estimator no old log-probs"):
        Estimator(config).estimate(
            DataProto.from_dict(non_tensors={"uid": np.arange(4)}),
            sizes,  # type: ignore[arg-type]
            Future({"scores": torch.arange(4.0)}),  # type: ignore[arg-type]
            None,
            values,  # type: ignore[arg-type]
        )


def test_mismatch_is_described_whenever_both_log_probs_are_there() -> None:
    made, _ = estimated()
    scored = DataProto.from_dict(
        {
            "old_log_probs": unpad(torch.tensor(ACTOR), LENGTHS),
            "rollout_log_probs": unpad(torch.tensor(ENGINE), LENGTHS),
        }
    )
    metrics = describe(made, scored)
    names = {name for name in metrics if name.startswith("rollout_corr/")}
    expected = ("kl", "k3_kl", "ppl_ratio", "chi2_token", "chi2_seq")
    assert names == {f"rollout_corr/{name}" for name in expected}
    # Sums of log q - log p: (-0.5 + 0 + 1), 0, (2 - 0.5), 0.
    assert metrics["rollout_corr/kl"] == pytest.approx(2 / 9)
    assert "rollout_corr/kl" not in describe(made, scored.select(["old_log_probs"]))


class OwnSums:
    """The sums of one rank that has all rows."""

    def sum(self, numbers: list[float]) -> list[float]:
        return list(numbers)


def test_losses_are_divided_by_the_tokens_that_are_left_and_by_all_sequences() -> None:
    sampled = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    kept = sampled.clone()
    kept[1] = False
    (counts,) = count_losses([(kept, sampled)], 3.0, OwnSums())  # type: ignore[arg-type]
    assert (counts.num_tokens, counts.num_sequences) == (3, 2)
