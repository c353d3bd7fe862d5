"""A user's reward function runs in a child process: no sample can hold up the others, or end the
run silently."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from rolepool.config import load_config
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_process import ScoringProcesses
from rolepool.data.reward_signatures import ResponseRow
from rolepool.data.rewards import RewardError, RewardFunction, SampleError

OnError = Literal["abort", "zero"]
NO_WAITS: Mapping[str, float] = {}


def process_of(
    function: Callable[..., Any],
    timeout_s: float = 30.0,
    on_error: OnError = "zero",
    num_at_once: int = 1,
    waits: Mapping[str, float] = NO_WAITS,
    **more: Any,
) -> ScoringProcesses:
    """`waits` are the times of `ScoringProcesses`, and `more` are keys."""
    keys = {"name": "mine", "timeout_s": timeout_s, "on_error": on_error, **more}
    config = load_config([{"custom_reward_function": keys}]).config
    loaded = load_reward_function(config, function)
    assert isinstance(loaded, RewardFunction)
    return ScoringProcesses(loaded, config.custom_reward_function, num_at_once, **waits)


def rows(*responses: str) -> list[ResponseRow]:
    names = ("data_source", "ground_truth", "extra_info")
    return [
        ResponseRow(f"line {number}", {**dict.fromkeys(names, ""), "solution_str": text})
        for number, text in enumerate(responses, start=1)
    ]


def error_of(process: ScoringProcesses, *responses: str) -> RewardError:
    with pytest.raises(RewardError) as caught:
        process.score_rows(rows(*responses))
    return caught.value


def misbehave(solution_str: str, **_: Any) -> Any:
    """Does what the response says."""
    match solution_str:
        case "sleep":
            time.sleep(1000)
        case "spin in C":
            sum(range(10**12))  # never looks at signals of Python, and holds the GIL
        case "interrupt":
            raise KeyboardInterrupt
        case "exit":
            sys.exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGTERM)
        case "fail":
            raise ValueError("on purpose")
        case "none":
            return None
        case "nan":
            return float("nan")
        case "pid":
            return os.getpid()
    return len(solution_str)


def test_all_rows_are_scored_by_one_child_that_is_kept() -> None:
    process = process_of(misbehave, on_error="abort")
    first, second, third = process.score_rows(rows("pid", "four", ""))
    assert (second.score, third.score, second.numbers) == (4, 0, {})
    assert first.score != os.getpid()
    assert process.score_rows(rows("pid"))[0].score == first.score
    assert process.score_rows([]) == []


@pytest.mark.parametrize("response", ["sleep", "spin in C"])
def test_a_function_that_does_not_return_is_stopped_and_the_other_rows_are_scored(
    response: str, caplog: pytest.LogCaptureFixture
) -> None:
    begin_s = time.monotonic()
    scored = process_of(misbehave, timeout_s=1.5).score_rows(
        rows("a", response, "bb", response, "ccc")
    )
    assert time.monotonic() - begin_s < 60
    assert [one.score for one in scored] == [1, 0, 2, 0, 3]
    assert [one.numbers["failed"] for one in scored] == [0, 1, 0, 1, 0]
    (line,) = caplog.messages
    assert line == (
        "2 of 5 samples failed and got score 0 (custom_reward_function.on_error=zero); "
        "the first: reward=mine: no score after custom_reward_function.timeout_s=1.5, for line 2; "
        f"the response is {response!r}"
    )


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("interrupt", r"KeyboardInterrupt at test_reward_process.py:\d+: "),
        ("exit", r"SystemExit at test_reward_process.py:\d+: 3"),
        ("fail", r"ValueError at test_reward_process.py:\d+: on purpose"),
        ("crash", r"the function ended its process \(SIGTERM\)"),
        ("sleep", r"no score after custom_reward_function.timeout_s=1.5"),
    ],
)
def test_every_way_to_fail_names_the_row(response: str, problem: str) -> None:
    process = process_of(misbehave, timeout_s=1.5, on_error="abort")
    error = error_of(process, "a", response, "b")
    assert isinstance(error, SampleError)
    assert pytest.approx(1) == process.score_rows(rows("a"))[0].score, (
        "the next batch is not affected"
    )
    assert re.fullmatch(
        f"reward=mine: {problem}, for line 2; the response is {response!r}", str(error)
    )


@pytest.mark.parametrize("on_error", ["abort", "zero"])
@pytest.mark.parametrize("response", ["none", "nan"])
def test_a_result_that_is_no_number_is_an_error_in_both_modes(
    response: str, on_error: OnError
) -> None:
    error = error_of(
        process_of(misbehave, on_error=on_error), "fail" if on_error == "zero" else "a", response
    )
    assert str(error).endswith(f"for line 2; the response is {response!r}")
    assert not isinstance(error, SampleError)


def test_a_child_that_died_between_two_batches_is_replaced() -> None:
    process = process_of(misbehave, on_error="abort")
    pid = int(process.score_rows(rows("pid"))[0].score)
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait(60)
    assert process.score_rows(rows("a"))[0].score == 1


def test_the_child_ends_with_its_parent_also_inside_c_code(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_reward_process import misbehave, process_of, rows
process = process_of(misbehave)
print(int(process.score_rows(rows("pid"))[0].score), flush=True)
process.score_rows(rows("spin in C"))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.2)
        parent.kill()
        assert child.wait(60) is None


def test_a_batch_of_cheap_rows_costs_little_more_than_in_this_process() -> None:
    function = load_reward_function(
        load_config(overrides=["custom_reward_function.name=mine"]).config, misbehave
    )
    process, batch = (
        process_of(misbehave, on_error="abort"),
        rows(*["some words of a response"] * 2000),
    )
    process.score_rows(batch)
    gc.collect()
    here_s, child_s = (
        min(seconds(one.score_rows, batch) for _ in range(5)) for one in (function, process)
    )
    assert child_s - here_s < 0.000_05 * len(batch)


def seconds(score: Callable[[list[ResponseRow]], Any], batch: list[ResponseRow]) -> float:
    begin_s = time.perf_counter()
    score(batch)
    return time.perf_counter() - begin_s
