"""What is said about a run, on runs whose numbers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from report_runs import ACTOR, CRITIC, make_run

from rolepool.config import load_config
from rolepool.config.schema import all_keys
from rolepool.metrics.spans import step_bounds
from rolepool.placement import build_plan
from rolepool.placement.roles import ROLE_SPECS
from rolepool.planner.predict import Prediction
from rolepool.report.findings import Finding, find
from rolepool.report.outside_load import outside_load
from rolepool.report.run import ReadRun
from rolepool.report.summary import by_step, summarise
from rolepool.units import duration


def findings_of(run: ReadRun, predicted: Sequence[Prediction] = ()) -> list[Finding]:
    return find(run, summarise(by_step(run.spans), step_bounds(run.spans)), predicted)


def sample(used_gib: float, total_gib: float, pool: str) -> dict[str, Any]:
    memory = {"memory_bytes": int(used_gib * 2**30), "memory_total_bytes": int(total_gib * 2**30)}
    gpu = {"index": 0, "utilization": 90.0, "power_w": 1.0, "pools": [pool], **memory}
    return {"time_s": 0.0, "node": "n", "gpus": [gpu], "processes": []}


def predictions(run: ReadRun, *times: tuple[float, float, float]) -> list[Prediction]:
    """Predictions for the run's own placement and for one pool: step time, and the interval."""
    assert run.plan is not None
    plans = run.plan, build_plan(load_config([], ["trainer.n_gpus_per_node=4"]).config)
    return [
        Prediction(name, plan, *one, 1.0, {}, [], {})
        for name, plan, one in zip(("", "placement.strategy=standard"), plans, times, strict=True)
    ]


def test_a_placement_that_is_predicted_to_be_faster_is_named_with_its_override_and_gain() -> None:
    run = make_run()
    better, overlap = findings_of(run, predictions(run, (10.0, 9.5, 10.5), (8.0, 7.0, 9.0)))
    assert better.text == (
        "Another placement, global_pool [4], is predicted to take 8 s per step instead of 10 s, and at most 9 s "
        "(computed from the spans of this run)."
    )
    assert better.numbers == pytest.approx({"step_s": 10.0, "predicted_s": 8.0, "at_most_s": 9.0})
    assert better.overrides == ("placement.strategy=standard",)
    assert better.gain_s == pytest.approx(2.0)
    assert (
        overlap.text == "Pools that worked at the same time saved 2 s per step; a step took 10 s."
    )
    assert overlap.numbers == pytest.approx({"saved_s": 2.0, "step_s": 10.0})


@pytest.mark.parametrize(
    "other", [(12.0, 11.0, 13.0), (8.0, 5.0, 11.0)], ids=["slower", "not certain"]
)
def test_a_placement_that_may_be_slower_is_not_named(other: tuple[float, float, float]) -> None:
    run = make_run()
    assert [
        one.text[:5] for one in findings_of(run, predictions(run, (10.0, 9.5, 10.5), other))
    ] == ["Pools"]


def test_a_slow_rank_is_named_with_what_the_others_waited() -> None:
    """One rank generates 2 s longer, which makes a step of 12 s."""
    (slow,) = [
        finding
        for finding in findings_of(make_run(late={("gen", 1): 2.0}))
        if "slowest" in finding.text
    ]
    assert (
        slow.text
        == f"In gen the other rank of {ACTOR} waited 2 s per step (17%) for the slowest rank."
    )
    assert slow.numbers == pytest.approx({"waited_s": 2.0, "step_s": 12.0})
    assert slow.overrides == ("data.max_response_length=256",)
    assert slow.gain_s == pytest.approx(
        1.0
    )  # equal ranks would both end after 5 s, not after 4 and 6 s


@pytest.mark.parametrize(
    ("overrides", "override"),
    [
        (("trainer.balance_batch=false",), "trainer.balance_batch=true"),
        ((), "actor_rollout_ref.actor.use_dynamic_bsz=true"),
        (("actor_rollout_ref.actor.use_dynamic_bsz=true",), "data.train_batch_size=24"),
    ],
)
def test_an_uneven_update_names_what_is_not_in_force_yet(
    overrides: tuple[str, ...], override: str
) -> None:
    found = findings_of(make_run(overrides=overrides, late={("update_actor", 0): 1.0}))
    assert [finding.overrides for finding in found if "slowest" in finding.text] == [(override,)]


def test_a_slow_driver_is_named() -> None:
    (found,) = [
        finding
        for finding in findings_of(make_run(seconds={"adv": 2.5}))
        if "driver" in finding.text
    ]
    assert found.text.startswith(
        "20% of a step's critical path is not work in a pool, but the driver (2.5 s) and hand-overs"
    )
    assert found.numbers == pytest.approx(
        {"share": 0.2, "driver_s": 2.5, "hand_over_s": 0.0, "step_s": 12.5}
    )
    assert found.overrides == (
        "data.train_batch_size=24 actor_rollout_ref.actor.ppo_mini_batch_size=24",
    )
    assert found.gain_s == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("set_by", "used", "words", "pool", "override"),
    [
        ("rows=6", 79.0, "1% was free): a longer batch may not fit", ACTOR, "rows=3"),
        ("rows=null", 79.0, "1% was free): a longer batch may not fit", ACTOR, "rows=1"),
        ("rows=6", 40.0, "50% was free): larger micro-batches would be faster", CRITIC, "rows=12"),
        (
            "tokens=8192",
            40.0,
            "50% was free): larger micro-batches would be faster",
            CRITIC,
            "tokens=16384",
        ),
    ],
)
def test_memory_that_runs_short_or_lies_idle_is_named(
    set_by: str, used: float, words: str, pool: str, override: str
) -> None:
    section = {ACTOR: "actor_rollout_ref.actor", CRITIC: "critic"}[pool]
    names = {"rows": "ppo_micro_batch_size_per_gpu", "tokens": "ppo_max_token_len_per_gpu"}
    key, value = set_by.split("=")
    overrides = (
        f"{section}.{names[key]}={value}",
        f"{section}.use_dynamic_bsz={str(key == 'tokens').lower()}",
    )
    monitor = [sample(10.0, 80.0, pool), sample(used, 80.0, pool)]
    (found,) = [
        one
        for one in findings_of(make_run(overrides=overrides, monitor=monitor))
        if "GiB" in one.text
    ]
    assert found.text.startswith(f"{pool} used at most {used} of 80.0 GiB of a GPU ({words}")
    new_key, new_value = override.split("=")
    assert found.overrides == (f"{section}.{names[new_key]}={new_value}",)


def test_free_memory_is_not_reported_if_micro_batches_are_already_as_large_as_possible() -> None:
    found = findings_of(make_run(monitor=[sample(40.0, 80.0, CRITIC)]))
    assert not [finding for finding in found if "GiB" in finding.text]


def test_nothing_is_said_about_memory_that_is_well_used_or_whose_size_is_unknown() -> None:
    unknown = sample(79.0, 80.0, ACTOR)
    del unknown["gpus"][0]["memory_total_bytes"]
    for monitor in ([sample(60.0, 80.0, ACTOR)], [unknown]):
        assert not [
            finding for finding in findings_of(make_run(monitor=monitor)) if "GiB" in finding.text
        ]


def test_a_slow_first_step_is_kept_out_of_the_averages() -> None:
    assert findings_of(make_run(first_extra_s=10.0))[0].numbers["step_s"] == pytest.approx(10.0)


def test_a_run_in_which_everything_is_fine_gets_no_findings() -> None:
    busy = make_run(seconds={"values": 2.0, "update_critic": 7.0, "adv": 0.0})
    assert [finding for finding in findings_of(busy) if "saved" not in finding.text] == []


def test_a_run_without_spans_gets_no_findings() -> None:
    assert findings_of(make_run(num_steps=0)) == []


def test_every_key_named_is_one_of_the_schema_and_every_value_is_accepted() -> None:
    runs = [
        make_run(),
        make_run(overrides=("trainer.n_gpus_per_node=2",)),
        make_run(seconds={"adv": 2.5}, first_extra_s=20.0),
        *(make_run(late={(operation, 0): 2.0}) for operation in ("gen", "values", "update_actor")),
        make_run(overrides=("trainer.balance_batch=false",), late={("update_critic", 0): 2.0}),
        make_run(monitor=[sample(79, 80, ACTOR), sample(10, 80, CRITIC)]),
    ]
    copied = {
        override for run in runs for finding in findings_of(run) for override in finding.overrides
    }
    assert len(copied) > 5
    for overrides in copied:
        assert all("=" in override for override in overrides.split(" "))
        load_config([], ["placement.strategy=split", *overrides.split(" ")])
    batched = [keys for spec in ROLE_SPECS.values() for _, keys in spec.batched]
    named = {name for keys in batched for name in (keys.rows, keys.tokens, keys.by_tokens)}
    named |= {spec.memory_key for spec in ROLE_SPECS.values() if spec.memory_key}
    assert named <= {*all_keys()}


def test_the_largest_gain_comes_first() -> None:
    found = findings_of(make_run(late={("gen", 1): 2.0}, seconds={"adv": 2.5}))
    gains_s = [finding.gain_s for finding in found]
    assert len(gains_s) >= 3
    assert gains_s == sorted(gains_s, reverse=True)
    assert gains_s[0] > 0


# A run that is about to collapse

SIZE, CHI2, NORM = (
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/chi2_token",
    "actor/grad_norm",
)
WEIGHTS = (
    "algorithm.rollout_correction.rollout_is=token",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
)
REJECTION = (
    "algorithm.rollout_correction.rollout_rs=seq_mean_k3",
    "algorithm.rollout_correction.rollout_rs_threshold=0.01",
)


def drifting_run(
    last_size: float,
    last_norm: float,
    overrides: tuple[str, ...] = (),
    num_steps: int = 40,
    by_chi2: bool = False,
) -> ReadRun:
    """The effective sample size goes from 0.96 to `last_size`, and the gradient norm from 0.5 to
    `last_norm`, in the second half of the steps."""
    run = make_run(num_steps=num_steps, overrides=overrides)
    rows = {}
    for step, row in run.metrics.items():
        is_late = step > num_steps // 2
        size = last_size if is_late else 0.96
        mismatch = {CHI2: 1 / size - 1} if by_chi2 else {SIZE: size}
        rows[step] = {**row, **mismatch, NORM: last_norm if is_late else 0.5}
    return replace(run, metrics=rows)


def collapses(run: ReadRun) -> list[Finding]:
    return [finding for finding in findings_of(run) if "collapse" in finding.text]


def test_a_falling_sample_size_with_growing_gradients_predicts_a_collapse() -> None:
    run = drifting_run(0.4, 2.5, WEIGHTS)
    first, *_ = findings_of(run)
    assert first.text == (
        "The rollout's policy and the actor's move apart, which is often followed by a collapse: the effective "
        "sample size fell from 96% to 40% of the tokens while the actor's gradient norm rose from 0.5 to 2.5 "
        "(medians of the first and the last 10 steps)."
    )
    assert first.numbers["last_size"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("overrides", "override"),
    [
        (WEIGHTS[1:], WEIGHTS[0]),
        (WEIGHTS, " ".join(REJECTION)),
        ((*WEIGHTS, *REJECTION), "actor_rollout_ref.actor.optim.lr=5e-07"),
        (("algorithm.rollout_correction.preset=bypass_pg_is",), " ".join(REJECTION)),
    ],
)
def test_it_names_the_correction_that_is_not_in_force_yet(
    overrides: tuple[str, ...], override: str
) -> None:
    (found,) = collapses(drifting_run(0.4, 2.5, overrides))
    assert found.overrides == (override,)
    load_config([], [*overrides, *override.split()])


def test_without_weights_the_sample_size_is_that_of_chi2() -> None:
    with_weights = collapses(drifting_run(0.4, 2.5))
    without = collapses(drifting_run(0.4, 2.5, by_chi2=True))
    assert without[0].numbers == pytest.approx(with_weights[0].numbers)


@pytest.mark.parametrize(
    ("last_size", "last_norm", "num_steps"),
    [(0.9, 2.5, 40), (0.4, 0.6, 40), (0.4, 2.5, 16)],
    ids=["the sample size stays", "gradients stay", "few steps"],
)
def test_one_sign_alone_predicts_nothing(
    last_size: float, last_norm: float, num_steps: int
) -> None:
    assert collapses(drifting_run(last_size, last_norm, num_steps=num_steps)) == []


# Other programs on the machine


def disturbed_run(slow: float, percent: float, tokens: float = 1.0, busy: float = 1.0) -> ReadRun:
    """30 steps. The last 10 take `slow` times as long, and processes use `percent` of a core while
    they are busy instead of 90%; the work grows `tokens` times, and processes are busy `busy` times
    as long."""
    run = make_run(num_steps=30, overrides=("trainer.n_gpus_per_node=2",))
    rows = {}
    for step in run.metrics:
        is_slow = step > 20
        rows[step] = {"timing_s/step": 10.0 * (slow if is_slow else 1.0)}
        rows[step]["perf/total_num_tokens"] = 1000.0 * (tokens if is_slow else 1.0)
        for pool, share in {ACTOR: 1.0, CRITIC: 0.2, "reward_cpu": 0.01}.items():
            share *= busy if is_slow else 1.0
            rows[step][f"pool/{pool}/busy_fraction"] = share
            rows[step][f"pool/{pool}/utilization"] = share * (percent if is_slow else 90.0)
    return replace(run, metrics=rows)


def test_steps_that_become_slower_while_utilization_falls_show_outside_load() -> None:
    text = outside_load(disturbed_run(slow=2.0, percent=45.0)) or ""
    assert text.startswith("Outside load: steps ")
    assert " took 20 s each, 2.0 times as long per token as steps " in text
    assert "utilization fell from 90% to 45%" in text
    found = findings_of(disturbed_run(slow=2.0, percent=45.0))
    assert (found[0].text, found[0].overrides) == (text, ())


@pytest.mark.parametrize(
    ("slow", "percent", "tokens"),
    [
        (1.0, 90.0, 1.0),  # nothing happens
        (2.0, 90.0, 1.0),  # slower, with the same utilization: the run itself does more
        (1.0, 45.0, 1.0),  # as fast with less
        (2.0, 45.0, 2.0),  # twice the tokens in twice the time
        (1.4, 60.0, 1.0),  # as much as short steps differ on a machine with few cores
    ],
)
def test_other_changes_are_a_property_of_the_run(
    slow: float, percent: float, tokens: float
) -> None:
    assert outside_load(disturbed_run(slow, percent, tokens)) is None


def test_ranks_that_wait_longer_for_each_other_are_not_outside_load() -> None:
    """From step 21 on, ranks are busy half as long and use half as much: they wait, and do as much
    while they work."""
    assert outside_load(disturbed_run(slow=2.0, percent=90.0, busy=0.5)) is None
    assert outside_load(disturbed_run(slow=2.0, percent=45.0, busy=0.5)) is not None


def test_without_samples_or_with_few_steps_nothing_is_known_about_outside_load() -> None:
    run = disturbed_run(2.0, 45.0)
    for row in run.metrics.values():
        for pool in (ACTOR, CRITIC):
            del row[f"pool/{pool}/utilization"]
    assert outside_load(run) is None
    assert outside_load(make_run(num_steps=0)) is None


@pytest.mark.parametrize(
    "name", ["timing_s/step", "perf/total_num_tokens", f"pool/{ACTOR}/busy_fraction"]
)
def test_a_row_that_lacks_a_number_is_not_a_part_of_a_period(name: str) -> None:
    run = disturbed_run(2.0, 45.0)
    del run.metrics[15][name]
    run.metrics[16][name] = 0.0
    assert (outside_load(run) or "").startswith("Outside load: steps ")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.000551, "551 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (119.0, "119 s"),
        (150.0, "2.5 min"),
    ],
)
def test_a_duration_has_a_unit_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words
