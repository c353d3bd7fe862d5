"""Environments of skyrl-gym in the rollout, against the real package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_environments import HERE, NUM_ROWS, make_rollout, prompts, same, sampled

from rolepool.data.demo import Demo
from rolepool.errors import ConfigError, RolepoolError
from rolepool.protocol.columns import rows_of_responses
from rolepool.rollout.engine import Completion

skyrl_gym = pytest.importorskip("skyrl_gym", reason="the extra skyrl-gym is not installed")

from skyrl_gym.envs.base_text_env import BaseTextEnv  # noqa: E402
from skyrl_gym.tools import PythonCodeExecutorToolGroup  # noqa: E402

from rolepool.recipes.environments.skyrl_gym_rollout import rollout_of  # noqa: E402

__all__ = ["sampled"]
TURNS = f"{HERE}.multi_turn"
ADAPTER = "rolepool.recipes.environments.skyrl_gym_rollout"


def test_the_example_of_the_page_trains_the_sampled_tokens_alone(
    demo: Demo, root: Path, tmp_path: Path, sampled: dict[int, list[Completion]]
) -> None:
    page = (root / "docs" / "environments.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n# my_gym\.py\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "my_gym.py").write_text(text, encoding="utf-8")
    keys = [f"environment.path={tmp_path / 'my_gym.py'}", f"{TURNS}.max_turn_tokens=3"]
    rollout = make_rollout(demo, "rollout", *keys)
    found = rollout.generate_sequences(prompts(40))
    batch = found.batch
    masks, log_probs, scores = (
        batch[key].unbind() for key in ("response_mask", "rollout_log_probs", "turn_scores")
    )
    for row, response in enumerate(rows_of_responses(batch)):
        turns, mask = sampled[row], masks[row]
        assert response[mask].tolist() == [
            token for turn in turns for token in turn.token_ids.tolist()
        ]
        assert log_probs[row][mask].tolist() == [
            value for turn in turns for value in turn.log_probs.tolist()
        ]
        assert response[~mask].tolist() == [4, 3] * (len(turns) - 1), "the message is the letter a"
        first_words = [
            rollout.conversations.tokenizer.decode(turn.token_ids).split()[0] for turn in turns
        ]  # type: ignore[union-attr]
        assert len(turns) == (1 if first_words[0] == "a" else 2)
        assert scores[row][mask].sum() == first_words.count("a")
        assert batch["num_tool_calls"][row] == len(turns)
    assert set(batch["num_turns"].tolist()) == {1, 2} and batch["environment_score"].max() == 1
    assert not batch["num_tool_errors"].any()
    assert same(rollout.generate_sequences(prompts(40)), found)


def test_rows_name_an_environment_of_the_package(demo: Demo) -> None:
    """The model cannot write an answer to gsm8k, so it uses all its turns."""
    keys = ["environment.path=null", f"{TURNS}.max_turn_tokens=2", f"{TURNS}.max_assistant_turns=3"]
    rollout = make_rollout(demo, f"{ADAPTER}:rollout", *keys, response=200)
    batch = rollout.generate_sequences(prompts(env_class="gsm8k_multi_turn")).batch
    assert batch["num_turns"].tolist() == [3] * NUM_ROWS
    assert batch["environment_score"].tolist() == [0.0] * NUM_ROWS
    assert (
        rollout.generate_sequences(prompts(env_class="gsm8k")).batch["num_turns"].tolist()
        == [1] * NUM_ROWS
    )
    for env_class, problem in (
        (None, "line 0 has no column env_class"),
        ("none", "No registered env with id: none"),
    ):
        with pytest.raises(RolepoolError, match=problem):
            rollout.generate_sequences(prompts(env_class=env_class))


class Calculator(BaseTextEnv):  # type: ignore[misc]
    """Calls a tool of the package in each step, changes the prompt, and fails for some rows."""

    def __init__(self, extras: dict[str, Any], factor: int) -> None:
        super().__init__()
        self.row, self.factor = extras["extra_info"]["row"], factor
        self.init_tool_groups([PythonCodeExecutorToolGroup()])

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        if self.row == 1:
            raise ValueError("no start")
        return [{"role": "user", "content": prompt[0]["content"] + " h"}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        if self.row == 2 and self.turns == 2:
            raise ValueError("no step")
        printed = self._execute_tool(
            "PythonCodeExecutorToolGroup", "python", [f"print({self.factor} * {self.turns})"]
        )
        messages = [{"role": "user", "content": "b"}]
        return {
            "observations": messages,
            "reward": float(printed),
            "done": self.turns == 3,
            "metadata": {},
        }


skyrl_gym.register("calculator", entry_point=Calculator)
calculator = rollout_of("calculator", factor=10)


def test_tools_of_the_package_run_in_tool_processes_and_errors_end_one_conversation(
    demo: Demo,
) -> None:
    rollout = make_rollout(
        demo, "calculator", f"environment.path={__file__}", f"{TURNS}.max_turn_tokens=2"
    )
    batch = rollout.generate_sequences(prompts(4)).batch
    assert batch["num_turns"].tolist() == [3, 1, 2, 3]
    assert batch["environment_score"].tolist() == [60.0, 0.0, 10.0, 60.0]
    assert [row[row > 0].tolist() for row in batch["turn_scores"].unbind()] == [
        [10.0, 20.0, 30.0],
        [],
        [10.0],
        [10.0, 20.0, 30.0],
    ]
    assert batch["num_tool_calls"].tolist() == [3, 0, 2, 3]
    assert batch["num_tool_errors"].tolist() == [0, 1, 1, 0]
    ids, num_prompt = batch["input_ids"].unbind(), batch["num_prompt_tokens"]
    assert ids[0][: num_prompt[0]].tolist() == [4, 4, 11, 3], "the prompt that init returned"


@pytest.mark.parametrize(
    ("key", "num_turns"),
    [("max_assistant_turns=2", 2), ("max_user_turns=1", 2), ("max_turn_tokens=9", 3)],
)
def test_the_limits_of_the_config_hold(demo: Demo, key: str, num_turns: int) -> None:
    keys = [
        f"environment.path={__file__}",
        f"{TURNS}.max_turn_tokens=2",
        f"{TURNS}.{key}",
        f"{HERE}.ignore_eos=true",
    ]
    batch = (
        make_rollout(demo, "calculator", *keys, response=200).generate_sequences(prompts(1)).batch
    )
    assert batch["num_turns"].tolist() == [num_turns]


def test_an_unknown_environment_is_found_before_the_run(demo: Demo, tmp_path: Path) -> None:
    text = f"from {ADAPTER} import rollout_of\nrollout = rollout_of('absent')\n"
    (tmp_path / "my_absent.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="No registered env with id: absent"):
        make_rollout(demo, "rollout", f"environment.path={tmp_path / 'my_absent.py'}")
