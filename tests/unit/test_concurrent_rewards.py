"""Calls of a reward function at the same time, and functions that score a whole batch in one
call."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_reward_process import error_of, process_of, rows

from rolepool.config import load_config
from rolepool.data.retries import Retries, is_connection_error
from rolepool.data.reward_functions import load_reward_function
from rolepool.data.reward_process import ScoringProcesses, calls_at_once
from rolepool.data.rewards import Reward, RewardError, RewardFunction, SampleError, score_batch
from rolepool.trainer.helpers import num_helpers_for

CHAT = [{"role": "user", "content": "a or b?"}]


def placed(*keys: str) -> Reward:
    """The reward that these keys name, with functions of the user in processes."""
    config = load_config(overrides=keys).config
    loaded = load_reward_function(config)
    return loaded.in_processes(
        lambda function: ScoringProcesses(function, config.custom_reward_function, 4)
    )


# async functions


async def wait_and_measure(solution_str: str, **_: Any) -> float:
    """The shorter the response, the later it is scored."""
    await asyncio.sleep(0.5 - 0.05 * len(solution_str))
    return len(solution_str)


def test_async_calls_run_at_the_same_time_and_scores_are_in_the_order_of_the_rows() -> None:
    process = process_of(wait_and_measure, num_at_once=8)
    process.score_rows(rows("warm up"))
    begin_s = time.monotonic()
    scored = process.score_rows(rows(*("x" * length for length in range(1, 9))))
    assert time.monotonic() - begin_s < 1.2, "one after another they take 2.2 s"
    assert [one.score for one in scored] == [1, 2, 3, 4, 5, 6, 7, 8]


running: list[int] = []


async def most_at_once(**_: Any) -> int:
    running.append(1)
    await asyncio.sleep(0.01)
    most = len(running)
    running.pop()
    return most


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_no_more_calls_than_allowed_run_at_the_same_time(num_at_once: int) -> None:
    scored = process_of(most_at_once, num_at_once=num_at_once).score_rows(rows(*["x"] * 20))
    assert max(one.score for one in scored) == num_at_once


async def misbehave(solution_str: str, **_: Any) -> Any:
    """Does what the response says."""
    match solution_str:
        case "sleep":
            await asyncio.sleep(1000)
        case "block":
            time.sleep(1000)
        case "exit":
            sys.exit(3)
        case "crash":
            os._exit(7)
        case "fail":
            raise ValueError("on purpose")
        case "cancel":
            raise asyncio.CancelledError
    await asyncio.sleep(0.01)
    return len(solution_str)


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("sleep", r"no score after custom_reward_function.timeout_s=0.5"),
        (
            "block",
            r"no score after custom_reward_function.timeout_s=0.5 \(the function blocks: inside async def, "
            r"wait with await, or use asyncio.to_thread\)",
        ),
        ("exit", r"SystemExit at test_concurrent_rewards.py:\d+: 3"),
        ("crash", r"the function ended its process \(exit code 7\)"),
        ("fail", r"ValueError at test_concurrent_rewards.py:\d+: on purpose"),
        ("cancel", "the function has cancelled itself"),
    ],
)
def test_one_call_that_fails_costs_no_other_its_score(
    response: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = process_of(misbehave, timeout_s=0.5, num_at_once=4, waits={"grace_s": 0.5})
    scored = process.score_rows(rows("a", "bb", response, "ccc", "dddd", ""))
    assert [one.score for one in scored] == [1, 2, 0, 3, 4, 0]
    assert [one.numbers["failed"] for one in scored] == [0, 0, 1, 0, 0, 0]
    (line,) = caplog.messages
    assert re.search(
        f"the first: reward=mine: {problem}, for line 3; the response is '{response}'", line
    )


def test_an_async_function_that_fails_ends_the_run_and_the_next_batch_can_be_scored() -> None:
    process = process_of(misbehave, on_error="abort", num_at_once=4)
    error = error_of(process, "a", "fail", "bb")
    assert isinstance(error, SampleError)
    assert "on purpose, for line 2; the response is 'fail'" in str(error)
    assert [one.score for one in process.score_rows(rows("a", "bb"))] == [1, 2]


def in_thread(seconds: float) -> int:
    time.sleep(seconds)
    return 1


async def use_threads(**_: Any) -> int:
    return await asyncio.to_thread(in_thread, 0.2)


def test_each_call_of_an_async_function_may_use_a_thread() -> None:
    process = process_of(use_threads, num_at_once=32)
    begin_s = time.monotonic()
    process.score_rows(rows(*["x"] * 32))
    assert time.monotonic() - begin_s < 2, "one after another they take 6.4 s"


loops: list[int] = []


async def number_of_loops(**_: Any) -> int:
    loops.append(id(asyncio.get_running_loop()))
    return len(set(loops))


def test_all_batches_have_one_event_loop_so_that_connections_can_be_kept() -> None:
    process = process_of(number_of_loops, num_at_once=2)
    scored = [process.score_rows(rows("a", "b", "c")) for _ in range(3)]
    assert {one.score for batch in scored for one in batch} == {1}


class Judge:
    async def __call__(self, solution_str: str, **_: Any) -> int:
        await asyncio.sleep(0)
        return len(solution_str)


def test_an_object_with_an_async_call_is_an_async_function() -> None:
    assert [
        one.score for one in process_of(Judge(), num_at_once=2).score_rows(rows("a", "bb"))
    ] == [1, 2]  # type: ignore[arg-type]


# Plain functions in several processes


def wait_and_tell(solution_str: str, **_: Any) -> Any:
    time.sleep(float(solution_str))
    return {"score": float(solution_str), "pid": os.getpid()}


def test_a_plain_function_is_spread_over_processes_and_the_order_of_scores_is_that_of_the_rows() -> (
    None
):
    process = process_of(wait_and_tell, num_at_once=4)
    texts = [f"{0.01 * (7 - number % 8):.2f}" for number in range(32)]
    scored = process.score_rows(rows(*texts))
    assert [one.score for one in scored] == [float(text) for text in texts]
    assert len({one.numbers["pid"] for one in scored}) == 4


def sleep_or_measure(solution_str: str, **_: Any) -> int:
    if solution_str == "sleep":
        time.sleep(1000)
    if solution_str == "crash":
        os._exit(7)
    return len(solution_str)


def test_a_process_that_is_stopped_costs_only_its_own_row() -> None:
    texts = ["a" * number for number in range(20)]
    texts[3], texts[11] = "sleep", "crash"
    scored = process_of(sleep_or_measure, timeout_s=1, num_at_once=4).score_rows(rows(*texts))
    wanted = [0 if text in ("sleep", "crash") else len(text) for text in texts]
    assert [one.score for one in scored] == wanted
    assert sum(one.numbers["failed"] for one in scored) == 2


# Functions for a whole batch


def batch() -> dict[str, Any]:
    return {
        "data_source": ["sums", "letters"],
        "reward_model": [{"ground_truth": "7"}, {"ground_truth": "b"}],
        "extra_info": [{"level": 2}, {"level": 3, "hint": "x"}],
        "origin": ["train.jsonl, line 1", "train.jsonl, line 9"],
        "uid": ["epoch0-row0", "epoch0-row8"],
        "raw_prompt": ["3 + 4 =", CHAT],
    }


SEEN = """
seen = {}

def compute_score(prompts, completions, answer, level, **kwargs):
    assert prompts == ["3 + 4 =", [{"role": "user", "content": "a or b?"}]]
    assert completions == ["7", [{"role": "assistant", "content": "c"}]]
    assert answer == kwargs["ground_truth"] == ["7", "b"]
    assert level == [2, 3]
    assert kwargs["hint"] == [None, "x"]
    assert kwargs["data_source"] == ["sums", "letters"]
    return [float(text == "7") for text in completions]
"""


def test_a_function_as_for_trl_gets_lists_of_all_columns(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SEEN, encoding="utf-8")
    reward = placed(f"custom_reward_function.path={tmp_path / 'mine.py'}", "data.answer_key=answer")
    assert [one.score for one in score_batch(reward, batch(), ["7", "c"])] == [1, 0]


def test_a_function_as_for_the_batch_manager_of_verl_gets_lists(tmp_path: Path) -> None:
    text = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale):
    assert extra_infos[1]["level"] == 3
    rows = zip(data_sources, solution_strs, ground_truths)
    return [{"score": scale * (text == truth), "is_sum": source == "sums"} for source, text, truth in rows]
"""
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    keys = [
        f"custom_reward_function.path={tmp_path / 'mine.py'}",
        "custom_reward_function.reward_kwargs={scale: 2}",
    ]
    first, second = score_batch(placed(*keys), batch(), ["7", "c"])
    assert (first.score, second.score) == (2, 0)
    assert (first.numbers, second.numbers) == ({"is_sum": 1}, {"is_sum": 0})


def of_the_whole_batch(completions: list[str], **_: Any) -> Any:
    lengths = np.array([len(text) for text in completions])
    match completions[0]:
        case "few":
            return lengths[:-1].tolist()
        case "number":
            return 1.0
        case "nan":
            return [float("nan")] * len(completions)
        case "fail":
            raise ValueError("on purpose")
    return lengths - lengths.mean()


def test_a_batch_is_one_call_and_may_return_an_array() -> None:
    scored = process_of(of_the_whole_batch, num_at_once=4).score_rows(rows("a", "aaa", "aaaaa"))
    assert [one.score for one in scored] == [-2, 0, 2]
    assert process_of(of_the_whole_batch).score_rows([]) == []


async def of_the_whole_batch_async(completions: list[str], **_: Any) -> list[int]:
    await asyncio.sleep(0.01)
    return [len(text) for text in completions]


def test_a_function_for_batches_may_be_async() -> None:
    scored = process_of(of_the_whole_batch_async, num_at_once=4).score_rows(rows("a", "aaa"))
    assert [one.score for one in scored] == [1, 3]


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("few", "returned 2 scores for 3 responses, for 3 responses, from line 1 to line 3"),
        (
            "number",
            "returned float, not a list with a score for each response, for 3 responses, from line 1 to line 3",
        ),
        ("nan", "the score is nan; it must be finite, for line 1; the response is 'nan'"),
    ],
)
def test_a_batch_without_a_score_for_each_row_is_an_error(response: str, problem: str) -> None:
    assert (
        str(error_of(process_of(of_the_whole_batch), response, "b", "c"))
        == f"reward=mine: {problem}"
    )


def test_a_batch_that_fails_costs_all_its_rows_their_score(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scored = process_of(of_the_whole_batch).score_rows(rows("fail", "b"))
    assert [(one.score, one.numbers) for one in scored] == [(0, {"failed": 1})] * 2
    assert caplog.messages[0].startswith("2 of 2 samples failed and got score 0")
    assert caplog.messages[0].endswith("on purpose, for 2 responses, from line 1 to line 2")


def test_functions_of_all_kinds_can_be_summed(tmp_path: Path) -> None:
    text = """
async def judge(solution_str, **_):
    return {"score": len(solution_str), "is_long": len(solution_str) > 3}

def lengths(completions, **_):
    return [10 * len(text) for text in completions]

def one(**_):
    return 1
"""
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    names = [
        "exact_match",
        *(f"{tmp_path / 'mine.py'}:{name}" for name in ("judge", "lengths", "one")),
    ]
    reward = placed(f"reward.functions=[{','.join(names)}]")
    columns = {**batch(), "raw_prompt": ["", ""]}
    first, second = score_batch(reward, columns, ["7", "bbbb"])
    assert (first.score, second.score) == (1 + 1 + 10 + 1, 0 + 4 + 40 + 1)
    assert second.numbers == {
        "exact_match": 0,
        "judge": 4,
        "judge/is_long": 1,
        "lengths": 40,
        "one": 1,
    }


def test_a_row_for_which_one_of_several_functions_fails_has_score_0(tmp_path: Path) -> None:
    text = "def judge(solution_str, **_):\n    return 1 / (len(solution_str) - 1)\n"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    functions = f"reward.functions=[exact_match,{tmp_path / 'mine.py'}:judge]"
    first, second = score_batch(
        placed(functions, "custom_reward_function.on_error=zero"), batch(), ["7", "bbb"]
    )
    assert (first.score, first.numbers) == (0, {"failed": 1})
    assert (second.score, second.numbers) == (0.5, {"exact_match": 0, "judge": 0.5, "failed": 0})


def test_a_function_for_batches_may_leave_out_rows_that_others_score(tmp_path: Path) -> None:
    """As TRL's functions do if the rows are of several tasks."""
    text = """
def sums(completions, data_source, **_):
    return [1.0 if source == "sums" else None for source in data_source]

def nothing(completions, **_):
    return [None] * len(completions)

def forgets(**_):
    return None
"""
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")

    def score(*names: str) -> list[Any]:
        functions = [
            name if name == "exact_match" else f"{tmp_path / 'mine.py'}:{name}" for name in names
        ]
        return score_batch(placed(f"reward.functions=[{','.join(functions)}]"), batch(), ["7", "b"])

    first, second = score("exact_match", "sums", "nothing")
    assert (first.score, first.numbers) == (2, {"exact_match": 1, "sums": 1})
    assert (second.score, second.numbers) == (1, {"exact_match": 1})
    problem = r"reward.functions: all functions returned None, for train.jsonl, line 9 .*; one of them must return"
    with pytest.raises(RewardError, match=problem):
        score("sums", "nothing")
    for names in (("sums",), ("exact_match", "forgets")):
        with pytest.raises(RewardError, match="the score is NoneType None, not a number"):
            score(*names)


# Retries

attempts: list[str] = []


def fail_twice(solution_str: str, **_: Any) -> int:
    attempts.append(solution_str)
    if solution_str == "refused" and attempts.count("refused") < 3:
        raise ConnectionRefusedError("not yet")
    if solution_str == "never":
        raise ConnectionResetError("gone")
    if solution_str == "wrong":
        raise ValueError("on purpose")
    return len(attempts)


async def fail_twice_async(solution_str: str, **_: Any) -> int:
    return fail_twice(solution_str)


@pytest.mark.parametrize("function", [fail_twice, fail_twice_async])
def test_a_connection_that_fails_is_tried_again(function: Any) -> None:
    process = process_of(function, on_error="abort", retries=3, waits={"first_wait_s": 0.01})
    assert [one.score for one in process.score_rows(rows("a", "refused", "b"))] == [1, 4, 5]
    assert str(error_of(process, "never")).endswith(
        "gone, for line 1; the response is 'never' (tried 4 times)"
    )
    assert str(error_of(process, "wrong")).endswith(
        "on purpose, for line 1; the response is 'wrong'"
    )


@pytest.mark.parametrize("function", [fail_twice, fail_twice_async])
def test_without_retries_the_first_error_ends_the_run(function: Any) -> None:
    assert "not yet" in str(error_of(process_of(function, on_error="abort", retries=0), "refused"))


@pytest.mark.parametrize("function", [fail_twice, fail_twice_async])
def test_no_attempt_begins_that_the_time_limit_would_stop(function: Any) -> None:
    """Waits of about 0.5 s and 1 s fit into 2 s, and the next one of about 2 s does not."""
    error = error_of(process_of(function, on_error="abort", retries=100, timeout_s=2), "never")
    assert re.search(
        r"ConnectionResetError at .*: gone, for line 1; .* \(tried 3 times\)", str(error)
    )


def fail_slowly(**_: Any) -> int:
    time.sleep(0.7)
    raise TimeoutError("the server does not answer")


def test_a_slow_connection_is_named_and_not_only_the_time_limit() -> None:
    error = error_of(process_of(fail_slowly, on_error="abort", timeout_s=1), "x")
    assert str(error).endswith("the server does not answer, for line 1; the response is 'x'")


class StatusError(Exception):
    def __init__(self, status_code: int) -> None:
        super().__init__()
        self.status_code = status_code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (StatusError(429), True),
        (StatusError(503), True),
        (StatusError(400), False),
        (StatusError(401), False),
        (ValueError(), False),
        (FileNotFoundError(), False),
        (
            type(
                "APITimeoutError",
                (type("APIConnectionError", (Exception,), {"__module__": "openai"}),),
                {},
            )(),
            True,
        ),
        (
            type(
                "ReadTimeout",
                (type("TransportError", (Exception,), {"__module__": "httpx._exceptions"}),),
                {},
            )(),
            True,
        ),
        (None, False),
    ],
)
def test_which_errors_are_those_of_a_connection(
    error: BaseException | None, expected: bool
) -> None:
    assert is_connection_error(error) == expected


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://no-such-host.invalid/"])
def test_errors_of_real_libraries_are_those_of_a_connection(url: str) -> None:
    import urllib.request

    import requests

    with pytest.raises(OSError) as caught:
        urllib.request.urlopen(url, timeout=5)
    assert is_connection_error(caught.value)
    with pytest.raises(requests.RequestException) as of_requests:
        requests.get(url, timeout=5)
    assert is_connection_error(of_requests.value)


# Shares of the reward processes


@pytest.mark.parametrize(("num_ranks", "shares"), [(1, [10]), (4, [3, 3, 2, 2])])
def test_reward_processes_share_the_calls(num_ranks: int, shares: list[int]) -> None:
    keys = load_config(
        overrides=["custom_reward_function.max_concurrency=10"]
    ).config.custom_reward_function
    function = RewardFunction(wait_and_measure, "f", Path("f.py"))
    assert [calls_at_once(function, keys, rank, num_ranks) for rank in range(num_ranks)] == shares


@pytest.mark.parametrize(
    ("function", "keys", "num_helpers"),
    [
        (most_at_once, [], 4),
        (most_at_once, ["custom_reward_function.max_concurrency=2"], 2),
        (most_at_once, ["custom_reward_function.max_concurrency=64"], 4),
        (of_the_whole_batch, ["custom_reward_function.max_concurrency=64"], 1),
    ],
)
def test_a_batch_is_not_divided_for_a_function_of_whole_batches(
    function: Any, keys: list[str], num_helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    config = load_config(overrides=keys).config
    assert num_helpers_for(load_reward_function(config, function), config) == num_helpers


def test_waits_between_attempts_double_up_to_a_limit() -> None:
    keys = load_config(
        overrides=["custom_reward_function.retries=2000", "custom_reward_function.timeout_s=1e6"]
    ).config
    attempts_of_a_call = Retries(keys.custom_reward_function)
    failed = SampleError("x")
    failed.__cause__ = ConnectionError()
    waits = [attempts_of_a_call.wait_after(failed) for _ in range(2000)]
    for wait_s, wanted_s in zip(waits, [0.5, 1, 2, 4, 8, 8, 8], strict=False):
        assert wait_s == pytest.approx(wanted_s, rel=0.25)
    assert max(wait_s for wait_s in waits if wait_s is not None) <= 8 * 1.25
    assert attempts_of_a_call.wait_after(failed) is None


async def much_to_say(solution_str: str, **_: Any) -> dict[str, float]:
    return {"score": len(solution_str), **{f"number {number}": number for number in range(20_000)}}


def test_an_outcome_that_is_larger_than_the_buffer_of_the_channel_arrives() -> None:
    (scored,) = process_of(much_to_say, num_at_once=2, on_error="abort").score_rows(rows("abc"))
    assert (scored.score, len(scored.numbers)) == (3, 20_000)
