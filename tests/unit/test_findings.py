"""What is said about a run, on runs whose numbers are known."""

from __future__ import annotations

from typing import Any

import pytest
from report_runs import ACTOR, CRITIC, make_run

from rolepool.config import load_config
from rolepool.config.schema import all_keys
from rolepool.metrics.spans import step_bounds
from rolepool.placement.roles import ROLE_SPECS
from rolepool.report.findings import Finding, by_step, find, replayed_step_s, summarise
from rolepool.report.run import Run


def findings_of(run: Run) -> list[Finding]:
    grouped = by_step(run.spans)
    return find(run, summarise(grouped, step_bounds(run.spans)), grouped)


def sample(used_gib: float, total_gib: float, pool: str) -> dict[str, Any]:
    memory = {"memory_bytes": int(used_gib * 2**30), "memory_total_bytes": int(total_gib * 2**30)}
    gpu = {"index": 0, "utilization": 90.0, "power_w": 1.0, "pools": [pool], **memory}
    return {"time_s": 0.0, "node": "n", "gpus": [gpu], "processes": []}


def test_an_idle_pool_is_told_which_division_would_shorten_the_step_and_to_what() -> None:
    """The critic works 2 of 10 s. With 3 of 4 GPUs: gen 8/3 s, values (twice as long) 2 s, update_actor 8/3 s."""
    idle, overlap = findings_of(make_run())
    assert idle.text == (
        "critic_pool was idle 80% of the time. With placement.split.actor_gpus_per_node=3 a step would take about "
        "7.33 s instead of 10 s (an estimate: the measured spans, scaled linearly)."
    )
    assert idle.numbers == pytest.approx({"idle_fraction": 0.8, "step_s": 10.0, "estimated_step_s": 22 / 3})
    assert idle.keys == ("placement.split.actor_gpus_per_node=3",)
    assert overlap.text == "Pools that worked at the same time saved 2 s per step; a step took 10 s."
    assert overlap.numbers == pytest.approx({"saved_s": 2.0, "step_s": 10.0})


def test_the_estimate_sees_that_a_smaller_pool_becomes_the_slow_one() -> None:
    """With one GPU the critic would take 6 s for values, 8 s for its update, and keep the actor waiting."""
    run = make_run(seconds={"values": 3.0, "update_critic": 4.0})
    grouped = by_step(run.spans)
    assert replayed_step_s(grouped, {}) == pytest.approx(11.0)
    assert replayed_step_s(grouped, {ACTOR: 2 / 3, CRITIC: 2.0}) == pytest.approx(14.0)
    idle, *_ = findings_of(run)
    assert idle.keys == ("placement.strategy=standard", "placement.split.share=0.5")


def test_a_division_that_the_batch_sizes_do_not_allow_says_what_else_to_change() -> None:
    sizes = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    idle, *_ = findings_of(make_run(overrides=sizes))
    assert idle.keys == ("placement.split.actor_gpus_per_node=3",)
    assert (
        "Another change is needed as well: data.train_batch_size=16: 16 sequences cannot be split into 3" in idle.text
    )


def test_two_gpus_cannot_be_divided_in_another_way() -> None:
    idle, *_ = findings_of(make_run(overrides=("trainer.n_gpus_per_node=2",)))
    assert idle.text.startswith("critic_pool was idle 80% of the time, and no other split of these GPUs")
    assert idle.keys == ("placement.strategy=standard", "placement.split.share=0.5")


def test_pools_on_nodes_of_their_own_are_divided_by_nodes() -> None:
    nodes = ("trainer.nnodes=4", "trainer.n_gpus_per_node=1", "placement.split.axis=node")
    idle, *_ = findings_of(make_run(overrides=nodes))
    assert idle.keys == ("placement.split.actor_nodes=3",)


def test_an_idle_pool_that_the_user_wrote_out_is_to_be_smaller() -> None:
    pools = ("placement.strategy=custom", f"placement.pools.{ACTOR}=[3]", f"placement.pools.{CRITIC}=[1]")
    pools += ("placement.pools.more=[1]", "trainer.n_gpus_per_node=5", "actor_rollout_ref.actor.use_kl_loss=true")
    roles = (f"placement.roles.actor_rollout={ACTOR}", f"placement.roles.critic={CRITIC}", "placement.roles.ref=more")
    idle, *_ = findings_of(make_run(overrides=(*pools, *roles)))
    assert idle.keys == ("placement.pools",)


def test_a_slow_rank_is_named_with_what_the_others_waited() -> None:
    """One rank generates 2 s longer, which makes a step of 12 s."""
    (slow,) = [finding for finding in findings_of(make_run(late={("gen", 1): 2.0})) if "slowest" in finding.text]
    assert slow.text == f"In gen the other rank of {ACTOR} waited 2 s per step (17%) for the slowest rank."
    assert slow.numbers == pytest.approx({"waited_s": 2.0, "step_s": 12.0})
    assert slow.keys == ("data.max_response_length",)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("trainer.balance_batch=false",), "trainer.balance_batch=true"),
        ((), "actor_rollout_ref.actor.use_dynamic_bsz=true"),
        (("actor_rollout_ref.actor.use_dynamic_bsz=true",), "data.train_batch_size"),
    ],
)
def test_an_uneven_update_names_what_is_not_in_force_yet(overrides: tuple[str, ...], key: str) -> None:
    found = findings_of(make_run(overrides=overrides, late={("update_actor", 0): 1.0}))
    assert [finding.keys for finding in found if "slowest" in finding.text] == [(key,)]


def test_a_slow_driver_is_named() -> None:
    (found,) = [finding for finding in findings_of(make_run(seconds={"adv": 2.5})) if "driver" in finding.text]
    assert found.text.startswith(
        "20% of a step's critical path is not work in a pool, but the driver (2.5 s) and hand-overs"
    )
    assert found.numbers == pytest.approx({"share": 0.2, "driver_s": 2.5, "hand_over_s": 0.0, "step_s": 12.5})


@pytest.mark.parametrize(
    ("used", "words", "pool", "key"),
    [
        (
            79.0,
            "1% was free): a longer batch may not fit",
            ACTOR,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        (40.0, "50% was free): larger micro-batches would be faster", CRITIC, "critic.ppo_micro_batch_size_per_gpu"),
    ],
)
def test_memory_that_runs_short_or_lies_idle_is_named(used: float, words: str, pool: str, key: str) -> None:
    monitor = [sample(10.0, 80.0, pool), sample(used, 80.0, pool)]
    (found,) = [finding for finding in findings_of(make_run(monitor=monitor)) if "GiB" in finding.text]
    assert found.text.startswith(f"{pool} used at most {used} of 80.0 GiB of a GPU ({words}")
    assert found.keys == (key,)


def test_nothing_is_said_about_memory_that_is_well_used_or_whose_size_is_unknown() -> None:
    unknown = sample(79.0, 80.0, ACTOR)
    del unknown["gpus"][0]["memory_total_bytes"]
    for monitor in ([sample(60.0, 80.0, ACTOR)], [unknown]):
        assert not [finding for finding in findings_of(make_run(monitor=monitor)) if "GiB" in finding.text]


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
    named = {key for run in runs for finding in findings_of(run) for key in finding.keys}
    batched = [keys for spec in ROLE_SPECS.values() for _, keys in spec.batched]
    named |= {"placement.pools", *(keys.rows for keys in batched), *(f"{keys.by_tokens}=true" for keys in batched)}
    named |= {spec.memory_key for spec in ROLE_SPECS.values() if spec.memory_key}
    assert {key.partition("=")[0] for key in named} <= {*all_keys()}
    for override in [key for key in named if "=" in key]:
        load_config([], ["placement.strategy=split", override])
