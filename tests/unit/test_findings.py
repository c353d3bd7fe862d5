"""What is said about a run, on runs whose numbers are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from report_runs import ACTOR, CALLS, CRITIC, make_run

from rolepool.config import load_config
from rolepool.config.schema import all_keys
from rolepool.metrics.spans import step_bounds
from rolepool.placement.roles import ROLE_SPECS
from rolepool.report.findings import Finding, by_step, duration, find, outside_load, replayed_step_s, summarise
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
    assert idle.overrides == ("placement.split.actor_gpus_per_node=3",)
    assert idle.gain_s == pytest.approx(8 / 3)
    assert overlap.text == "Pools that worked at the same time saved 2 s per step; a step took 10 s."
    assert overlap.numbers == pytest.approx({"saved_s": 2.0, "step_s": 10.0})


def test_the_estimate_sees_that_a_smaller_pool_becomes_the_slow_one() -> None:
    """With one GPU the critic would take 6 s for values, 8 s for its update, and keep the actor waiting."""
    run = make_run(seconds={"values": 3.0, "update_critic": 4.0})
    grouped = by_step(run.spans)
    assert replayed_step_s(grouped, {}) == pytest.approx(11.0)
    assert replayed_step_s(grouped, {ACTOR: 2 / 3, CRITIC: 2.0}) == pytest.approx(14.0)
    idle, *_ = findings_of(run)
    assert idle.overrides == ("placement.strategy=standard", "placement.split.share=0.5")


def test_a_division_that_the_batch_sizes_do_not_allow_says_what_else_to_change() -> None:
    sizes = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    idle, *_ = findings_of(make_run(overrides=sizes))
    assert idle.overrides == ("placement.split.actor_gpus_per_node=3",)
    assert (
        "Another change is needed as well: data.train_batch_size=16: 16 sequences cannot be split into 3" in idle.text
    )


def test_two_gpus_cannot_be_divided_in_another_way() -> None:
    idle, *_ = findings_of(make_run(overrides=("trainer.n_gpus_per_node=2",)))
    assert idle.text.startswith("critic_pool was idle 80% of the time, and no other split of these GPUs")
    assert idle.overrides == ("placement.strategy=standard", "placement.split.share=0.5")


def test_pools_on_nodes_of_their_own_are_divided_by_nodes() -> None:
    nodes = ("trainer.nnodes=4", "trainer.n_gpus_per_node=1", "placement.split.axis=node")
    idle, *_ = findings_of(make_run(overrides=nodes))
    assert idle.overrides == ("placement.split.actor_nodes=3",)


def test_an_idle_pool_that_the_user_wrote_out_is_to_be_smaller() -> None:
    pools = ("placement.strategy=custom", f"placement.pools.{ACTOR}=[3]", f"placement.pools.{CRITIC}=[1]")
    pools += ("placement.pools.more=[1]", "trainer.n_gpus_per_node=5", "actor_rollout_ref.actor.use_kl_loss=true")
    roles = (f"placement.roles.actor_rollout={ACTOR}", f"placement.roles.critic={CRITIC}", "placement.roles.ref=more")
    idle, *_ = findings_of(make_run(overrides=(*pools, *roles)))
    assert "critic_pool was idle 80% of the time: give it fewer GPUs or one more role." in idle.text
    assert idle.overrides == ()  # one GPU is the least
    larger = (*pools, *roles, f"placement.pools.{CRITIC}=[4]", "trainer.n_gpus_per_node=8")
    assert findings_of(make_run(overrides=larger))[0].overrides == (f"placement.pools.{CRITIC}=[2]",)


def test_a_slow_rank_is_named_with_what_the_others_waited() -> None:
    """One rank generates 2 s longer, which makes a step of 12 s."""
    (slow,) = [finding for finding in findings_of(make_run(late={("gen", 1): 2.0})) if "slowest" in finding.text]
    assert slow.text == f"In gen the other rank of {ACTOR} waited 2 s per step (17%) for the slowest rank."
    assert slow.numbers == pytest.approx({"waited_s": 2.0, "step_s": 12.0})
    assert slow.overrides == ("data.max_response_length=256",)
    assert slow.gain_s == pytest.approx(1.0)  # equal ranks would both end after 5 s, not after 4 and 6 s


@pytest.mark.parametrize(
    ("overrides", "override"),
    [
        (("trainer.balance_batch=false",), "trainer.balance_batch=true"),
        ((), "actor_rollout_ref.actor.use_dynamic_bsz=true"),
        (("actor_rollout_ref.actor.use_dynamic_bsz=true",), "data.train_batch_size=24"),
    ],
)
def test_an_uneven_update_names_what_is_not_in_force_yet(overrides: tuple[str, ...], override: str) -> None:
    found = findings_of(make_run(overrides=overrides, late={("update_actor", 0): 1.0}))
    assert [finding.overrides for finding in found if "slowest" in finding.text] == [(override,)]


def test_a_slow_driver_is_named() -> None:
    (found,) = [finding for finding in findings_of(make_run(seconds={"adv": 2.5})) if "driver" in finding.text]
    assert found.text.startswith(
        "20% of a step's critical path is not work in a pool, but the driver (2.5 s) and hand-overs"
    )
    assert found.numbers == pytest.approx({"share": 0.2, "driver_s": 2.5, "hand_over_s": 0.0, "step_s": 12.5})
    assert found.overrides == ("data.train_batch_size=24 actor_rollout_ref.actor.ppo_mini_batch_size=24",)
    assert found.gain_s == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("set_by", "used", "words", "pool", "override"),
    [
        ("rows=6", 79.0, "1% was free): a longer batch may not fit", ACTOR, "rows=3"),
        ("rows=null", 79.0, "1% was free): a longer batch may not fit", ACTOR, "rows=1"),
        ("rows=6", 40.0, "50% was free): larger micro-batches would be faster", CRITIC, "rows=12"),
        ("tokens=8192", 40.0, "50% was free): larger micro-batches would be faster", CRITIC, "tokens=16384"),
    ],
)
def test_memory_that_runs_short_or_lies_idle_is_named(
    set_by: str, used: float, words: str, pool: str, override: str
) -> None:
    section = {ACTOR: "actor_rollout_ref.actor", CRITIC: "critic"}[pool]
    names = {"rows": "ppo_micro_batch_size_per_gpu", "tokens": "ppo_max_token_len_per_gpu"}
    key, value = set_by.split("=")
    overrides = (f"{section}.{names[key]}={value}", f"{section}.use_dynamic_bsz={str(key == 'tokens').lower()}")
    monitor = [sample(10.0, 80.0, pool), sample(used, 80.0, pool)]
    (found,) = [one for one in findings_of(make_run(overrides=overrides, monitor=monitor)) if "GiB" in one.text]
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
    copied = {override for run in runs for finding in findings_of(run) for override in finding.overrides}
    assert len(copied) > 6
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


# One pool

ONE_POOL = ("placement.strategy=standard",)
ROLES = {"gen": "rollout", "values": "critic", "old_log_prob": "actor", "update_critic": "critic"}


def make_one_pool_run(overrides: tuple[str, ...] = (), device: str | None = None) -> Run:
    """The run of `CALLS`, in one pool: a step of 12 s, in which the critic's operations take 1 s each."""
    calls = [(name, pool if pool == "driver" else "global_pool", *rest) for name, pool, *rest in CALLS]
    run = make_run(overrides=(*ONE_POOL, *overrides), calls_made=calls)  # type: ignore[arg-type]
    spans = []
    for each in run.spans:
        changed = {"role": ROLES.get(each.operation, "actor"), "device": device or each.span.device}
        spans.append(each._replace(span=each.span._replace(**changed)))
    return replace(run, spans=spans)


def test_one_pool_is_told_what_two_would_bring_and_under_which_assumption() -> None:
    """In two pools, values runs beside old_log_prob (2 s) and update_critic beside update_actor: 4 + 2 + 4 s. With
    half the GPUs and twice the time that is 20 s."""
    (found,) = findings_of(make_one_pool_run())
    assert found.text == (
        "All roles are in one pool, so operations ran one after another. In two pools a step would take 10 s instead "
        "of 12 s if operations took as long on 2 and 2 GPUs as on 4, and 20 s if they took twice as long on half of "
        "them. Two pools are faster if that factor is below 1.2 (an estimate: the recorded calls, replayed in two "
        "pools)."
    )
    assert (found.overrides, found.gain_s) == (("placement.strategy=split",), pytest.approx(2.0))


def test_two_pools_would_share_a_single_slot_and_a_cpu_run_hears_nothing_of_gpus() -> None:
    (found,) = findings_of(make_one_pool_run(("trainer.n_gpus_per_node=1",), device="cpu"))
    assert "if operations that share the CPU slot took as long as each alone" in found.text
    assert "GPU" not in found.text
    assert found.overrides == ("placement.strategy=split placement.split.share=0.5",)


def test_one_pool_without_a_critic_has_nothing_to_split() -> None:
    assert findings_of(make_one_pool_run(("algorithm.adv_estimator=grpo",))) == []


# Other programs on the machine


def disturbed_run(slow: float, percent: float, tokens: float = 1.0) -> Run:
    """30 steps. In the last 10, generation takes `slow` times as long, and processes use `percent` of a core while they
    are busy instead of 90%; the work grows `tokens` times."""
    run = make_run(num_steps=30, overrides=("trainer.n_gpus_per_node=2",))
    spans, rows, shift_s = [], {}, 0.0
    for step, (start_s, end_s) in step_bounds(run.spans).items():
        factor = slow if step > 20 else 1.0
        for each in (one for one in run.spans if one.step == step):
            times = {
                name: start_s + shift_s + factor * (getattr(each.span, name) - start_s) for name in ("start_s", "end_s")
            }
            spans.append(each._replace(span=each.span._replace(**times)))
        rows[step] = {"perf/total_num_tokens": 1000.0 * (tokens if step > 20 else 1.0)}
        shift_s += (factor - 1) * (end_s - start_s)
    bounds = step_bounds(spans)
    busy = {ACTOR: 1.0, CRITIC: 0.2}
    monitor = []
    for second in range(int(bounds[1][0]), int(bounds[30][1])):
        used = 90.0 if second < bounds[21][0] else percent
        one = {"pid": 1, "rank": 0, "roles": [], "memory_bytes": 0}
        processes = [{**one, "pool": pool, "cpu_percent": used * share} for pool, share in busy.items()]
        monitor.append({"time_s": float(second), "node": "n", "gpus": [], "processes": processes})
    return replace(run, spans=spans, metrics=rows, monitor=monitor)


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
    ],
)
def test_other_changes_are_a_property_of_the_run(slow: float, percent: float, tokens: float) -> None:
    assert outside_load(disturbed_run(slow, percent, tokens)) is None


def test_ranks_that_wait_longer_for_each_other_are_not_outside_load() -> None:
    """From step 21 on, ranks are busy half as long and use half as much: they wait, and do as much while they work."""
    run = disturbed_run(slow=2.0, percent=45.0)
    spans = []
    for each in run.spans:
        end_s = each.span.end_s - (each.span.duration_s / 2 if each.step > 20 else 0.0)
        spans.append(each._replace(span=each.span._replace(end_s=end_s)))
    assert outside_load(replace(run, spans=spans)) is None


def test_without_samples_or_with_few_steps_nothing_is_known_about_outside_load() -> None:
    assert outside_load(replace(disturbed_run(2.0, 45.0), monitor=[])) is None
    assert outside_load(make_run(num_steps=0)) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0 s"), (0.000551, "551 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (119.0, "119 s"), (150.0, "2.5 min")],
)
def test_a_duration_has_a_unit_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words
