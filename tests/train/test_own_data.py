"""A user's own file, with two columns of any name, trains with a weighted sum of rewards, each of
them logged."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from train_helpers import ONE_RANK, rows_of, train

from rolepool.data.demo import Demo

REWARD = """
def first_letter(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "letters"
    return {"score": solution_str[:1] == ground_truth[0], "level": extra_info["level"]}
"""


@pytest.mark.slow
def test_two_columns_and_two_functions(demo: Demo, tmp_path: Path) -> None:
    letters, drawn = "abcdefgh", random.Random(1)
    rows = []
    for _ in range(64):
        chosen = drawn.choices(range(8), k=2)
        question, answer = (
            " ".join(letters[(one + step) % 8] for one in chosen) for step in (0, 1)
        )
        rows.append({"question": question, "answer": answer, "level": 3})
    file = tmp_path / "letters.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
    keys = [
        f"data.train_files={file}",
        "data.val_files=[]",
        "data.prompt_key=question",
        "data.answer_key=answer",
        "data.system_prompt=a",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=2",
        f"reward.functions=[position_match,math,{{function: {tmp_path / 'mine.py'}:first_letter, weight: -0.5}}]",
    ]
    train(demo, tmp_path / "run", *ONE_RANK, *keys)
    steps = [row for row in rows_of(tmp_path / "run") if "critic/score/mean" in row]
    assert len(steps) == 2
    for row in steps:
        parts = [row[f"reward/{name}/mean"] for name in ("position_match", "math", "first_letter")]
        assert row["critic/score/mean"] == pytest.approx(
            parts[0] + parts[1] - 0.5 * parts[2], abs=1e-6
        )
        assert row["reward/first_letter/level/mean"] == 3
        assert (
            row["prompt_length/mean"] == 4
        )  # the system prompt, two letters, and the template's `=`
    assert steps[0]["reward/position_match/mean"] > 0
