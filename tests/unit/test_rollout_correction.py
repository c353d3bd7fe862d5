"""Weights, rejection and metrics against plain loops over tokens, and against verl if it is
installed."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from correction_loops import (
    Batch,
    Row,
    flat,
    kept_by,
    mean,
    mismatch_of,
    random_batch,
    weights_of,
    with_mean_1,
)
from mini_batches import MODES, MiniBatch, actor_keys, random_mini_batch
from torch import Tensor

from rolepool.algorithm.losses import LossCounts
from rolepool.algorithm.policy_losses import compute_policy_loss_reinforce
from rolepool.algorithm.rollout_correction import (
    MEAN_WEIGHT,
    PREFIX,
    SAMPLE_SIZE,
    Correction,
    correct_batch,
    correct_rows,
    divisor_of_weights,
    mismatch_metrics,
    named_metrics,
    sums_of_weights,
)
from rolepool.config import load_config
from rolepool.config.functions import BUILT_IN_POLICY_LOSSES, policy_losses
from rolepool.config.rollout_correction import PRESETS, RULES
from rolepool.config.run_keys import RolloutCorrectionConfig

KEY = "algorithm.rollout_correction"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=true"
Threshold = tuple[str, float | None, float]
"""As the key is written, and its two bounds."""


def threshold_of(rule: str) -> Threshold:
    """A threshold that decides about some tokens of every random batch."""
    if rule.endswith("k1"):
        return "0.7_1.5", 0.7, 1.5
    if "sum" in rule:
        return "0.4", None, 0.4
    if "max" in rule:
        return "0.12", None, 0.12
    return "0.06", None, 0.06


def keys_of(**keys: object) -> RolloutCorrectionConfig:
    words = [f"{KEY}.{name}={value}" for name, value in keys.items()]
    return load_config([], [LOG_PROBS, *words]).config.algorithm.rollout_correction


def corrected(batch: Batch, **keys: object) -> tuple[Correction, dict[str, float]]:
    return correct_batch(*batch, keys_of(**keys))


def kept_values(values: Tensor | None, mask: Tensor) -> list[float]:
    """The values of tokens that count, row after row. All others must be 0."""
    assert values is not None
    assert not values[~mask].any()
    result: list[float] = values[mask].tolist()
    return result


# Against loops


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("threshold", "lower", "upper"), [("1.3", None, 1.3), ("0.7_1.4", 0.7, 1.4)]
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_ratios_within_bounds(
    level: str, threshold: str, lower: float | None, upper: float, normalize: bool, seed: int
) -> None:
    batch = random_batch(seed)
    correction, metrics = corrected(
        batch,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalize,
    )
    weights = weights_of(batch.rows(), level, lower, upper)
    assert metrics[MEAN_WEIGHT] == pytest.approx(mean(flat(weights)), rel=1e-12)
    squares = [weight**2 for weight in flat(weights)]
    expected_size = mean(flat(weights)) ** 2 / mean(squares)
    assert metrics[SAMPLE_SIZE] == pytest.approx(expected_size, rel=1e-12)
    if level == "token":
        largest = max(flat(weights))
    else:
        largest = max(math.exp(sum(row)) for row in batch.rows() if row)
    assert metrics[f"{PREFIX}rollout_is_max"] == pytest.approx(largest, rel=1e-12)
    is_some_outside = any(weight in (0.0, upper) for weight in flat(weights))
    assert is_some_outside, "the bounds decide about some tokens"
    if lower is not None:
        share = flat(weights).count(0.0) / len(flat(weights))
        assert metrics[f"{PREFIX}rollout_is_oob_ratio"] == pytest.approx(share, rel=1e-12)
    if normalize:
        weights = with_mean_1(weights, level)
    values = kept_values(correction.weights, batch.mask)
    assert values == pytest.approx(flat(weights), rel=1e-12)
    assert correction.kept is None


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_keeps_tokens_or_whole_sequences(rule: str, seed: int) -> None:
    batch = random_batch(seed)
    threshold, lower, upper = threshold_of(rule)
    correction, metrics = corrected(batch, rollout_rs=rule, rollout_rs_threshold=threshold)
    expected = kept_by(batch.rows(), rule, lower, upper)
    tokens = [keep for row in expected for keep in row]
    assert kept_values(correction.kept, batch.mask) == tokens
    assert 0 < sum(tokens) < len(tokens), "the rule keeps some and leaves out some"
    assert correction.weights is None
    assert metrics[f"{PREFIX}rollout_rs_masked_fraction"] == pytest.approx(
        tokens.count(False) / len(tokens)
    )
    sequences = [all(row) for row in expected if row]
    assert metrics[f"{PREFIX}rollout_rs_seq_masked_fraction"] == pytest.approx(
        sequences.count(False) / len(sequences)
    )


def test_all_rules_of_a_list_must_keep_a_token_each_with_its_own_bound() -> None:
    batch = random_batch(7)
    correction, _ = corrected(
        batch,
        rollout_rs="token_k1,seq_max_k2,token_k1",
        rollout_rs_threshold="0.6_1.6,0.3",
    )
    by_tokens = kept_by(batch.rows(), "token_k1", 0.6, 1.6)
    by_largest = kept_by(batch.rows(), "seq_max_k2", None, 0.3)
    both: list[bool] = []
    for one, other in zip(by_tokens, by_largest, strict=True):
        both += [mine and theirs for mine, theirs in zip(one, other, strict=True)]
    assert kept_values(correction.kept, batch.mask) == both
    assert by_tokens != by_largest


def test_one_number_bounds_a_ratio_from_both_sides() -> None:
    batch = random_batch(8)
    one, _ = corrected(batch, rollout_rs="seq_sum_k1", rollout_rs_threshold="2.0")
    both, _ = corrected(batch, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0")
    assert one.kept is not None and both.kept is not None
    assert torch.equal(one.kept, both.kept)


@pytest.mark.parametrize("seed", range(2))
def test_mismatch_is_measured_over_tokens_and_over_sequences(seed: int) -> None:
    batch = random_batch(seed)
    metrics = mismatch_metrics(*batch)
    for name, expected in mismatch_of(batch.rows()).items():
        assert metrics.pop(f"{PREFIX}{name}") == pytest.approx(expected, rel=1e-10), name
    assert metrics == {}


def test_numbers_stay_finite_if_the_engine_is_sure_of_what_the_actor_excludes() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    actor = torch.tensor([[-1000.0, -1.0], [-0.5, -0.5]])
    engine = torch.tensor([[-1.0, -1.0], [-800.0, -0.5]])
    for level in ("token", "sequence"):
        correction, metrics = correct_batch(
            actor, engine, mask, keys_of(rollout_is=level, rollout_is_threshold="1e12")
        )
        assert correction.weights is not None
        assert correction.weights.min() == pytest.approx(math.exp(-20))
        assert correction.weights.max() == pytest.approx(math.exp(20))
        assert all(math.isfinite(value) for value in metrics.values())
    assert all(math.isfinite(value) for value in mismatch_metrics(actor, engine, mask).values())


# Properties


EVERY_CORRECTION: list[dict[str, object]] = [
    {"rollout_is": "token"},
    {"rollout_is": "sequence", "rollout_is_batch_normalize": "true"},
    {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"},
    *({"rollout_rs": rule, "rollout_rs_threshold": threshold_of(rule)[0]} for rule in RULES),
]


@pytest.mark.parametrize("keys", EVERY_CORRECTION, ids=str)
def test_equal_policies_give_weights_of_1_and_leave_out_nothing(keys: dict[str, object]) -> None:
    batch = random_batch(1)
    equal = batch._replace(engine=batch.actor)
    correction, metrics = corrected(equal, **keys)
    if correction.weights is not None:
        assert set(kept_values(correction.weights, batch.mask)) == {1.0}
        assert metrics[SAMPLE_SIZE] == 1 and metrics[MEAN_WEIGHT] == 1
    if correction.kept is not None:
        assert torch.equal(correction.kept, batch.mask)
        assert metrics[f"{PREFIX}rollout_rs_masked_fraction"] == 0
    of_engine = mismatch_metrics(*equal)
    assert of_engine.pop(f"{PREFIX}ppl_ratio") == 1
    assert set(of_engine.values()) == {0.0}


@pytest.mark.parametrize("keys", EVERY_CORRECTION, ids=str)
def test_padding_changes_nothing(keys: dict[str, object]) -> None:
    batch = random_batch(2)
    padded: list[Tensor] = []
    for column, value in zip(batch, (5.0, math.nan, False), strict=True):
        wider = torch.full((len(column) + 2, column.shape[1] + 3), value, dtype=column.dtype)
        wider[: len(column), : column.shape[1]] = column
        padded.append(wider)
    mine, my_metrics = corrected(batch, **keys)
    theirs, their_metrics = corrected(Batch(*padded), **keys)
    assert their_metrics == pytest.approx(my_metrics, rel=1e-12)
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            expected = one[batch.mask].tolist()
            assert kept_values(other, padded[2]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("keys", EVERY_CORRECTION, ids=str)
def test_in_an_update_micro_batches_change_nothing(keys: dict[str, object]) -> None:
    """Metrics of an update are shares that add up, and weights of it are those of a whole batch."""
    batch = random_batch(3)
    whole, metrics_of_batch = corrected(batch, **keys)
    update = keys_of(**keys, bypass_mode="true", loss_type="reinforce")
    counts = LossCounts.of(batch.mask)
    parts = [Batch(*(column[rows] for column in batch)) for rows in (slice(0, 5), slice(5, 12))]
    divisor = 1.0
    if update.rollout_is_batch_normalize:
        total, number = sum(sums_of_weights(*part, update) for part in parts)  # type: ignore[misc]
        divisor = divisor_of_weights(float(total), float(number))
        assert divisor != 1
    weights: list[Tensor] = []
    kept: list[Tensor] = []
    totals: dict[str, float] = {}
    for part in parts:
        correction, metrics = correct_rows(*part, update, divisor=divisor, counts=counts)
        if correction.weights is not None:
            weights.append(correction.weights)
        if correction.kept is not None:
            kept.append(correction.kept)
        for name, share in metrics.items():
            totals[f"actor/{name}"] = totals.get(f"actor/{name}", 0.0) + float(share)
    if whole.weights is not None:
        torch.testing.assert_close(torch.cat(weights), whole.weights, rtol=1e-12, atol=0)
    if whole.kept is not None:
        assert torch.equal(torch.cat(kept), whole.kept)
    metrics = named_metrics({**totals, "actor/grad_norm": 3.0}, "actor/")
    assert metrics.pop("actor/grad_norm") == 3
    expected = {**metrics_of_batch, **mismatch_metrics(*batch)}
    assert {f"{PREFIX}kl", f"{PREFIX}k3_kl", f"{PREFIX}chi2_token"} < metrics.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected[name], rel=1e-10), name


def test_a_batch_without_tokens_has_no_correction_and_no_metrics() -> None:
    batch = random_batch(4)
    empty = batch._replace(mask=torch.zeros_like(batch.mask))
    assert corrected(empty, rollout_is="token") == (Correction(None, None), {})
    assert mismatch_metrics(*empty) == {}


# Losses with weights


def loss_of(
    name: str, batch: MiniBatch, mode: str, weights: Tensor | None, counts: LossCounts | None = None
) -> Tensor:
    keys = actor_keys()
    optional = {} if weights is None else {"rollout_is_weights": weights}
    function = compute_policy_loss_reinforce if name == "reinforce" else policy_losses.find(name)
    loss, _ = function(
        old_log_prob=batch.old,
        log_prob=batch.new,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=mode,
        config=keys,
        counts=counts,
        clip_ratio_low=keys.clip_ratio_low,
        clip_ratio_high=keys.clip_ratio_high,
        clip_ratio_c=keys.clip_ratio_c,
        **optional,
    )
    result: Tensor = loss
    return result


def gradient(name: str, batch: MiniBatch, mode: str, weights: Tensor | None) -> Tensor:
    new = batch.new.clone().requires_grad_()
    loss = loss_of(name, batch._replace(new=new), mode, weights)
    return torch.autograd.grad(loss, new)[0]


LOSSES = (*BUILT_IN_POLICY_LOSSES, "reinforce")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_weights_multiply_the_loss_of_each_token_and_have_no_gradient(name: str, mode: str) -> None:
    """geo_mean has one loss for a sequence, with the geometric mean of its weights."""
    batch = random_mini_batch(3)
    weights = torch.rand(batch.mask.shape, dtype=torch.float64) + 0.5
    weights.requires_grad_()
    ones = torch.ones_like(weights)
    plain = gradient(name, batch, mode, None)
    torch.testing.assert_close(gradient(name, batch, mode, ones), plain, rtol=1e-8, atol=0)
    weighted = gradient(name, batch, mode, weights)
    if name == "geo_mean":
        for row in range(len(batch.mask)):
            mask = batch.mask[row].bool()
            if mask.any():
                factor = weights[row][mask].log().mean().exp().item()
                torch.testing.assert_close(
                    weighted[row], plain[row] * factor, rtol=1e-8, atol=1e-12
                )
    else:
        torch.testing.assert_close(weighted, plain * weights.detach(), rtol=1e-10, atol=1e-14)
    assert loss_of(name, batch, mode, weights).requires_grad is False


def test_a_rejected_sequence_still_counts_as_one() -> None:
    """The mean over tokens divides by the tokens that are left, and the mean over sequences by all
    sequences, as in verl."""
    batch = random_mini_batch(5)
    kept = batch.mask.clone()
    kept[0] = 0
    counts = LossCounts(
        num_tokens=int(kept.sum()),
        num_sequences=int(batch.mask.any(dim=1).sum()),
        loss_scale_factor=7.0,
    )
    rest = batch._replace(mask=kept)
    own_counts = LossCounts.of(kept, 7.0)
    for mode in MODES:
        mine = loss_of("vanilla", rest, mode, None, counts)
        alone = loss_of("vanilla", rest, mode, None, own_counts)
        factor = 1.0
        if mode.startswith("seq-mean"):
            factor = own_counts.num_sequences / counts.num_sequences
            assert factor < 1
        assert mine.item() == pytest.approx(alone.item() * factor, rel=1e-12), mode


# verl's own functions. Its package needs others, which are not installed here.


def verl_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def test_presets_are_those_of_verl() -> None:
    configs = verl_module("verl.trainer.config.algorithm")
    helper = verl_module("verl.trainer.ppo.rollout_corr_helper")
    theirs = configs.RolloutCorrectionConfig
    names = [name for name, value in vars(theirs).items() if isinstance(value, classmethod)]
    presets = [name for name in names if not name.startswith("_")]
    assert set(presets) == set(PRESETS)
    assert set(RULES) == helper.SUPPORTED_ROLLOUT_RS_OPTIONS
    for name in presets:
        preset = getattr(theirs, name)()
        keys = keys_of(preset=name)
        for key in ("rollout_is", "rollout_rs", "bypass_mode", "loss_type"):
            assert getattr(keys, key) == getattr(preset, key), (name, key)
        assert keys.rollout_is_threshold == preset.rollout_is_threshold, name
        assert keys.rollout_rs_threshold == preset.rollout_rs_threshold, name


def of_tokens(rows: list[Row], batch: Batch) -> Tensor:
    """A column of these numbers, with 0 elsewhere."""
    column = torch.zeros(batch.mask.shape, dtype=torch.float64)
    column[batch.mask] = torch.tensor(flat(rows), dtype=torch.float64)
    return column


@pytest.mark.parametrize("keys", EVERY_CORRECTION, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_numbers_are_those_of_verl(keys: dict[str, object], seed: int) -> None:
    helper = verl_module("verl.trainer.ppo.rollout_corr_helper")
    batch = random_batch(seed)
    # verl counts a sequence without tokens, as one with weight 1; and NaN spreads from outside of
    # the mask.
    has_tokens = batch.mask.any(dim=1)
    batch = Batch(*(column[has_tokens] for column in batch))
    batch = batch._replace(engine=batch.engine.nan_to_num())
    own = keys_of(**keys)
    correction, metrics = correct_batch(*batch, own)
    weights, mask, their_metrics = helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch.actor,
        rollout_log_prob=batch.engine,
        response_mask=batch.mask.double(),
        rollout_is=own.rollout_is,
        rollout_is_threshold=own.rollout_is_threshold,
        rollout_is_batch_normalize=own.rollout_is_batch_normalize,
        rollout_rs=own.rollout_rs,
        rollout_rs_threshold=own.rollout_rs_threshold,
    )
    if correction.weights is not None:
        theirs = weights.batch["rollout_is_weights"]
        torch.testing.assert_close(correction.weights, theirs, rtol=1e-7, atol=1e-9)
    kept = batch.mask if correction.kept is None else correction.kept
    assert torch.equal(kept, mask.bool())
    for name, value in {**metrics, **mismatch_metrics(*batch)}.items():
        assert value == pytest.approx(their_metrics[name], rel=1e-6, abs=1e-7), name


def verl_actor_config(correction: RolloutCorrectionConfig | None = None) -> Any:
    """verl's section of the actor with the values of `actor_keys`."""
    configs = verl_module("verl.workers.config")
    keys = actor_keys()
    options: dict[str, Any] = {}
    if correction is not None:
        theirs = verl_module("verl.trainer.config.algorithm").RolloutCorrectionConfig
        options["rollout_correction"] = theirs(**correction.model_dump(exclude={"preset"}))
    return configs.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=keys.clip_ratio_low,
        clip_ratio_high=keys.clip_ratio_high,
        clip_ratio_c=keys.clip_ratio_c,
        policy_loss=configs.PolicyLossConfig(
            clip_cov_ratio=keys.policy_loss.clip_cov_ratio,
            clip_cov_lb=keys.policy_loss.clip_cov_lb,
            clip_cov_ub=keys.policy_loss.clip_cov_ub,
            kl_cov_ratio=keys.policy_loss.kl_cov_ratio,
            ppo_kl_coef=keys.policy_loss.ppo_kl_coef,
            **options,
        ),
    )


def without_empty_rows(batch: MiniBatch) -> MiniBatch:
    return batch.take(batch.mask.any(dim=1).nonzero().squeeze(-1))


@pytest.mark.parametrize("name", BUILT_IN_POLICY_LOSSES)
def test_losses_with_weights_are_those_of_verl(name: str) -> None:
    core = verl_module("verl.trainer.ppo.core_algos")
    batch = without_empty_rows(random_mini_batch(11))
    weights = torch.rand(batch.mask.shape, dtype=torch.float64) + 0.5
    for mode in MODES:
        mine = loss_of(name, batch, mode, weights)
        theirs, _ = core.get_policy_loss_fn(name)(
            old_log_prob=batch.old,
            log_prob=batch.new,
            advantages=batch.advantages.clone(),
            response_mask=batch.mask,
            loss_agg_mode=mode,
            config=verl_actor_config(),
            rollout_is_weights=weights * batch.mask,
        )
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-6), mode


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize(
    "keys",
    [
        {"rollout_is": "token", "rollout_is_threshold": "1.5"},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": "true"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.4_2.5"},
        {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.9"},
    ],
    ids=str,
)
def test_the_loss_of_bypass_mode_is_that_of_verl(keys: dict[str, object], loss_type: str) -> None:
    """Of one micro-batch that is the whole mini-batch. Rejection does not change what the loss is
    divided by, because verl counts tokens before it."""
    core = verl_module("verl.trainer.ppo.core_algos")
    own = keys_of(**keys, bypass_mode="true", loss_type=loss_type)
    batch = without_empty_rows(random_mini_batch(12))
    counts = LossCounts.of(batch.mask)
    columns = (batch.new, batch.old, batch.mask)
    divisor = 1.0
    if own.weighs and own.rollout_is_batch_normalize:
        total, number = sums_of_weights(*columns, own).tolist()
        divisor = divisor_of_weights(total, number)
    correction, _ = correct_rows(*columns, own, divisor=divisor, counts=counts)
    mask = batch.mask if correction.kept is None else correction.kept
    assert (correction.kept is None) == (own.rollout_rs is None)
    name = "reinforce" if loss_type == "reinforce" else "vanilla"
    for mode in MODES:
        config = verl_actor_config(own)
        config.global_batch_info["batch_num_tokens"] = counts.num_tokens
        config.global_batch_info["global_batch_size"] = counts.num_sequences
        theirs, _ = core.get_policy_loss_fn("bypass_mode")(
            old_log_prob=batch.old,
            log_prob=batch.new,
            advantages=batch.advantages,
            response_mask=batch.mask,
            loss_agg_mode=mode,
            config=config,
        )
        mine = loss_of(name, batch._replace(mask=mask), mode, correction.weights, counts)
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-6), mode
