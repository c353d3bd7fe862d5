"""Conversations of several turns: tokens, tools, order, and many of them at the same time."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolepool.config import load_config
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.data.demo import Demo
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import ConfigError, RolepoolError
from rolepool.protocol import DataProto
from rolepool.protocol.columns import rows_of_responses
from rolepool.protocol.part_times import PartTimes
from rolepool.protocol.worker import WorkerContext, made_in
from rolepool.roles.rollout import Rollout
from rolepool.roles.rule_reward import RuleReward
from rolepool.roles.setups import RolloutSetup, RuleRewardSetup
from rolepool.rollout.conversation_queue import ConversationQueue
from rolepool.rollout.engine import Completion, Engine, Request, Sampling
from rolepool.rollout.environments import Generate, Trajectory
from rolepool.rollout.tool_loop import added_tokens, parse_hermes

HERE = "actor_rollout_ref.rollout"
NUM_ROWS = 12


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Completion]]:
    """What the engine samples, by the number of the conversation. For tests of adapters, whose
    libraries make the conversations."""
    by_conversation: dict[int, list[Completion]] = {}
    generate = ConversationQueue.generate

    async def noted(self: Any, request: Request) -> Completion:
        completion = await generate(self, request)
        by_conversation.setdefault(request.conversation or 0, []).append(completion)
        return completion

    monkeypatch.setattr(ConversationQueue, "generate", noted)
    return by_conversation


def config_with(demo: Demo, name: str, *overrides: str, response: int = 24) -> Any:
    keys = [f"actor_rollout_ref.model.path={demo.model}", "data.max_prompt_length=8"]
    keys += [
        f"data.max_response_length={response}",
        f"{HERE}.multi_turn.enable=true",
        f"environment.name={name}",
    ]
    keys += [f"environment.path={__file__}", f"{HERE}.calculate_log_probs=true"]
    return load_config([], [*keys, *overrides]).config


def make_rollout(demo: Demo, name: str, *overrides: str, response: int = 24) -> Rollout:
    """In float64, so that no two tokens are so close that rounding decides between them."""
    with made_in(WorkerContext()):
        config = config_with(demo, name, *overrides, response=response)
        return Rollout(config, RolloutSetup(stop_token_ids=(1,), dtype=torch.float64))


def prompts(count: int = NUM_ROWS, **extra: Any) -> DataProto:
    letters = "abcdefgh"
    texts = [f"{letters[row % 8]} {letters[row // 8 % 8]}" for row in range(count)]
    columns = {
        "raw_prompt": [[{"role": "user", "content": text}] for text in texts],
        "raw_prompt_ids": [[4 + row % 8, 4 + row // 8 % 8, 3] for row in range(count)],
        "uid": [f"row{row}" for row in range(count)],
        "sample_index": list(range(count)),
        "data_source": ["letters"] * count,
        "reward_model": [{"ground_truth": "a"}] * count,
        "extra_info": [{"row": row, **extra} for row in range(count)],
        "origin": [f"line {row}" for row in range(count)],
    }
    arrays = {name: np.fromiter(values, object, count) for name, values in columns.items()}
    return DataProto.from_dict(non_tensors=arrays)


def same(one: DataProto, other: DataProto) -> bool:
    """The same columns. Log-probs in float64 depend on the batch in their last bits."""
    for key in one.batch.keys():  # noqa: SIM118  a TensorDict
        mine, theirs = (column_of(batch, key) for batch in (one, other))
        if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=0, atol=1e-9):
            return False
    return True


def column_of(batch: DataProto, key: str) -> torch.Tensor:
    column = batch.batch[key]
    if column.is_nested:
        column = torch.cat(list(column.unbind()))
    return torch.nan_to_num(column).double()


# Tokens

SAMPLED: dict[str, list[Completion]] = {}
ADDED: dict[str, list[list[int]]] = {}


async def random_conversation(row: Any, generate: Generate) -> Trajectory:
    """Adds random tokens between turns of random lengths, and remembers what was sampled and added.
    The tokens depend only on the row; the time that it waits does not."""
    numbers = random.Random(row["uid"])
    trajectory = Trajectory(list(row["prompt_ids"]))
    SAMPLED[row["uid"]], ADDED[row["uid"]] = [], []
    rewards = []
    for _ in range(numbers.randint(1, 5)):
        if not generate.has_room(trajectory):
            break
        SAMPLED[row["uid"]].append(await generate(trajectory, numbers.randint(1, 6)))
        rewards.append(float(numbers.randint(0, 9)))
        if row["extra_info"].get("waits"):
            await asyncio.sleep(random.random() / 50)
        ADDED[row["uid"]].append([numbers.randint(4, 11) for _ in range(numbers.randint(0, 3))])
        trajectory.add(ADDED[row["uid"]][-1])
    trajectory.reward = None if row["uid"] == "row3" else rewards
    return trajectory


def test_trained_tokens_are_exactly_the_sampled_ones_and_the_mask_covers_them_alone(
    demo: Demo,
) -> None:
    batch = make_rollout(demo, "random_conversation").generate_sequences(prompts(60)).batch
    masks, log_probs, scores = (
        batch[key].unbind() for key in ("response_mask", "rollout_log_probs", "turn_scores")
    )
    for row, response in enumerate(rows_of_responses(batch)):
        turns, added, mask = SAMPLED[f"row{row}"], ADDED[f"row{row}"], masks[row]
        assert response[mask].tolist() == [
            token for turn in turns for token in turn.token_ids.tolist()
        ]
        assert log_probs[row][mask].tolist() == [
            value for turn in turns for value in turn.log_probs.tolist()
        ]
        assert response[~mask].tolist() == [token for tokens in added[:-1] for token in tokens]
        assert not log_probs[row][~mask].any()
        assert mask[-1], "a response ends with a sampled token"
        ends = (
            np.cumsum([len(turn.token_ids) for turn in turns])
            + np.cumsum([0, *map(len, added[:-1])])
            - 1
        )
        assert set(scores[row].nonzero()[:, 0].tolist()) <= set(ends.tolist())
        assert batch["num_turns"][row] == len(turns)
    assert batch["environment_score"].isnan().nonzero().tolist() == [[3]]
    assert (batch["num_turns"] > 2).any() and (batch["num_response_tokens"] <= 24).all()
    assert (
        len({tuple(turn.token_ids.tolist()) for turns in SAMPLED.values() for turn in turns}) > 50
    )


def test_neither_the_order_in_which_conversations_go_on_nor_the_batch_changes_them(
    demo: Demo,
) -> None:
    rollout, few = (
        make_rollout(demo, "random_conversation", f"{HERE}.max_num_seqs={size}")
        for size in (1024, 3)
    )
    expected = rollout.generate_sequences(prompts())
    for other in (rollout, few):
        for _ in range(2):
            assert same(other.generate_sequences(prompts(waits=True)), expected)
    halves = [
        rollout.generate_sequences(prompts()[rows]) for rows in (slice(0, 5), slice(5, NUM_ROWS))
    ]
    assert same(DataProto.concat(halves), expected)


def test_an_engine_without_sessions_of_its_own_generates_batches_and_says_the_same(
    demo: Demo,
) -> None:
    rollout = make_rollout(demo, "random_conversation")
    expected = rollout.generate_sequences(prompts())
    native: Any = rollout.engine

    class Batches(Engine):
        shared_weights, version = False, 0

        def generate(self, requests: Any, sampling: Sampling) -> list[Completion]:
            return native.generate(requests, sampling)  # type: ignore[no-any-return]

        def update_weights(self, named_tensors: Any, version: int | None) -> None: ...

        def sleep(self) -> None: ...

        def wake(self) -> None: ...

    rollout.engine = Batches()
    native.wake()
    assert same(rollout.generate_sequences(prompts()), expected)


async def one_turn(row: Any, generate: Generate) -> Trajectory:
    trajectory = Trajectory(list(row["prompt_ids"]))
    await generate(trajectory)
    return trajectory


def test_one_turn_is_what_is_generated_without_an_environment(demo: Demo) -> None:
    turns = make_rollout(demo, "one_turn").generate_sequences(prompts()).batch
    off = [f"{HERE}.multi_turn.enable=false", "environment.name=null", "environment.path=null"]
    plain = make_rollout(demo, "null", *off).generate_sequences(prompts()).batch
    assert sorted(plain.keys()) == [
        "input_ids",
        "num_prompt_tokens",
        "num_response_tokens",
        "rollout_log_probs",
        "weights_version",
    ]
    for key in ("input_ids", "rollout_log_probs"):
        assert torch.equal(
            torch.cat(list(turns[key].unbind())), torch.cat(list(plain[key].unbind()))
        )
    assert all(row.all() for row in turns["response_mask"].unbind())


async def fails(row: Any, generate: Generate) -> Trajectory:
    if row["extra_info"]["row"] == 5:
        raise ValueError("on purpose")
    return await one_turn(row, generate)


def test_an_error_in_a_rollout_function_names_the_row_and_the_engine_works_after_it(
    demo: Demo,
) -> None:
    rollout = make_rollout(demo, "fails")
    with pytest.raises(RolepoolError, match="failed with ValueError: on purpose, for line 5"):
        rollout.generate_sequences(prompts())
    assert len(rollout.generate_sequences(prompts(4))) == 4


async def three_turns(row: Any, generate: Generate) -> Trajectory:
    trajectory = Trajectory(list(row["prompt_ids"]))
    for _ in range(3):
        await generate(trajectory, 3)
        trajectory.add([4, 5])
    trajectory.reward = 1.0
    return trajectory


def test_a_thousand_conversations_run_at_the_same_time_without_a_thread_each(demo: Demo) -> None:
    most, rollout = 0, make_rollout(demo, "three_turns")

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.01):
            most = max(most, threading.active_count())

    ended, watcher = threading.Event(), threading.Thread(target=watch)
    before = threading.active_count()
    watcher.start()
    batch = rollout.generate_sequences(prompts(1000)).batch
    ended.set()
    watcher.join()
    assert batch["num_turns"].tolist() == [3] * 1000
    assert most <= before + 2, "the watcher, and at most one more"


# The engine


def test_a_turn_computes_only_the_tokens_that_the_turns_before_it_did_not(demo: Demo) -> None:
    rollout = make_rollout(demo, "three_turns")
    with PartTimes() as times:
        batch = rollout.generate_sequences(prompts(NUM_ROWS)).batch
    num_run = sum(part.num_tokens for part in times.added_up() if part.name == "prefill")
    # Of each turn but the first: the last token that was sampled before it, and the two that were
    # added.
    assert batch["num_turns"].tolist() == [3] * NUM_ROWS
    assert num_run == NUM_ROWS * (3 + 2 * 3)


def test_requests_that_do_not_fit_into_a_session_are_refused(demo: Demo) -> None:
    engine = make_rollout(demo, "one_turn").engine
    sampling = Sampling(1.0, 1.0, -1, True, 4, False, (1,))
    refused = pytest.raises(RolepoolError, match="9 tokens does not fit into a session for 8")
    with refused, engine.session(sampling, 2, 8) as session:
        session.submit([Request([4] * 5, seed=1)])


# Tools


class Counter:
    """A tool of every kind of misbehaviour. The demo's tokenizer cannot write, so `parse_script`
    chooses the calls."""

    def reset(self, row: int, ground_truth: str, **_: Any) -> None:
        if row == 9:
            raise RuntimeError("no reset")
        self._total, self._row = 0, row

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: The number.
        """
        self._total += number
        if number > 100:
            raise ValueError("too large")
        return f"a {self._total}"

    def misbehave(self, how: str) -> Any:
        """Do what it says.

        Args:
            how: What to do.
        """
        if how == "sleep":
            time.sleep(100)
        if how == "eat":
            return len(bytearray(2**31))
        if how == "exit":
            sys.exit(3)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGTERM)
        return threading.Lock()  # cannot be sent

    def get_reward(self) -> float:
        return float(self._total)


CALLS = [
    ("add", {"number": 2}),
    ("add", {"number": 101}),
    ("misbehave", {"how": "sleep"}),
    ("misbehave", {"how": "eat"}),
]
CALLS += [
    ("misbehave", {"how": "exit"}),
    ("misbehave", {"how": "crash"}),
    ("misbehave", {"how": "lock"}),
]
CALLS += [("get_reward", {}), ("add", {"wrong": 1}), ("add", {"number": 3})]


def parse_script(text: str) -> list[tuple[str, dict[str, Any]]]:
    return CALLS


class NotingTokenizer:
    """A tokenizer that notes what tools say in the chats that it writes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tool_texts: list[str] = []

    def apply_chat_template(self, chat: list[dict[str, Any]], **options: Any) -> str:
        self.tool_texts += [message["content"] for message in chat if message["role"] == "tool"]
        return str(self._tokenizer.apply_chat_template(chat, **options))

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self._tokenizer(*texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_what_goes_wrong_in_a_tool_becomes_a_message_and_is_counted(
    demo: Demo, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [
        "environment.timeout_s=0.5",
        "environment.memory_gb=0.5",
        f"{HERE}.multi_turn.max_user_turns=1",
    ]
    keys += [
        f"{HERE}.multi_turn.format={__name__}:parse_script",
        f"{HERE}.multi_turn.max_turn_tokens=2",
    ]
    rollout = make_rollout(demo, "Counter", *keys, response=100)
    assert rollout.conversations is not None
    tokenizer: Any = NotingTokenizer(rollout.conversations.tokenizer)
    rollout.conversations = replace(rollout.conversations, tokenizer=tokenizer)
    batch = rollout.generate_sequences(prompts(1)).batch
    texts = tokenizer.tool_texts
    assert len(texts) == 10
    assert texts[0] == "a 2"
    assert texts[1] == "Error: ValueError: too large"
    assert texts[2] == "Error: no result after environment.timeout_s=0.5"
    assert texts[3].startswith("Error: MemoryError")
    assert texts[4] == "Error: SystemExit: 3"
    assert texts[5] == "Error: the process ended (SIGTERM)"
    assert "cannot pickle" in texts[6]
    assert texts[7] == "Error: there is no such tool; the tools are add, misbehave"
    assert "unexpected keyword argument" in texts[8]
    assert texts[9] == "a 5", "a tool that failed has changed nothing"
    assert (batch["num_tool_calls"].tolist(), batch["num_tool_errors"].tolist()) == ([10], [8])
    assert batch["environment_score"].tolist() == [5.0]
    assert "7 calls of tools failed; the first: ValueError: too large" in caplog.text


def test_a_reset_that_fails_gives_one_turn_and_score_0(demo: Demo) -> None:
    keys = [f"{HERE}.multi_turn.format={__name__}:parse_script", "environment.timeout_s=0.5"]
    batch = make_rollout(demo, "Counter", *keys).generate_sequences(prompts()[9:10]).batch
    assert (batch["num_turns"].tolist(), batch["environment_score"].tolist()) == ([1], [0.0])
    assert (batch["num_tool_calls"].tolist(), batch["num_tool_errors"].tolist()) == ([0], [1])


async def with_a_tool(row: Any, generate: Generate) -> Trajectory:
    trajectory = await one_turn(row, generate)
    outcome = await generate.run(trajectory, divmod, 17, 5)
    trajectory.reward = float(outcome.value[0])
    return trajectory


def test_a_rollout_function_can_run_functions_in_processes(demo: Demo) -> None:
    batch = make_rollout(demo, "with_a_tool").generate_sequences(prompts()).batch
    assert batch["environment_score"].tolist() == [3.0] * NUM_ROWS
    assert batch["num_tool_calls"].tolist() == [1] * NUM_ROWS


class Greeter:
    """Adds a letter to the prompt, and has no reward of its own."""

    def reset(self, **row: Any) -> str:
        return " h"


def test_what_reset_returns_is_added_to_the_prompt_and_the_reward_function_scores(
    demo: Demo, tmp_path: Path
) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text(
        "def compute_score(solution_str, **_):\n    return {'score': 0.25, 'words': 3}\n"
    )
    keys = [f"custom_reward_function.path={rule}"]
    rollouts = make_rollout(demo, "Greeter", *keys).generate_sequences(prompts())
    ids, num_prompt = rollouts.batch["input_ids"].unbind(), rollouts.batch["num_prompt_tokens"]
    assert ids[0][: num_prompt[0]].tolist() == [4, 4, 11, 3]
    with made_in(WorkerContext()):
        reward = RuleReward(config_with(demo, "Greeter", *keys), RuleRewardSetup())
    rollouts.batch["environment_score"][2] = 7.0
    scored = reward.compute_scores(rollouts.union(prompts()))
    assert scored.batch["scores"].tolist() == [0.25] * 2 + [7.0] + [0.25] * 9
    assert [len(row) for row in scored.non_tensor_batch["reward_numbers"][:4]] == [1, 1, 0, 1]


def test_hermes_calls_are_found_in_a_text() -> None:
    text = 'I ask.<tool_call>\n{"name": "add", "arguments": {"number": 2}}\n</tool_call>'
    text += '<tool_call>{"name": "b"}</tool_call>'
    assert parse_hermes(text) == [("add", {"number": 2}), ("b", {})]
    assert parse_hermes("an answer") == []
    for wrong in ("{", "[]", '{"arguments": {}}', '{"name": "a", "arguments": 3}'):
        with pytest.raises((ValueError, TypeError, KeyError)):
            list(parse_hermes(f"<tool_call>{wrong}</tool_call>"))


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_adds_what_it_writes_after_the_end_token(demo: Demo) -> None:
    tokenizer = load_tokenizer(PolicyModelConfig(path=str(demo.model)))
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "= ").replace("message.role", "''")
    ids = added_tokens(tokenizer, [{"role": "tool", "content": "c"}], "line 1", {})
    assert tokenizer.decode(ids) == "= c <eos> = ?", "the last word stands for assistant"
    other_end = tokenizer.convert_tokens_to_ids("b")
    tokenizer.chat_template = tokenizer.chat_template.replace("<eos>", " b ")
    ids = added_tokens(tokenizer, [{"role": "tool", "content": "c"}], "line 1", {}, [other_end])
    assert tokenizer.decode(ids) == "= c b = ?", (
        "a turn may end with another token than that of the tokenizer"
    )
    tokenizer.chat_template = (
        "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(RolepoolError, match="changes earlier messages when others follow"):
        added_tokens(tokenizer, [{"role": "tool", "content": "c"}], "line 1", {})


# Config


class NoHelp:
    def reset(self) -> None: ...

    def tool(self, number):  # type: ignore[no-untyped-def]
        return number


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["environment.name=null"], "set both"),
        ([f"{HERE}.multi_turn.enable=false"], "set both"),
        ([f"{HERE}.tensor_model_parallel_size=2"], "needs 1"),
        ([f"{HERE}.multi_turn.format=yaml"], "must be one of hermes"),
        (["environment.name=absent"], "there is no such environment in "),
        (["environment.name=prompts"], "it must name an async function"),
        (["environment.name=NoHelp"], "the tool tool cannot be described"),
    ],
)
def test_what_is_wrong_in_the_config_is_said_with_its_key(
    keys: list[str], problem: str, demo: Demo
) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_rollout(demo, "one_turn", *keys)
