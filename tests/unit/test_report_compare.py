"""A comparison says what differs, by how much and whether that is noise; unlike work is not compared."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import write_run

from rolepool.errors import ConfigError, Terminated
from rolepool.report.compare import (
    Line,
    as_table,
    check_same_work,
    compare,
    headlines,
    overrides_of,
    ratio_of_means,
    read_runs,
    run_placements,
    with_unit,
    write_comparison,
)
from rolepool.report.findings import outside_load
from rolepool.report.run import finite_values, read_logs
from rolepool.trainer.supervisor import wait_for


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    return [write_run(home / "standard", num_steps=20), write_run(home / "split", "split", num_steps=14, seed=1)]


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
    assert line_of(lines, "critic/score/mean (last 10%)", "standard").mean == pytest.approx((19 / 24 + 20 / 25) / 2)


def test_a_slower_operation_is_found_and_an_equal_one_is_not(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", num_steps=30, seed=3)
    two = write_run(tmp_path / "two", num_steps=30, seed=4, slower={"update_actor": 1.5})
    lines = compare(read_runs([one, two]))
    slower, equal = (line_of(lines, f"timing_s/{name}", "two").ratio for name in ("update_actor", "ref"))
    assert slower is not None and slower.verdict == "more" and slower.value == pytest.approx(1.5, rel=0.03)
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
    check_same_work(read_runs(folders))


def test_work_that_differs_is_refused_key_by_key(tmp_path: Path, folders: list[Path]) -> None:
    changed = ("data.train_batch_size=32", "actor_rollout_ref.rollout.n=2", "trainer.seed=5")
    other = write_run(tmp_path / "other", num_steps=2, overrides=changed)
    with pytest.raises(ConfigError) as refused:
        check_same_work(read_runs([folders[0], other]))
    assert refused.value.problems == (
        "data.train_batch_size: the work of the runs differs (64 in standard, 32 in other); "
        "to compare them anyway, use --force",
        "actor_rollout_ref.rollout.n: the work of the runs differs (1 in standard, 2 in other); "
        "to compare them anyway, use --force",
    )


def test_long_values_that_differ_at_their_end_are_told_apart(tmp_path: Path) -> None:
    paths = [f"/models/{'x' * 100}/{name}" for name in ("a", "b")]
    runs = [write_run(tmp_path / path[-1], num_steps=1) for path in paths]
    for run, path in zip(runs, paths, strict=True):
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace("recipes/shapes/qwen2.5-0.5b", path))
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path"):
        check_same_work(read_runs(runs))


def test_runs_without_spans_or_without_generation_are_compared_all_the_same(
    tmp_path: Path, rolepool: Callable[..., Any]
) -> None:
    one, two = (write_run(tmp_path / name, num_steps=3) for name in ("one", "two"))
    (one / "spans.jsonl").unlink()
    kept = [line for line in (two / "spans.jsonl").read_text().splitlines() if '"operation": "gen"' not in line]
    (two / "spans.jsonl").write_text("\n".join(kept))
    assert rolepool("compare", str(one), str(two)).code == 0
    assert [file.name for file in (tmp_path / "comparison").iterdir()] == ["comparison.html"]


def test_the_command_refuses_such_runs_and_can_be_forced(
    tmp_path: Path, folders: list[Path], rolepool: Callable[..., Any]
) -> None:
    other = write_run(tmp_path / "other", num_steps=6, overrides=("actor_rollout_ref.actor.ppo_epochs=2",))
    arguments = ("compare", str(folders[0]), str(other), "--output-dir", str(tmp_path / "out"))
    refused = rolepool(*arguments)
    assert (refused.code, refused.out, len(refused.err.splitlines())) == (2, "", 2)
    assert "actor_rollout_ref.actor.ppo_epochs: the work of the runs differs (1 in standard, 2 in other)" in refused.err
    assert rolepool(*arguments, "--force").code == 0


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
    assert re.fullmatch(r"two is 1\.\d\dx slower than a<b>\[red\]\$x\$, 1.\d\d to 1.\d\d with 95% confidence", headline)
    assert "timing_s/update_critic" in ended.out and "…" not in ended.out
    assert ended.out.splitlines()[-1] == str(tmp_path / "out" / "comparison.html")
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "<h1>two is 1." in page and "a&lt;b&gt;[red]$x$" in page and "a<b>" not in page
    assert "src=" not in page and "<script" not in page and "pool/critic_pool/busy_fraction" in page


def test_the_legend_of_the_page_has_every_segment_of_its_lanes(tmp_path: Path, folders: list[Path]) -> None:
    runs = read_runs(folders)
    page = write_comparison(runs, compare(runs), tmp_path).read_text()
    legend = page[page.index('<div class="legend">') : page.index("The step with the median duration")]
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
        (1.0, r"no difference can be seen between two and one: [01]\.\d\dx as fast, (0\.\d\d) to (1\.\d\d) with .*"),
    ],
)
def test_the_headline_says_how_much_faster_a_run_is(tmp_path: Path, factor: float, expected: str) -> None:
    one = write_run(tmp_path / "one", num_steps=30, seed=3)
    slower = {"update_actor": factor, "update_critic": factor}
    runs = read_runs([one, write_run(tmp_path / "two", num_steps=30, seed=4, slower=slower)])
    (headline,) = headlines(runs, compare(runs))
    found = re.fullmatch(expected, headline)
    assert found and float(found[1]) <= float(found[2]), headline


def test_few_steps_give_no_headline_verdict(tmp_path: Path, folders: list[Path]) -> None:
    runs = read_runs([folders[0], write_run(tmp_path / "few", num_steps=4)])
    (headline,) = headlines(runs, compare(runs))
    assert headline == "no verdict on few and standard: at least 5 steps after the warm-up are needed"


def test_the_verdict_is_withheld_with_the_reason_if_a_run_had_outside_load(tmp_path: Path, folders: list[Path]) -> None:
    disturbed = write_run(tmp_path / "disturbed", num_steps=30)
    slow_down(disturbed, from_step=16)
    runs = read_runs([folders[0], disturbed])
    reason = outside_load(runs["disturbed"])
    assert reason is not None
    lines = compare(runs)
    assert [*headlines(runs, lines)] == [f"no verdict on disturbed and standard. disturbed: {reason}"]
    assert {line.ratio.verdict for line in lines if line.ratio} == {"outside load"}


def slow_down(folder: Path, from_step: int) -> None:
    """Make the later steps of a run three times as long, in which its GPUs are used a third as much."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        slower = 3 if row["step"] >= from_step else 1
        row.update({name: value * slower for name, value in row.items() if name.startswith("timing_s/")})
        row.update({name: value / slower for name, value in row.items() if name.endswith("/utilization")})
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
def test_a_wrong_command_line_is_answered_in_one_line(rolepool: Callable[..., Any], arguments: list[str]) -> None:
    ended = rolepool("compare", *arguments)
    assert ended.code == 2 and ended.out == "" and len(ended.err.splitlines()) == 1


# Running placements


def test_words_are_strategies_or_lists_of_overrides() -> None:
    assert overrides_of("split") == ["placement.strategy=split"]
    assert overrides_of("placement.strategy=custom,placement.pools.a=[1,1],placement.roles.actor=a") == [
        *("placement.strategy=custom", "placement.pools.a=[1,1]", "placement.roles.actor=a")
    ]


def test_a_recipe_that_cannot_run_under_a_placement_is_refused_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("placement: {strategy: split, split: {share: 0.5}}\ntrainer: {n_gpus_per_node: 2}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        run_placements(str(recipe), [], ["split", "standard"], say=print, wait_for=wait_for)
    assert any("with standard: placement.split.share=0.5" in problem for problem in refused.value.problems)
    assert not any("with split" in problem for problem in refused.value.problems)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_ends_the_comparison_after_the_run_that_got_it(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, error: type[BaseException]
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
    assert "data.train_files" in (tmp_path / "runs/compare_demo/standard.log").read_text(encoding="utf-8")


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
    ended = rolepool("compare", "--run", str(root / "recipes/demo.yaml"), *steps, "--", "standard", failing, "split")
    assert ended.code == 2
    name = "strategy=split_data.train_files=nowhere.jsonl"
    assert f"error: {name}: training ended with code 2; the end of runs/compare_demo_2/{name}.log:" in ended.err
    assert "data.train_files" in ended.err.splitlines()[-1]
    assert "runs/compare_demo_2/comparison/comparison.html" in ended.out.splitlines()
    (line,) = [line for line in ended.out.splitlines() if line.startswith("perf/throughput")]
    assert "standard" in line
    assert list(earlier.iterdir()) == []
