"""Profiles: the work of operations under another config and plan, and step times that follow from
known costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_runs import COSTS, MICRO_ROWS, PROMPT, RESPONSE, config_of, record, seconds_of

from rolepool.errors import ConfigError, PlacementError
from rolepool.metrics.sharding_times import ShardingTime
from rolepool.metrics.spans import Recorded
from rolepool.placement import build_plan
from rolepool.placement.estimate import default_micro_batches, shape_of
from rolepool.placement.roles import OPERATIONS, Role
from rolepool.planner.costs import LinearCost, Work
from rolepool.planner.predict import TENSOR_PARALLEL, Prediction, Predictor
from rolepool.planner.profile import MAX_STEPS, Profile, Recording, measured_steps
from rolepool.trainer.paper import schedule_of

LENGTH = PROMPT + RESPONSE
RUNS = (
    "trainer.n_gpus_per_node=1",
    "trainer.n_gpus_per_node=4",
    "trainer.n_gpus_per_node=14 placement.strategy=split placement.split.actor_gpus_per_node=8",
)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile([record(words) for words in RUNS])


def work_of(
    profile: Profile, role: Role, name: str, num_parts: int, words: str = ""
) -> dict[str, Work]:
    config = config_of(words)
    return profile.work(
        config, role, OPERATIONS[name], num_parts, default_micro_batches(config, role).get(name)
    )


def predicted(profile: Profile, words: str, **options: object) -> Prediction:
    config = config_of(words)
    return Predictor(profile, schedule_of, **options).predict(words, config, build_plan(config))  # type: ignore[arg-type]


def measured_s(words: str) -> float:
    return record(words).step_s


# Work


def test_a_call_has_as_many_micro_batches_as_its_rows_need(profile: Profile) -> None:
    for num_parts, rows in ((1, 24), (2, 12), (3, 8)):
        score = work_of(profile, Role.Critic, "values", num_parts)["score"]
        assert score == pytest.approx((rows / MICRO_ROWS, rows * LENGTH, rows * LENGTH**2))
    by_two = "critic.forward_micro_batch_size_per_gpu=2"
    assert work_of(profile, Role.Critic, "values", 2, by_two)["score"].num_pieces == 6


def test_an_update_has_an_optimizer_step_for_each_mini_batch(profile: Profile) -> None:
    """24 rows in mini-batches of 12, or of 24."""
    two = work_of(profile, Role.Actor, "update_actor", 1)
    assert (two["optimizer"].num_pieces, two["forward"].num_pieces) == (2, 6)
    one = work_of(
        profile, Role.Actor, "update_actor", 1, "actor_rollout_ref.actor.ppo_mini_batch_size=24"
    )
    assert (one["optimizer"].num_pieces, one["forward"].num_pieces) == (1, 6)
    assert one["forward"].num_tokens == pytest.approx(24 * LENGTH)


def test_tensor_parallel_ranks_share_their_rows(profile: Profile) -> None:
    config = config_of(f"trainer.n_gpus_per_node=4 {TENSOR_PARALLEL}=2")
    plan = build_plan(config)
    assert plan.dims_of(config, Role.Rollout).dp == 2
    decode = work_of(profile, Role.Rollout, "gen", 2)["decode"]
    assert decode.num_tokens == pytest.approx((RESPONSE - 1) * 12)


def test_longer_responses_take_more_decode_steps_and_longer_rows(profile: Profile) -> None:
    words = f"data.max_response_length={2 * RESPONSE}"
    before, after = (work_of(profile, Role.Rollout, "gen", 2, one) for one in ("", words))
    assert after["decode"].num_pieces == pytest.approx(2 * before["decode"].num_pieces)
    assert after["prefill"] == pytest.approx(before["prefill"])
    long, longer = (work_of(profile, Role.Critic, "values", 2, one)["score"] for one in ("", words))
    factor = (PROMPT + 2 * RESPONSE) / LENGTH
    assert longer.num_tokens == pytest.approx(factor * long.num_tokens)
    assert longer.num_attended == pytest.approx(factor**2 * long.num_attended)


def test_sequences_that_do_not_fit_at_once_are_generated_one_wave_after_another(
    profile: Profile,
) -> None:
    one = work_of(profile, Role.Rollout, "gen", 1)["decode"]
    three = work_of(profile, Role.Rollout, "gen", 1, "actor_rollout_ref.rollout.max_num_seqs=8")[
        "decode"
    ]
    assert three.num_pieces == pytest.approx(3 * one.num_pieces)
    assert three.num_tokens == pytest.approx(one.num_tokens)


# Step times


@pytest.mark.parametrize(
    "words",
    [
        "trainer.n_gpus_per_node=3",
        "trainer.n_gpus_per_node=12",
        "trainer.n_gpus_per_node=8 placement.strategy=split",
        "trainer.n_gpus_per_node=4 data.train_batch_size=48",
        "trainer.n_gpus_per_node=3 actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=4 actor_rollout_ref.actor.ppo_epochs=2 critic.ppo_epochs=2",
    ],
)
def test_runs_with_known_costs_are_predicted(profile: Profile, words: str) -> None:
    found = predicted(profile, words)
    assert found.step_s == pytest.approx(measured_s(words), rel=0.03)
    assert found.low_s < measured_s(words) < found.high_s


def test_many_epochs_count_even_though_a_schedule_has_only_some_of_them(profile: Profile) -> None:
    three, six = (
        dict(predicted(profile, f"{RUNS[1]} critic.ppo_epochs={number}").path) for number in (3, 6)
    )
    assert six["update_critic"] == pytest.approx(2 * three["update_critic"])


def test_a_step_that_was_interrupted_does_not_count(profile: Profile) -> None:
    recording = record(RUNS[0], num_steps=8)
    spans = [
        Recorded(
            one.step, one.operation, one.span._replace(end_s=one.span.end_s + 5.0 * (one.step == 5))
        )
        for one in recording.spans
    ]
    disturbed = Profile([recording._replace(spans=spans)])
    assert predicted(disturbed, RUNS[0]).step_s == pytest.approx(measured_s(RUNS[0]), rel=0.03)


def test_the_first_steps_do_not_count_and_long_runs_are_thinned_out() -> None:
    spans = record(RUNS[0], num_steps=6).spans
    assert measured_steps(spans) == [3, 4, 5, 6]
    assert measured_steps([one for one in spans if one.step < 2]) == [1]
    (first, *_) = spans
    many = [first._replace(step=step) for step in range(1, 1001)]
    assert len(measured_steps(many)) < 2 * MAX_STEPS


def test_a_faster_role_shortens_its_operations_only(profile: Profile) -> None:
    slow, fast = (predicted(profile, RUNS[1], speeds=speeds) for speeds in ({}, {"rollout": 2.0}))
    times = [dict(one.path) for one in (slow, fast)]
    assert times[1]["gen"] == pytest.approx(times[0]["gen"] / 2)
    assert times[1]["update_actor"] == pytest.approx(times[0]["update_actor"])
    assert fast.step_s == pytest.approx(slow.step_s - times[1]["gen"])


# What is not covered


def test_what_was_never_measured_is_said(profile: Profile) -> None:
    assert predicted(profile, RUNS[1]).notes == []
    alone = Profile([record("trainer.n_gpus_per_node=1")])
    notes = predicted(alone, "trainer.n_gpus_per_node=2 trainer.nnodes=2").notes
    assert any(
        "all pools of the profile have 1 rank, so the cost of collectives was not" in note
        for note in notes
    )
    assert any("network between nodes was not measured" in note for note in notes)
    four = Profile([record("trainer.n_gpus_per_node=4")])
    assert predicted(four, RUNS[0]).notes == [
        "all pools of the profile have 4 ranks, so the cost of collectives was not measured"
    ]
    shared = "trainer.n_gpus_per_node=1 placement.strategy=split placement.split.share=0.5"
    assert any("share a GPU were not measured" in note for note in predicted(alone, shared).notes)
    own = "trainer.n_gpus_per_node=2 placement.strategy=custom placement.pools={a:[1],r:[1]}"
    roles = "placement.roles={actor:a,ref:a,critic:a,rollout:r}"
    assert any(
        "weight sync between pools" in note for note in predicted(alone, f"{own} {roles}").notes
    )


def test_an_interval_is_wider_where_less_was_measured(profile: Profile) -> None:
    def width(one: Prediction) -> float:
        return (one.high_s - one.low_s) / one.step_s

    alone = Profile([record("trainer.n_gpus_per_node=1")])
    assert width(predicted(alone, RUNS[1])) > 3 * width(predicted(profile, RUNS[1]))


def test_an_operation_that_was_not_measured_is_refused(profile: Profile) -> None:
    without = Profile([record(f"{RUNS[0]} actor_rollout_ref.actor.use_kl_loss=false")])
    with pytest.raises(
        ConfigError, match="predict: ref was not measured in the profile; record a run with it"
    ):
        predicted(without, RUNS[0])


def test_a_placement_that_cannot_run_is_refused(profile: Profile) -> None:
    with pytest.raises(PlacementError, match="cannot be split into 5 equal parts"):
        predicted(profile, "trainer.n_gpus_per_node=5")
    with pytest.raises(PlacementError, match=r"does not fit in memory, by \d"):
        predicted(profile, RUNS[0], gpu_memory_bytes=2**31)


def test_a_run_without_recorded_work_is_a_profile_of_whole_operations() -> None:
    """As a console log tells it: the time of each call, and nothing about its parts."""
    recording = record(RUNS[1])
    spans = [one._replace(span=one.span._replace(parts=())) for one in recording.spans]
    found = predicted(Profile([Recording(recording.config, recording.plan, spans)]), RUNS[1])
    assert found.step_s == pytest.approx(measured_s(RUNS[1]), rel=0.05)
    assert any("was not recorded" in note for note in found.notes)


def test_the_hand_overs_of_a_long_run_are_those_between_its_calls() -> None:
    """Only some steps of a long run are used, but the step before tells what a generation waited
    for."""
    long = Profile([record(RUNS[0], num_steps=3 * MAX_STEPS, gap_s=0.01)])
    assert long.hand_over_s == pytest.approx(dict.fromkeys(long.hand_over_s, 0.01))
    assert "gen" in long.hand_over_s


def test_a_run_without_a_complete_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="no completed step with spans"):
        Profile([record(RUNS[0])._replace(spans=[])])


def test_pools_that_shared_a_gpu_teach_how_much_of_it_they_get() -> None:
    """Calls of the shared run take as long as alone, so sharing costs nothing: each pool has a
    whole GPU."""
    shared = "trainer.n_gpus_per_node=1 placement.strategy=split placement.split.share=0.5"
    both = Profile([record("trainer.n_gpus_per_node=1"), record(shared)])
    assert both.sharing == [both.recordings[1]]
    assert predicted(both, shared).step_s == pytest.approx(measured_s(shared), rel=0.03)
    apart = replace(predicted(Profile([record("trainer.n_gpus_per_node=1")]), shared))
    assert apart.step_s > 1.1 * predicted(both, shared).step_s


# Sharding that was measured at the start of a run

MORE_ROWS = "data.train_batch_size=96 actor_rollout_ref.actor.ppo_mini_batch_size=48"
TWO_RANKS = f"trainer.n_gpus_per_node=2 trainer.device=cpu {MORE_ROWS}"
ONE_RANK_EACH = f"{TWO_RANKS} placement.strategy=split placement.split.actor_gpus_per_node=1"
SHARDED_PARTS = ("forward", "backward", "optimizer", "score")


def costs_of_sharding(share: float) -> tuple[dict[str, tuple[float, ...]], list[ShardingTime]]:
    """Costs of which sharding over two ranks adds a share to the time of each micro-batch, and what
    a run with these costs measures with small models: a time per layer, and nothing per
    parameter."""
    costs: dict[str, tuple[float, ...]] = dict(COSTS)
    times: list[ShardingTime] = []
    shape = shape_of(config_of(), Role.Actor)
    piece = Work(1, MICRO_ROWS * LENGTH, MICRO_ROWS * LENGTH**2)
    for part in SHARDED_PARTS:
        plain = COSTS[part][:3]
        work = Work(1) if part == "optimizer" else piece
        added_s = share * seconds_of(work, (*plain, 0, 0, 0), 1)
        costs[part] = (*plain, added_s, 0.0, 0.0)
        of_small = added_s * 4 / (shape.num_layers + 1)
        times += [
            ShardingTime(2, part, 4, num_params, 1.0 + of_small, 1.0)
            for num_params in (10**5, 10**6)
        ]
    return costs, times


@pytest.mark.parametrize("share", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(
    ("recorded", "asked"), [(TWO_RANKS, ONE_RANK_EACH), (ONE_RANK_EACH, TWO_RANKS)]
)
def test_one_size_of_pools_is_enough_if_the_cost_of_sharding_was_measured(
    share: float, recorded: str, asked: str
) -> None:
    costs, times = costs_of_sharding(share)
    truth_s = record(asked, costs=costs).step_s
    recording = record(recorded, costs=costs)
    found = predicted(Profile([recording._replace(sharding=times)]), asked)
    blind = predicted(Profile([recording]), asked)
    assert found.step_s == pytest.approx(truth_s, rel=0.1)
    assert found.low_s < truth_s < found.high_s
    assert found.notes == []
    assert any("cost of collectives was not measured" in note for note in blind.notes)
    if share >= 0.5:
        assert abs(found.step_s - truth_s) < abs(blind.step_s - truth_s)


def test_ranks_beyond_those_whose_sharding_was_measured_are_said_and_less_sure() -> None:
    costs, times = costs_of_sharding(0.5)
    profile = Profile([record(TWO_RANKS, costs=costs)._replace(sharding=times)])
    four = predicted(profile, TWO_RANKS.replace("node=2", "node=4"))
    assert any("what sharding costs over 4 ranks was not measured" in note for note in four.notes)
    two = predicted(profile, TWO_RANKS)
    assert (four.high_s - four.low_s) / four.step_s > (two.high_s - two.low_s) / two.step_s


def test_many_steps_of_the_same_work_do_not_decide_what_a_token_costs() -> None:
    """All calls have about 1,000 tokens, and slow minutes of the machine fall together with
    slightly longer rows."""
    seen = []
    for step in range(40):
        is_slow = step >= 20
        seen.append((Work(4, 1010 if is_slow else 1000), 1, 0.11 if is_slow else 0.1))
    fit = LinearCost.fit(seen)
    assert fit.seconds(Work(4, 1005), 1).mean == pytest.approx(0.105, rel=0.03)
    assert fit.seconds(Work(4, 2010), 1).mean == pytest.approx(0.19, rel=0.1)
