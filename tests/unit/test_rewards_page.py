"""The judge of docs/rewards.md scores responses over HTTP, and the benchmark measures what it
says."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from commands import load_benchmark
from rolepool.data import retries
from rolepool.data.reward_signatures import ResponseRow
from rolepool.data.rewards import SampleError


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("judge")


@pytest.fixture
def judge_file(benchmark: ModuleType, tmp_path: Path) -> Path:
    file = tmp_path / "judge.py"
    file.write_text(benchmark.example(), encoding="utf-8")
    return file


@pytest.fixture
def url(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with benchmark.judge_server(latency_s=0.05) as address:
        monkeypatch.setenv("JUDGE_URL", address)
        yield address


def rows(count: int) -> list[ResponseRow]:
    inputs = {"data_source": "sums", "ground_truth": "4", "extra_info": {}}
    return [
        ResponseRow(f"line {number}", {**inputs, "solution_str": f"It is {number}."})
        for number in range(count)
    ]


def test_the_judge_of_the_page_has_less_than_15_lines(benchmark: ModuleType) -> None:
    assert len([line for line in benchmark.example().splitlines() if line.strip()]) < 15


@pytest.mark.usefixtures("url")
def test_the_judge_of_the_page_scores_many_responses_at_the_same_time(
    benchmark: ModuleType, judge_file: Path
) -> None:
    together_s = benchmark.seconds(benchmark.reward_of(judge_file, 32), 64, 32)
    alone_s = benchmark.seconds(benchmark.reward_of(judge_file, 1), 64, 1)
    assert alone_s > 64 * 0.05
    assert together_s < alone_s / 4


@pytest.mark.usefixtures("url")
def test_the_judge_as_a_plain_function_runs_in_processes(
    benchmark: ModuleType, judge_file: Path
) -> None:
    judge_file.write_text(benchmark.without_async(benchmark.example()), encoding="utf-8")
    assert "async def" not in judge_file.read_text()
    alone_s = benchmark.seconds(benchmark.reward_of(judge_file, 1), 32, 1)
    assert benchmark.seconds(benchmark.reward_of(judge_file, 8), 32, 8) < alone_s / 2


def test_a_server_that_does_not_run_is_tried_again_and_named(
    benchmark: ModuleType, judge_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:1/v1/chat/completions")
    with pytest.raises(SampleError) as caught:
        benchmark.reward_of(judge_file, 4, first_wait_s=0.01).score_rows(rows(1))
    assert "compute_score: URLError at judge.py:13: " in str(caught.value)
    assert str(caught.value).endswith("for line 0; the response is 'It is 0.' (tried 4 times)")


def test_a_request_that_the_server_refuses_is_not_repeated() -> None:
    refused = urllib.error.HTTPError("http://x", 401, "Unauthorized", {}, None)  # type: ignore[arg-type]
    busy = urllib.error.HTTPError("http://x", 503, "Service Unavailable", {}, None)  # type: ignore[arg-type]
    assert not retries.is_connection_error(refused)
    assert retries.is_connection_error(busy)
