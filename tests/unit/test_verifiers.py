"""Environments of verifiers in the rollout, against the real package."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from test_environments import HERE, demo, make_rollout, prompts, same

from rolepool.data.demo import Demo
from rolepool.errors import RolepoolError
from rolepool.protocol import DataProto
from rolepool.protocol.ragged import rows_of_responses
from rolepool.rollout import environments
from rolepool.rollout.engine import Completion, Request

vf: Any = pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")

import httpx  # noqa: E402

__all__ = ["demo"]
TURNS = f"{HERE}.multi_turn"


@pytest.fixture(scope="module")
def pages(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example of the page."""
    folder = tmp_path_factory.mktemp("pages")
    page = (root / "docs" / "environments.md").read_text(encoding="utf-8")
    for name in ("my_letters", "my_verifiers"):
        (text,) = re.findall(rf"```python\n# {name}\.py\n(.*?)```", page, flags=re.DOTALL)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Completion]]:
    """What the engine samples, by the number of the conversation."""
    found: dict[int, list[Completion]] = {}
    generate = environments._Queue.generate

    async def noted(self: Any, request: Request) -> Completion:
        completion = await generate(self, request)
        found.setdefault(request.conversation or 0, []).append(completion)
        return completion

    monkeypatch.setattr(environments._Queue, "generate", noted)
    return found


@pytest.fixture
def episodes(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What verifiers recorded, by the number of the task."""
    found: dict[int, Any] = {}
    run_episode = vf.Env.run_episode

    async def noted(self: Any, task: Any, *arguments: Any, **options: Any) -> Any:
        found[task.data.idx] = await run_episode(self, task, *arguments, **options)
        return found[task.data.idx]

    monkeypatch.setattr(vf.Env, "run_episode", noted)
    return found


def rows(count: int = 12, **extra: Any) -> DataProto:
    """Prompts whose task is that with the number of the row."""
    found = prompts(count, **extra)
    for row, info in enumerate(found.non_tensor_batch["extra_info"]):
        info.setdefault("index", row)
    return found


def test_the_example_of_the_page_trains_the_sampled_tokens_alone(
    demo: Demo, pages: Path, sampled: dict[int, list[Completion]], episodes: dict[int, Any]
) -> None:
    keys = [f"environment.path={pages / 'my_verifiers.py'}", f"{TURNS}.max_turn_tokens=3"]
    rollout = make_rollout(demo, "rollout", *keys)
    found = rollout.generate_sequences(rows(40))
    batch = found.batch
    masks, log_probs = (batch[key].unbind() for key in ("response_mask", "rollout_log_probs"))
    ids, num_prompt = batch["input_ids"].unbind(), batch["num_prompt_tokens"]
    for row, response in enumerate(rows_of_responses(batch)):
        turns, mask, letters = sampled[row], masks[row], [4 + row // 8, 4 + row % 8]
        assert ids[row][: num_prompt[row]].tolist() == [*letters, 3]
        assert response[mask].tolist() == [token for turn in turns for token in turn.token_ids.tolist()]
        assert log_probs[row][mask].tolist() == [value for turn in turns for value in turn.log_probs.tolist()]
        assert response[~mask].tolist() == [*letters, 3]
        (trace,) = episodes[row].traces
        (branch,) = trace.branches
        assert branch.token_ids == ids[row].tolist(), "verifiers has seen the same tokens"
        assert branch.sampled_mask == [False] * num_prompt[row] + mask.tolist()
        assert branch.logprobs == [0.0] * num_prompt[row] + log_probs[row].tolist()
        assert batch["environment_score"][row] == trace.reward
    assert batch["num_turns"].tolist() == [2] * 40 and not batch["num_tool_errors"].any()
    assert batch["environment_score"].unique().tolist()[:2] == [0.0, 0.5]
    assert same(rollout.generate_sequences(rows(40)), found), "another event loop, the same address"
