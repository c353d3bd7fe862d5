"""A comparison says what differs, by how much and whether that is noise, and which keys differ."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import write_run

from rolepool.errors import ConfigError, Terminated
from rolepool.report.compare import (
    Difference,
    Line,
    as_table,
    compare,
    differences,
    headline,
    notes_on,
    ratio_of_means,
    read_runs,
    with_unit,
)
from rolepool.report.comparison_page import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    charts_of,
    ticks,
    write_comparison,
)
from rolepool.report.console_logs import read_logs
from rolepool.report.metrics_by_step import finite_values
from rolepool.report.outside_load import outside_load
from rolepool.report.placement_runs import overrides_of, run_placements
from rolepool.trainer.supervisor import wait_for


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    return [
        write_run(home / "standard", num_steps=20),
        write_run(home / "split", "split", num_steps=14, seed=1),
    ]


def line_of(lines: list[Line], measure: str, run: str) -> Line:
    (found,) = [line for line in lines if (line.measure, line.run) == (measure, run)]
    return found


# The bootstrap


def test_samples_of_one_distribution_are_mostly_within_noise() -> None:
    generator = np.random.default_rng(0)
    verdicts = []
    for _ in range(200):
        first, other = generator.normal(2.0, 0.2, size=(2, 40))
        ratio = ratio_of_means(list(first), list(other))
        assert ratio is not None and ratio.low < ratio.value < ratio.high
        verdicts.append(ratio.verdict)
    assert 0.90 <= verdicts.count("within noise") / 200 <= 0.99


@pytest.mark.parametrize(("shift", "verdict"), [(1.2, "more"), (0.85, "less")])
def test_a_shift_is_found_and_its_size_lies_in_the_interval(shift: float, verdict: str) -> None:
    first, other = np.random.default_rng(1).normal(2.0, 0.2, size=(2, 60))
    ratio = ratio_of_means(list(first), list(other * shift))
    assert ratio is not None and ratio.verdict == verdict and ratio.low < shift < ratio.high


def test_the_same_numbers_give_the_same_interval() -> None:
    values = list(np.random.default_rng(2).normal(1.0, 0.1, size=30))
    assert ratio_of_means(values, values[::-1]) == ratio_of_means(values, values[::-1])


def test_few_steps_claim_nothing_and_a_zero_mean_has_no_ratio() -> None:
    few = ratio_of_means([1.0, 1.0, 1.0], [2.0] * 30)
    assert few is not None and (few.value, few.verdict) == (2.0, "too few steps")
    assert ratio_of_means([0.0] * 10, [1.0] * 10) is None


# The numbers


def test_numbers_are_those_of_the_rows_without_warm_up(folders: list[Path]) -> None:
    lines = compare(read_runs(folders))
    for folder, num_dropped in zip(folders, (2, 1), strict=True):
        (metrics,) = read_logs([folder]).values()
        values = list(finite_values(metrics, "timing_s/gen").values())[num_dropped:]
        line = line_of(lines, "timing_s/gen", folder.name)
        expected = (np.mean(values), np.median(values), np.quantile(values, 0.95))
        assert (line.mean, line.p50, line.p95) == pytest.approx(expected)


def test_every_measure_asked_for_is_there(folders: list[Path]) -> None:
    lines = compare(read_runs(folders))
    measures = {line.measure for line in lines if line.run == "split"}
    assert {"timing_s/step", "perf/throughput", "overlap/fraction", "overlap/saved_s"} <= measures
    assert {"pool/critic_pool/busy_fraction", "pool/critic_pool/peak_memory_gb (most)"} <= measures
    assert lines[0].measure == "timing_s/step" and lines[0].ratio is None
    assert line_of(lines, "val-core (last)", "split").mean == pytest.approx(14 / 19)
    assert line_of(lines, "critic/score/mean (last 10%)", "standard").mean == pytest.approx(
        (19 / 24 + 20 / 25) / 2
    )


def test_a_slower_operation_is_found_and_an_equal_one_is_not(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", num_steps=30, seed=3)
    two = write_run(tmp_path / "two", num_steps=30, seed=4, slower={"update_actor": 1.5})
    lines = compare(read_runs([one, two]))
    slower, equal = (
        line_of(lines, f"timing_s/{name}", "two").ratio for name in ("update_actor", "ref")
    )
    assert (
        slower is not None
        and slower.verdict == "more"
        and slower.value == pytest.approx(1.5, rel=0.03)
    )
    assert equal is not None and equal.verdict == "within noise"


def test_a_run_can_be_compared_with_itself(folders: list[Path]) -> None:
    ratios = [line.ratio for line in compare(read_runs([folders[0], folders[0]])) if line.ratio]
    assert ratios and {ratio.value for ratio in ratios} == {1.0}
    assert {ratio.verdict for ratio in ratios} <= {"within noise", "too few steps"}


def test_a_run_without_rows_is_refused(tmp_path: Path, folders: list[Path]) -> None:
    empty = write_run(tmp_path / "empty", num_steps=1)
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"empty: its metrics.jsonl has no rows"):
        compare(read_runs([folders[0], empty]))


# Work that differs


def test_runs_under_different_placements_do_the_same_work(folders: list[Path]) -> None:
    found = differences(read_runs(folders))
    assert [(one.key, one.is_work) for one in found] == [("placement.strategy", False)]
    assert list(notes_on(read_runs(folders))) == []


def test_work_that_differs_is_listed_key_by_key_before_other_keys(
    tmp_path: Path, folders: list[Path]
) -> None:
    changed = ("data.train_batch_size=32", "actor_rollout_ref.rollout.n=2", "trainer.seed=5")
    other = write_run(tmp_path / "other", num_steps=8, overrides=changed)
    runs = read_runs([folders[0], other])
    assert [(one.key, one.is_work) for one in differences(runs)] == [
        ("data.train_batch_size", True),
        ("actor_rollout_ref.rollout.n", True),
        ("trainer.seed", False),
    ]
    assert list(notes_on(runs))[1:] == [
        "  data.train_batch_size: 64 in standard, 32 in other",
        "  actor_rollout_ref.rollout.n: 1 in standard, 2 in other",
    ]
    assert headline(runs, compare(runs)).endswith(
        " with 95% confidence; their work differs in 2 keys"
    )


def test_runs_with_the_same_value_are_named_together() -> None:
    difference = Difference(
        "data.train_batch_size", {"one": "64", "two": "32", "three": "64"}, is_work=True
    )
    assert str(difference) == "data.train_batch_size: 64 in one and three, 32 in two"


def test_names_of_runs_are_no_difference(tmp_path: Path) -> None:
    names = ("trainer.experiment_name", "trainer.default_local_dir", "trainer.project_name")
    runs = [
        write_run(tmp_path / name, num_steps=1, overrides=tuple(f"{key}={name}" for key in names))
        for name in "ab"
    ]
    assert differences(read_runs(runs)) == []


def test_long_values_that_differ_at_their_end_are_told_apart(tmp_path: Path) -> None:
    paths = [f"/models/{'x' * 100}/{name}" for name in ("a", "b")]
    runs = [write_run(tmp_path / path[-1], num_steps=1) for path in paths]
    for run, path in zip(runs, paths, strict=True):
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace("recipes/shapes/qwen2.5-0.5b", path))
    (found,) = [
        one for one in differences(read_runs(runs)) if one.key == "actor_rollout_ref.model.path"
    ]
    assert found.values == dict(zip("ab", paths, strict=True))


def test_a_run_without_config_is_compared_all_the_same(tmp_path: Path, folders: list[Path]) -> None:
    other = write_run(tmp_path / "other", num_steps=6, overrides=("data.train_batch_size=32",))
    (other / "config.yaml").unlink()
    runs = read_runs([folders[0], other])
    assert differences(runs) == []
    assert write_comparison(runs, compare(runs), tmp_path).is_file()


def test_runs_without_spans_or_without_generation_are_compared_all_the_same(
    tmp_path: Path, rolepool: Callable[..., Any]
) -> None:
    one, two = (write_run(tmp_path / name, num_steps=3) for name in ("one", "two"))
    (one / "spans.jsonl").unlink()
    kept = [
        line
        for line in (two / "spans.jsonl").read_text().splitlines()
        if '"operation": "gen"' not in line
    ]
    (two / "spans.jsonl").write_text("\n".join(kept))
    assert rolepool("compare", str(one), str(two)).code == 0
    assert [file.name for file in (tmp_path / "comparison").iterdir()] == ["comparison.html"]


def test_the_command_compares_such_runs_and_says_what_differs(
    tmp_path: Path, folders: list[Path], rolepool: Callable[..., Any]
) -> None:
    other = write_run(tmp_path / "other", num_steps=6, overrides=("data.max_prompt_length=64",))
    ended = rolepool("compare", str(folders[0]), str(other), "--output-dir", str(tmp_path / "out"))
    assert (ended.code, ended.err) == (0, "")
    first, second, third, *_ = ended.out.splitlines()
    assert first.endswith("; their work differs in 1 key")
    assert second == "The work of a step differs, so times cannot be compared directly:"
    assert third == "  data.max_prompt_length: 512 in standard, 64 in other"
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert '<a href="#differences">data.max_prompt_length</a>' in page
    (row,) = re.findall(r"<tr><th><code>data.max_prompt_length</code>.*?</tr>", page)
    assert re.findall(r"<td.*?>(?:<code>)?(.*?)<", row) == ["512", "64", "the work"]


# The command


def test_the_command_prints_a_headline_and_a_table_and_writes_a_page(
    tmp_path: Path, rolepool: Callable[..., Any]
) -> None:
    one = write_run(tmp_path / "a<b>[red]$x$", num_steps=8)
    two = write_run(tmp_path / "two", "split", num_steps=8)
    with (two / "spans.jsonl").open("a") as file:
        file.write('{"step": 9, "oper')
    ended = rolepool("compare", str(one), str(two), "--output-dir", str(tmp_path / "out"))
    assert ended.code == 0
    assert "two: skipped 1 unreadable lines of spans.jsonl" in ended.err
    headline = ended.out.splitlines()[0]
    assert re.fullmatch(
        r"two is 1\.\d\dx slower than a<b>\[red\]\$x\$, 1.\d\d to 1.\d\d with 95% confidence",
        headline,
    )
    assert "timing_s/update_critic" in ended.out and "…" not in ended.out
    assert ended.out.splitlines()[-1] == str(tmp_path / "out" / "comparison.html")
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert re.search(r"<h1>two is 1.*?</h1>", page)
    assert "a&lt;b&gt;[red]$x$" in page and "a<b>" not in page
    assert "src=" not in page and "<script" not in page and "pool/critic_pool/busy_fraction" in page


def test_the_legend_of_the_page_has_every_segment_of_its_lanes(
    tmp_path: Path, folders: list[Path]
) -> None:
    runs = read_runs(folders)
    page = write_comparison(runs, compare(runs), tmp_path).read_text()
    section = page[page.index("A typical step of each run") : page.index("Mean times")]
    legend = section[section.index('<div class="legend">') :]
    segments = set(re.findall(r'<b title="(\w+): ', page))
    assert segments == {
        "gen",
        "reward",
        "values",
        "old_log_prob",
        "ref",
        "update_critic",
        "update_actor",
        "update_weights",
    }
    assert all(f"{name}</span>" in legend for name in (*segments, "waiting"))
    colors = dict(re.findall(r'<i style="background: (#\w+)"></i>(\w+)<', legend))
    assert len(colors) == legend.count("<i ") - 1, "no two operations have the same colour"


# Curves


def test_rewards_and_scores_are_drawn_over_each_other_by_step_and_by_time(
    tmp_path: Path, folders: list[Path]
) -> None:
    runs = read_runs(folders)
    charts = {chart.title: chart for chart in charts_of(runs)}
    titles = [
        "Reward by step",
        "Reward by time",
        "Validation score by step",
        "Validation score by time",
    ]
    assert list(charts) == titles
    for chart in charts.values():
        assert [curve.run for curve in chart.curves] == ["standard", "split"]
        for curve in chart.curves:
            assert all(
                LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in curve.path
            )
    # The same rewards in the same steps, so by step one curve lies on the other; by time, the
    # faster run is ahead.
    by_step, by_time = charts["Reward by step"].curves, charts["Reward by time"].curves
    assert by_step[0].path[:14] == by_step[1].path
    times_s = [sum(finite_values(run.metrics, "timing_s/step").values()) for run in runs.values()]
    ends = [curve.path[-1][0] for curve in by_time]
    starts = [curve.path[0][0] for curve in by_time]
    assert max(ends) == WIDTH - RIGHT and min(starts) == LEFT
    assert (ends[0] > ends[1]) == (times_s[0] > times_s[1])
    page = write_comparison(runs, compare(runs), tmp_path).read_text()
    assert page.count("<polyline") == 8
    assert (
        page.index("Reward by time") < page.index("A typical step") < page.index("Keys that differ")
    )


def test_a_long_run_is_drawn_with_few_points(tmp_path: Path, folders: list[Path]) -> None:
    long = read_runs([folders[0]])["standard"]
    rows = {
        step: {"critic/score/mean": step / 5000, "timing_s/step": 1.0} for step in range(1, 5001)
    }
    runs = {"long": replace(long, metrics=rows), "short": long}
    assert max(len(curve.path) for chart in charts_of(runs) for curve in chart.curves) == MAX_POINTS
    assert write_comparison(runs, compare(runs), tmp_path).stat().st_size < 100_000


@pytest.mark.parametrize(
    "rewards", [[0.0] * 6, [-3.0] * 6, [1e-9] * 6, [5.0], [float("nan"), 1.0], [-1e9, 1e9]]
)
def test_curves_that_are_flat_short_or_extreme_stay_in_their_chart(
    folders: list[Path], rewards: list[float]
) -> None:
    long = read_runs([folders[0]])["standard"]
    rows = {
        step: {"critic/score/mean": reward, "timing_s/step": 1.0}
        for step, reward in enumerate(rewards, 1)
    }
    for chart in charts_of({"one": replace(long, metrics=rows)}):
        assert chart.y_ticks
        (curve,) = chart.curves
        assert all(
            LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in curve.path
        )


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-5, 5, [-4, -2, 0, 2, 4]),
        (0.0, 0.0, [0]),
        (17, 18.9, [17, 17.5, 18, 18.5]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)


# Verdicts


def test_measures_that_differ_significantly_come_first(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", num_steps=30, seed=3)
    two = write_run(tmp_path / "two", num_steps=30, seed=4, slower={"update_actor": 1.5})
    verdicts = [line.ratio.verdict for line in compare(read_runs([one, two])) if line.ratio]
    is_significant = [verdict in ("less", "more") for verdict in verdicts]
    assert is_significant == sorted(is_significant, reverse=True) and len(set(is_significant)) == 2


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (0.5, r"two is 1\.\d\dx faster than one, (1\.\d\d) to (1\.\d\d) with 95% confidence"),
        (1.5, r"two is 1\.\d\dx slower than one, (1\.\d\d) to (1\.\d\d) with 95% confidence"),
        (
            1.0,
            r"no difference can be seen between two and one: [01]\.\d\dx as fast, (0\.\d\d) to (1\.\d\d) with .*",
        ),
    ],
)
def test_the_headline_says_how_much_faster_a_run_is(
    tmp_path: Path, factor: float, expected: str
) -> None:
    one = write_run(tmp_path / "one", num_steps=30, seed=3)
    slower = {"update_actor": factor, "update_critic": factor}
    runs = read_runs([one, write_run(tmp_path / "two", num_steps=30, seed=4, slower=slower)])
    sentence = headline(runs, compare(runs))
    found = re.fullmatch(expected, sentence)
    assert found and float(found[1]) <= float(found[2]), sentence


def test_few_steps_give_no_headline_verdict(tmp_path: Path, folders: list[Path]) -> None:
    runs = read_runs([folders[0], write_run(tmp_path / "few", num_steps=4)])
    assert (
        headline(runs, compare(runs))
        == "no verdict on few and standard: at least 5 steps after the warm-up are needed"
    )


def test_the_verdict_is_withheld_with_the_reason_if_a_run_had_outside_load(
    tmp_path: Path, folders: list[Path]
) -> None:
    disturbed = write_run(tmp_path / "disturbed", num_steps=30)
    slow_down(disturbed, from_step=16)
    runs = read_runs([folders[0], disturbed])
    reason = outside_load(runs["disturbed"])
    assert reason is not None
    lines = compare(runs)
    sentence = "no verdict on disturbed and standard: other programs slowed disturbed down"
    assert headline(runs, lines) == sentence
    assert list(notes_on(runs)) == [f"disturbed: {reason}"]
    assert {line.ratio.verdict for line in lines if line.ratio} == {"outside load"}
    page = write_comparison(runs, lines, tmp_path).read_text()
    assert f"<h1>{sentence}</h1>" in page and f"<li>disturbed: {reason}</li>" in page


def test_the_headline_of_several_runs_is_one_sentence_about_the_first(
    tmp_path: Path, folders: list[Path]
) -> None:
    one = write_run(tmp_path / "one", num_steps=30, seed=3)
    same = write_run(tmp_path / "same", num_steps=30, seed=4)
    fast = write_run(
        tmp_path / "fast", num_steps=30, seed=5, slower={"update_actor": 0.5, "update_critic": 0.5}
    )
    slow = write_run(tmp_path / "slow", num_steps=30, seed=6, slower={"update_actor": 2.0})
    few = write_run(tmp_path / "few", num_steps=3)
    disturbed = write_run(tmp_path / "disturbed", num_steps=30)
    slow_down(disturbed, from_step=16)
    runs = read_runs([one, same, fast, slow, few, disturbed])
    assert re.fullmatch(
        r"compared with one: no difference can be seen to same, fast is 1\.\d\dx faster \(1\.\d\d to 1\.\d\d\), "
        r"slow is 1\.\d\dx slower \(1\.\d\d to 1\.\d\d\), no verdict on few \(too few steps\), "
        r"no verdict on disturbed \(other programs used the machine\)",
        headline(runs, compare(runs)),
    )


def slow_down(folder: Path, from_step: int) -> None:
    """Make the later steps of a run three times as long, in which its GPUs are used a third as
    much."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        slower = 3 if row["step"] >= from_step else 1
        row.update(
            {name: value * slower for name, value in row.items() if name.startswith("timing_s/")}
        )
        row.update(
            {name: value / slower for name, value in row.items() if name.endswith("/utilization")}
        )
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize(
    ("measure", "value", "expected"),
    [
        ("timing_s/gen", 0.00055, "550 µs"),
        ("timing_s/gen", 0.0551, "55.1 ms"),
        ("timing_s/step", 6.2124, "6.21 s"),
        ("overlap/saved_s", 0.0, "0 s"),
        ("overlap/fraction", 0.583, "58%"),
        ("perf/throughput", 12345.6, "12,346 tokens/s"),
        ("pool/a/peak_memory_gb (most)", 4.998, "5 GiB"),
        ("critic/score/mean (last 10%)", 0.8854, "0.885"),
    ],
)
def test_values_have_units_for_people(measure: str, value: float, expected: str) -> None:
    assert with_unit(measure, value) == expected


def test_the_table_names_each_measure_once(folders: list[Path]) -> None:
    table = as_table(compare(read_runs(folders)))
    cells = [cell for cell in table.columns[0].cells if cell]
    assert len(cells) == len(set(cells)) < table.row_count


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["one"],
        ["nowhere", "nothing"],
        ["one", "two", "--", "standard"],
        ["--run", "recipes/demo.yaml", "--", "split"],
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    rolepool: Callable[..., Any], arguments: list[str]
) -> None:
    ended = rolepool("compare", *arguments)
    assert ended.code == 2 and ended.out == "" and len(ended.err.splitlines()) == 1


# Running placements


def test_words_are_strategies_or_lists_of_overrides() -> None:
    assert overrides_of("split") == ["placement.strategy=split"]
    assert overrides_of(
        "placement.strategy=custom,placement.pools.a=[1,1],placement.roles.actor=a"
    ) == [*("placement.strategy=custom", "placement.pools.a=[1,1]", "placement.roles.actor=a")]


def test_a_recipe_that_cannot_run_under_a_placement_is_refused_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "placement: {strategy: split, split: {share: 0.5}}\ntrainer: {n_gpus_per_node: 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        run_placements(str(recipe), [], ["split", "standard"], say=print, wait_for=wait_for)
    assert any(
        "with standard: placement.split.share=0.5" in problem for problem in refused.value.problems
    )
    assert not any("with split" in problem for problem in refused.value.problems)
    assert not (tmp_path / "runs").exists()
    more = ["trainer.seeed=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=3"]
    with pytest.raises(ConfigError) as refused:
        run_placements(
            str(recipe), more, ["split", "placement.split.share=0.4"], say=print, wait_for=wait_for
        )
    first, *_ = [
        problem for problem in refused.value.problems if "with split: trainer.seeed=1" in problem
    ]
    assert "did you mean trainer.seed?" in first
    counts = "with split: actor_rollout_ref.rollout.tensor_model_parallel_size=3: must divide"
    assert any(counts in problem for problem in refused.value.problems), (
        "keys and counts in one round"
    )


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_signal_ends_the_comparison_after_the_run_that_got_it(
    tmp_path: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    error: type[BaseException],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(root / "src"))
    words = ["data.train_files=nowhere.jsonl"]
    said: list[str] = []
    with pytest.raises(error, match="the training run has ended too") as raised:
        run_placements(
            str(root / "recipes/demo.yaml"),
            words,
            ["standard", "split"],
            say=said.append,
            wait_for=lambda process: (wait_for(process)[0], number),
        )
    assert type(raised.value) is error
    assert said == ["training with standard; its output is in runs/compare_demo/standard.log"]
    assert "data.train_files" in (tmp_path / "runs/compare_demo/standard.log").read_text(
        encoding="utf-8"
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_recipe_is_trained_under_placements_and_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, rolepool: Callable[..., Any]
) -> None:
    from rolepool.data.demo import make_demo

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(root / "src"))
    make_demo("runs/demo_data")
    earlier = tmp_path / "runs" / "compare_demo" / "standard"
    earlier.mkdir(parents=True)
    steps = ("trainer.total_training_steps=3", "trainer.test_freq=-1")
    failing = "placement.strategy=split,data.train_files=nowhere.jsonl"
    ended = rolepool(
        "compare",
        "--run",
        str(root / "recipes/demo.yaml"),
        *steps,
        "--",
        "standard",
        failing,
        "split",
    )
    assert ended.code == 2
    name = "strategy=split_data.train_files=nowhere.jsonl"
    assert (
        f"error: {name}: training ended with code 2; the end of runs/compare_demo_2/{name}.log:"
        in ended.err
    )
    assert "data.train_files" in ended.err.splitlines()[-1]
    assert "runs/compare_demo_2/comparison/comparison.html" in ended.out.splitlines()
    (line,) = [line for line in ended.out.splitlines() if line.startswith("perf/throughput")]
    assert "standard" in line
    assert list(earlier.iterdir()) == []
