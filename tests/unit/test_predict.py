"""`rolepool predict`: what it prints for run folders and console logs, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from synthetic_runs import write_run

from commands import Outcome
from rolepool.report.predicted import other_placements
from rolepool.report.run import read_run

Command = Callable[..., Outcome]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run folders of the same models: one pool, and two pools."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        strategy: str(write_run(folder / strategy, strategy)) for strategy in ("standard", "split")
    }


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A console log as verl writes it: 8 GPUs in one pool, with a critic and a reference."""
    file = tmp_path_factory.mktemp("logs") / "verl.log"
    times = {
        "gen": 20.0,
        "values": 4.0,
        "old_log_prob": 5.0,
        "ref": 5.0,
        "adv": 0.2,
        "update_critic": 9.0,
    }
    times |= {"update_actor": 12.0, "reward": 0.1, "step": 55.3}
    fields = " - ".join(f"timing_s/{name}:{seconds}" for name, seconds in times.items())
    lines = [
        f"(main pid=1) step:{step} - perf/total_num_tokens:400000 - {fields}\n"
        for step in range(1, 8)
    ]
    lines.append(
        f"(main pid=1) step:8 - perf/total_num_tokens:nan - {fields.replace('20.0', 'nan')}\n"
    )
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


def rows_of(out: str) -> dict[str, float]:
    """The label and the predicted seconds of each row of the table."""
    found = re.findall(r"^(\S.*?) +([\d.]+) s +[\d.]+ s +[\d.]+ s ", out, re.MULTILINE)
    return {label: float(seconds) for label, seconds in found}


# Placements


def test_placements_are_predicted_with_pools_critical_path_and_measured_times(
    rolepool: Command, runs: dict[str, str]
) -> None:
    done = rolepool(
        "predict", *runs.values(), "--measured", *runs.values(), "--", "standard", "split"
    )
    assert (done.code, done.err) == (0, "")
    times = rows_of(done.out)
    assert times == pytest.approx({"standard": 6.2, "split": 7.7}, rel=0.05)
    assert "actor_rollout_ref_pool [2] 100%, critic_pool [2]" in done.out
    errors = [int(percent) for percent in re.findall(r" ([+-]\d+)%$", done.out, re.MULTILINE)]
    assert len(errors) == 2
    assert all(abs(error) <= 3 for error in errors)


def test_a_placement_may_have_keys_and_another_size(
    rolepool: Command, runs: dict[str, str]
) -> None:
    word = (
        "placement.strategy=split trainer.n_gpus_per_node=8 placement.split.actor_gpus_per_node=4"
    )
    done = rolepool("predict", runs["standard"], "--", "standard", word)
    assert "[4]" in done.out
    assert len(re.findall(r"^\S.* s  ", done.out, re.MULTILINE)) >= 2
    uneven = rolepool("predict", runs["standard"], "--inventory", "2,2", "--", "split")
    assert (uneven.code, "actor_rollout_ref_pool [2]" in uneven.out) == (0, True)
    assert "note: the network between nodes was not measured" in uneven.err


def test_what_is_impossible_is_said_and_the_others_are_predicted(
    rolepool: Command, runs: dict[str, str]
) -> None:
    bad = "split placement.split.actor_gpus_per_node=3"
    done = rolepool("predict", runs["standard"], "--", "standard", bad)
    assert done.code == 0
    assert list(rows_of(done.out)) == ["standard"]
    assert (
        f"error: {bad}: data.train_batch_size=64: 64 sequences cannot be split into 3" in done.err
    )
    alone = rolepool("predict", runs["standard"], "--", bad)
    assert (alone.code, alone.out) == (2, "")


# What if


def test_other_work_changes_the_prediction(rolepool: Command, runs: dict[str, str]) -> None:
    def step_s(*words: str) -> float:
        done = rolepool("predict", *runs.values(), *words, "--", "standard")
        assert done.code == 0, done.err
        return rows_of(done.out)["standard"]

    now_s = step_s()
    assert step_s("--set", "data.train_batch_size=128") > 1.3 * now_s
    assert step_s("--set", "critic.ppo_epochs=2") > 1.2 * now_s
    assert step_s("--set", "data.max_response_length=1024") > 1.3 * now_s
    assert step_s("--speed", "rollout=2") == pytest.approx(
        now_s - 0.5, abs=0.1
    )  # generation takes 1 s
    assert step_s("--speed", "update_actor=2", "critic=1000") < now_s - 2


def test_a_measured_run_of_other_work_is_not_compared(
    rolepool: Command, runs: dict[str, str]
) -> None:
    words = ("--set", "data.train_batch_size=128", "--measured", runs["standard"])
    done = rolepool("predict", runs["standard"], *words, "--", "standard")
    assert (done.code, "measured" in done.out) == (0, False)


# Search


def test_the_search_prints_the_best_placements_with_overrides_and_why(
    rolepool: Command, runs: dict[str, str]
) -> None:
    done = rolepool("predict", *runs.values(), "--search")
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert done.err.startswith(
        "note: the profile has pools of 2 to 4 ranks; times of other sizes (1) are extrapolated"
    )
    times = rows_of(done.out)
    assert list(times) == ["1", "2", "3", "4", "5"]
    assert list(times.values()) == sorted(times.values())
    assert re.findall(r"^(\d): ", done.out, re.MULTILINE) == list(times)
    assert "1: placement.strategy=standard\n" in done.out
    assert "The best placement takes " in done.out


def test_the_search_may_get_other_gpus_and_another_objective(
    rolepool: Command, runs: dict[str, str]
) -> None:
    for words in (
        ("--gpus", "8"),
        ("--inventory", "4,4"),
        ("--inventory", "2x4"),
        ("--objective", "throughput_per_gpu"),
    ):
        done = rolepool("predict", *runs.values(), "--search", *words)
        assert (done.code, len(rows_of(done.out))) == (0, 5), words
    per_gpu = re.findall(r" ([\d,]+)  actor", done.out)
    assert per_gpu == sorted(per_gpu, key=lambda text: -int(text.replace(",", "")))


def test_scaling_has_a_row_for_each_number_of_gpus_and_a_plot(
    rolepool: Command, runs: dict[str, str], tmp_path: Path
) -> None:
    picture = tmp_path / "scaling.png"
    done = rolepool("predict", *runs.values(), "--scaling", "1,2,4,8,16", "-o", str(picture))
    assert done.code == 0
    times = rows_of(done.out)
    assert list(times) == ["1", "2", "4", "8", "16"]
    assert list(times.values()) == sorted(times.values(), reverse=True)
    assert "2: trainer.n_gpus_per_node=2 placement.strategy=" in done.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert done.out.rstrip().endswith(str(picture))


# Console logs


def test_a_verl_log_is_a_coarse_profile(rolepool: Command, log: str) -> None:
    done = rolepool("predict", log, "--gpus", "8", "--", "standard", "split")
    assert done.code == 0, done.err
    times = rows_of(done.out)
    assert times["standard"] == pytest.approx(55.2, rel=0.05)
    assert (
        "note: the work inside of operations (micro-batches, decode steps, tokens) was not recorded"
        in done.err
    )


# The report page


def test_the_page_has_nothing_to_predict_without_a_schedule_or_spans(
    runs: dict[str, str], tmp_path: Path
) -> None:
    own, *others = other_placements(read_run(runs["split"]))
    assert own.plan.sizes_in_words == "actor_rollout_ref_pool [2], critic_pool [2]"
    assert own.step_s == pytest.approx(7.7, rel=0.05)
    assert all("placement.strategy=" in one.name for one in others)
    assert len(others) >= 3
    older = Path(shutil.copytree(runs["split"], tmp_path / "older"))
    history = json.loads((older / "plan.json").read_text(encoding="utf-8"))
    del history["plans"][0]["schedule"]
    (older / "plan.json").write_text(json.dumps(history), encoding="utf-8")
    assert other_placements(read_run(older)) == []
    (older / "spans.jsonl").write_text("", encoding="utf-8")
    shutil.copy(Path(runs["split"]) / "plan.json", older)
    assert other_placements(read_run(older)) == []


# Bad input


def one_line(done: Outcome) -> str:
    assert done.code == 2
    assert "Traceback" not in done.err
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    return lines[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "give placements after `--`, such as `-- standard split`, or --search, or --scaling"),
        (("--search", "--", "split"), "give placements after `--`"),
        (("--search", "--scaling", "1,2"), "give placements after `--`"),
        (
            ("--search", "--gpus", "2", "--inventory", "2"),
            "argument --inventory: not allowed with argument --gpus",
        ),
        (("--search", "--gpus", "0"), "at least 1 GPU"),
        (("--search", "--gpus", "-4"), "write GPUs per node"),
        (("--search", "--gpus", "many"), "argument --gpus: invalid int value: 'many'"),
        (("--search", "--inventory", "8,x"), "write GPUs per node"),
        (("--scaling", "1,two"), "write GPUs per node"),
        (("--scaling", ""), "write GPUs per node"),
        (("--search", "--objective", "money"), "argument --objective: invalid choice: 'money'"),
        (("--search", "--gpu-memory", "lots"), "--gpu-memory 'lots': write the memory of one GPU"),
        (
            ("--search", "--gpu-memory", "1"),
            "no placement of these GPUs divides the batches and fits in memory",
        ),
        (("--search", "--set", "data.nothing=1"), "data.nothing"),
        (("--search", "--set", "data.train_batch_size=many"), "data.train_batch_size=many"),
        (("--search", "--speed", "rollout"), "--speed rollout"),
        (("--search", "--speed", "rollout=fast"), "--speed rollout=fast"),
        (("--search", "--speed", "rollout=0"), "--speed rollout=0"),
        (("--search", "--speed", "rollout=-1"), "--speed rollout=-1"),
        (("--search", "--speed", "rollout=nan"), "--speed rollout=nan"),
        (
            ("--search", "--speed", "driver=2"),
            "--speed driver: is no role and no operation; use one of",
        ),
        (("--search", "--measured", "nowhere"), "nowhere"),
        (("--scaling", "4", "-o", "/proc/scaling.png"), "/proc/scaling.png: cannot be written"),
        (("--scaling", "4", "-o", "scaling.txt"), "scaling.txt: cannot be written"),
        (
            ("--", "nonsense"),
            "nonsense: placement.strategy=nonsense: must be one of standard, split",
        ),
        (("--", "split", "--search"), "--search: placement.strategy=--search"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(
    rolepool: Command, runs: dict[str, str], words: tuple[str, ...], expected: str
) -> None:
    done = rolepool("predict", runs["standard"], *words)
    if words == ("--", "split", "--search"):  # after `--` there are only placements
        assert expected in done.err
        return
    assert expected in one_line(done)


def test_what_is_no_run_is_refused(
    rolepool: Command, runs: dict[str, str], log: str, tmp_path: Path
) -> None:
    assert "nowhere" in one_line(rolepool("predict", "nowhere", "--search"))
    assert "the following arguments are required: RUN|LOG" in one_line(
        rolepool("predict", "--search")
    )
    assert "give it with --gpus" in one_line(rolepool("predict", log, "--search"))
    (tmp_path / "empty").mkdir()
    assert "has no config.yaml" in one_line(
        rolepool("predict", str(tmp_path / "empty"), "--search")
    )
    (tmp_path / "text.log").write_text("nothing of use\n", encoding="utf-8")
    assert "has no line `step:N" in one_line(
        rolepool("predict", str(tmp_path / "text.log"), "--gpus", "8", "--search")
    )


def test_damaged_runs_are_refused(rolepool: Command, runs: dict[str, str], tmp_path: Path) -> None:
    for name, text, expected in (
        ("spans.jsonl", "", "has no config, plan or spans"),
        ("plan.json", "{", "has no config, plan or spans"),
        ("config.yaml", "- 1", "has no config, plan or spans"),
        ("config.yaml", "data: {nothing: 1}", "data.nothing"),
    ):
        damaged = Path(shutil.copytree(runs["standard"], tmp_path / "damaged"))
        (damaged / name).write_text(text, encoding="utf-8")
        assert expected in one_line(rolepool("predict", str(damaged), "--search")), name
        shutil.rmtree(damaged)


def test_runs_of_different_models_are_no_profile(
    rolepool: Command, runs: dict[str, str], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(runs["split"], tmp_path / "other"))
    config = yaml.safe_load((other / "config.yaml").read_text(encoding="utf-8"))
    config["critic"]["model"]["path"] = "another/model"
    (other / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    line = one_line(rolepool("predict", runs["standard"], str(other), "--search"))
    assert "different models or devices" in line
