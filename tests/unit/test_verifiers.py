"""Environments of verifiers in the rollout, against the real package."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_environments import HERE, make_rollout, prompts, same, sampled

from rolepool.data.demo import Demo
from rolepool.errors import ConfigError, RolepoolError
from rolepool.protocol import DataProto
from rolepool.protocol.columns import rows_of_responses
from rolepool.rollout.engine import Completion

vf: Any = pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")

import httpx  # noqa: E402

__all__ = ["Player", "Stories", "sampled"]
TURNS = f"{HERE}.multi_turn"
ADAPTER = "rolepool.recipes.environments.verifiers_rollout"


@pytest.fixture(scope="module")
def pages(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example of the page about environments."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(root / "examples" / "verifiers_letters", folder, dirs_exist_ok=True)
    return folder


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
        assert response[mask].tolist() == [
            token for turn in turns for token in turn.token_ids.tolist()
        ]
        assert log_probs[row][mask].tolist() == [
            value for turn in turns for value in turn.log_probs.tolist()
        ]
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


# What can go wrong


class Story(vf.Task[vf.TaskData, vf.State]):  # type: ignore[misc]
    @vf.reward
    async def counts_turns(self, trace: Any) -> float:
        return float(trace.num_turns)


class Stories(vf.Taskset[Story, vf.TasksetConfig]):  # type: ignore[misc]
    """The prompt says what the harness does."""

    def load(self) -> list[Story]:
        return [Story(vf.TaskData(prompt=prompt)) for prompt in "abcdef"]


class Player(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> Any:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]

        async def ask(client: httpx.AsyncClient, chat: list[Any]) -> Any:
            function = {
                "name": "look",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            }
            tools = (
                {"tools": [{"type": "function", "function": function}]}
                if data.prompt == "f"
                else {}
            )
            body = {"model": ctx.model, "messages": chat, **tools}
            answer = (await client.post("/chat/completions", json=body)).raise_for_status().json()
            return answer["choices"][0]["message"]

        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as client:
            if data.prompt == "b":
                raise ValueError("no start")
            if data.prompt == "e":
                await asyncio.gather(ask(client, messages), ask(client, messages))
            for number in range(4):
                messages += [await ask(client, messages), {"role": "user", "content": "h"}]
                if data.prompt == "c":
                    raise ValueError("no second turn")
                if data.prompt == "d" and number == 1:
                    messages[0]["content"] = "g"
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def rollout_for(
    demo: Demo, folder: Path, *keys: str, config: str = "", renderer: Any = None
) -> Any:
    """A rollout of the tasks and the harness of this file."""
    agent = "{'harness': {'id': 'test_verifiers'}, 'runtime': {'type': 'subprocess'}}"
    given = config or f"{{'taskset': {{'id': 'test_verifiers'}}, 'agent': {agent}}}"
    file = folder / f"{folder.name.replace('-', '_')}_rollout.py"
    text = f"from {ADAPTER} import rollout_of\nrollout = rollout_of({given}, {renderer})\n"
    file.write_text(text, encoding="utf-8")
    return make_rollout(
        demo, "rollout", f"environment.path={file}", f"{TURNS}.max_turn_tokens=2", *keys
    )


def test_limits_of_the_config_end_a_conversation_and_it_is_scored(
    demo: Demo, tmp_path: Path
) -> None:
    for number, (key, num_turns) in enumerate(
        [("max_assistant_turns=3", 3), ("max_user_turns=1", 2)]
    ):
        folder = tmp_path / f"limits_{number}"
        folder.mkdir()
        batch = rollout_for(demo, folder, f"{TURNS}.{key}").generate_sequences(rows(1)).batch
        assert batch["num_turns"].tolist() == batch["environment_score"].tolist() == [num_turns]
        assert batch["num_tool_errors"].tolist() == [0]
    rollout = rollout_for(demo, tmp_path, "data.max_response_length=7", f"{HERE}.ignore_eos=true")
    batch = rollout.generate_sequences(rows(1)).batch
    assert batch["environment_score"].tolist() == [2.0], (
        "2 tokens, 2 of the message, 2 tokens, then 1 of 2"
    )
    assert batch["num_response_tokens"].tolist() == [6]


def test_an_episode_that_fails_has_score_0_and_is_counted(
    demo: Demo,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sampled: dict[int, list[Completion]],
) -> None:
    rollout = rollout_for(demo, tmp_path)
    tasks = [0, 2, 3]
    batch = rollout.generate_sequences(rows(5)[tasks]).batch
    assert batch["num_turns"].tolist() == [4, 1, 2]
    assert batch["environment_score"].tolist() == [4.0, 0.0, 0.0]
    assert batch["num_tool_errors"].tolist() == [0, 1, 1]
    assert "no second turn" in caplog.text
    for row, (response, mask) in enumerate(
        zip(rows_of_responses(batch), batch["response_mask"].unbind(), strict=True)
    ):
        assert response[mask].tolist() == [
            token for turn in sampled[row] for token in turn.token_ids.tolist()
        ]


def test_two_requests_at_the_same_time_do_not_mix_their_tokens(
    demo: Demo, tmp_path: Path, sampled: dict[int, list[Completion]]
) -> None:
    batch = rollout_for(demo, tmp_path).generate_sequences(rows(5)[4:5]).batch
    (turn,) = sampled[0]
    assert rows_of_responses(batch)[0].tolist() == turn.token_ids.tolist()
    assert (batch["environment_score"].tolist(), batch["num_tool_errors"].tolist()) == ([0.0], [1])


def test_what_keeps_a_conversation_from_starting_ends_the_run(demo: Demo, tmp_path: Path) -> None:
    rollout = rollout_for(demo, tmp_path)
    with pytest.raises(
        RolepoolError, match=r"one agent must answer, for line 1; errors: .*no start"
    ):
        rollout.generate_sequences(rows(5)[1:2])
    with pytest.raises(RolepoolError, match=r"line 6: extra_info\.index=6: write a number below 6"):
        rollout.generate_sequences(rows(7)[6:])
    assert rollout.generate_sequences(rows(1)).batch["num_turns"].tolist() == [4], (
        "it works after that"
    )


def test_tools_need_a_parser(demo: Demo, tmp_path: Path) -> None:
    without, parsing = tmp_path / "without", tmp_path / "parsing"
    for folder in (without, parsing):
        folder.mkdir()
    with pytest.raises(RolepoolError, match="one agent must answer, for line 5"):
        rollout_for(demo, without).generate_sequences(rows(6)[5:])
    chat = {"name": "custom", "import_path": f"{ADAPTER}.ChatRenderer", "tool_parser": "qwen3"}
    batch = rollout_for(demo, parsing, renderer=chat).generate_sequences(rows(6)[5:]).batch
    assert batch["environment_score"].tolist() == [4.0]


def test_what_is_wrong_in_the_config_is_found_before_the_run(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="taskset 'no_such_taskset' not found"):
        rollout_for(demo, tmp_path, config="{'taskset': {'id': 'no_such_taskset'}}")
    monkeypatch.setattr(Stories, "INFINITE", True)
    with pytest.raises(ConfigError, match=r"taskset\.id=test_verifiers: it has no end"):
        rollout_for(demo, tmp_path)


def test_the_server_is_on_loopback_and_wants_its_token(
    demo: Demo, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    run_episode = vf.Env.run_episode

    async def asking(self: Any, task: Any, context: Any, **options: Any) -> Any:
        url, right = context.client.base_url, context.client.headers["Authorization"]
        async with httpx.AsyncClient() as client:
            for token in ("", "Bearer x", right[:-1], right + "x", right):
                reply = await client.get(f"{url}/models", headers={"Authorization": token})
                posted = await client.post(
                    url.replace("/v1", "/inference/v1/generate"),
                    headers={"Authorization": "Bearer x"},
                )
                asked.append((url, reply.status_code))
                assert posted.status_code == 401
        return await run_episode(self, task, context, **options)

    monkeypatch.setattr(vf.Env, "run_episode", asking)
    make_rollout(
        demo, "rollout", f"environment.path={pages / 'my_verifiers.py'}"
    ).generate_sequences(rows(1))
    assert [status for _, status in asked] == [401, 401, 401, 401, 200]
    assert all(url.startswith("http://127.0.0.1:") for url, _ in asked)
