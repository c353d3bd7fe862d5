"""What waits in the queue is saved in a checkpoint, as it is; a damaged file is one clear line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rolepool.errors import ConfigError, DataError
from rolepool.protocol import DataProto
from rolepool.protocol.batches import Rollouts, Scores, objects
from rolepool.protocol.columns import flat_values, lengths_of, ragged
from rolepool.trainer.queue import StoredBatch
from rolepool.trainer.queue_files import read_queue, write_queue
from rolepool.trainer.results import Results
from rolepool.trainer.state import QueuedStep, TrainState

STEP = 3
NUM_PROMPT = torch.tensor([2, 1])
NUM_RESPONSE = torch.tensor([1, 3])
STATE = TrainState(
    step=STEP - 1,
    data={},
    kl_controller={},
    queue=(QueuedStep(step=STEP, data={"epoch": 0}),),
)


def rollouts(**others: Any) -> DataProto:
    columns = {
        "input_ids": ragged(torch.tensor([7, 8, 9, 4, 5, 6, 2]), NUM_PROMPT + NUM_RESPONSE),
        "num_prompt_tokens": NUM_PROMPT,
        "num_response_tokens": NUM_RESPONSE,
        "rollout_log_probs": ragged(torch.tensor([-0.5, -1.0, -1e-30, -3.0]), NUM_RESPONSE),
        "weights_version": torch.tensor([1, 1]),
        **others,
    }
    return Rollouts(**columns).to_proto()


def results(**others: Any) -> Results:
    numbers = objects([{"acc": 1.0, "nan": float("nan")}, {"length": 2}])
    scores = Scores(
        scores=torch.tensor([0.1, 0.2]), reward_numbers=numbers, pred=objects(["4", None])
    )
    return Results(rollouts(**others), scores.to_proto())


def write(folder: Path, stored: Results) -> list[Path]:
    return write_queue(folder, [StoredBatch(STATE.queue[0], stored)])


def test_a_queue_comes_back_bit_for_bit(tmp_path: Path) -> None:
    mask = ragged(torch.tensor([True, True, False, True]), NUM_RESPONSE)
    baselines = Scores(scores=torch.tensor([0.3])).to_proto()
    before = results(response_mask=mask)._replace(baselines=baselines)
    files = write(tmp_path, before)
    assert [file.name for file in files] == [
        "queue_000003_rollouts.safetensors",
        "queue_000003_scores.safetensors",
        "queue_000003_baselines.safetensors",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(files), "nothing unfinished is left"
    ((queued, after),) = read_queue(tmp_path, STATE)
    assert queued == STATE.queue[0]
    for one, other in zip(before, after, strict=True):
        assert one is not None and other is not None
        assert one.columns().keys() == other.columns().keys()
    for name, column in before.rollouts.batch.items():
        found = after.rollouts.batch[name]
        assert found.dtype == column.dtype
        if name in ("input_ids", "rollout_log_probs", "response_mask"):
            assert torch.equal(lengths_of(found), lengths_of(column))
            assert torch.equal(flat_values(found), flat_values(column))
        else:
            assert torch.equal(found, column)
    arrays = after.scores.non_tensor_batch
    assert arrays["pred"].tolist() == ["4", None]
    assert np.isnan(arrays["reward_numbers"][0].pop("nan"))
    assert arrays["reward_numbers"].tolist() == [{"acc": 1.0}, {"length": 2}]


def test_a_column_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    stored = results()
    stored.scores.non_tensor_batch["mine"] = objects([object(), object()])
    with pytest.raises(DataError) as caught:
        write(tmp_path, stored)
    (line,) = caught.value.problems
    assert "the scores of step 3 cannot be saved in a checkpoint" in line
    assert "'mine'" in line and "return numbers, texts, and lists" in line


# Damaged and hostile files


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a file, and keep its texts."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        texts = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, texts)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def overwrite(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


def put(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda file: rewrite(file, lambda tensors: tensors.update({name: tensor}))


def drop(name: str) -> Callable[[Path], None]:
    return lambda file: rewrite(file, lambda tensors: tensors.pop(name))


def put_texts(**texts: Any) -> Callable[[Path], None]:
    encoded = {name: json.dumps(value) for name, value in texts.items()}
    return lambda file: save_file({}, file, encoded)


def write_number(file: Path) -> None:
    """A number where there should be a list of the rows."""
    texts = {"keys": '[[], ["scores"]]', "batch_size": "null", "arrays/scores": "7"}
    save_file({}, file, texts)


def write_nested(file: Path) -> None:
    save_file({}, file, {"keys": "[" * 100_000 + "]" * 100_000})


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "missing": ("rollouts", Path.unlink),
    "empty": ("scores", overwrite(b"")),
    "text": ("rollouts", overwrite(b"no tensors")),
    "cut": ("rollouts", cut),
    "pipe": ("scores", make_pipe),
    "folder": ("scores", make_folder),
    "no columns": ("rollouts", put_texts(keys=[[], []], batch_size=None)),
    "no list of columns": ("rollouts", put_texts(keys=3, batch_size=[2])),
    "deeply nested": ("rollouts", write_nested),
    "numbers in place of rows": ("scores", write_number),
    "lost column": ("rollouts", drop("batch/num_prompt_tokens")),
    "offsets that end early": ("rollouts", put("batch/input_ids/offsets", torch.tensor([0, 3, 4]))),
    "offsets that end late": ("rollouts", put("batch/input_ids/offsets", torch.tensor([0, 3, 900]))),
    "offsets that go back": ("rollouts", put("batch/input_ids/offsets", torch.tensor([0, 9, 7]))),
    "negative offsets": ("rollouts", put("batch/input_ids/offsets", torch.tensor([-4, 3, 7]))),
    "offsets that are no integers": ("rollouts", put("batch/input_ids/offsets", torch.tensor([0.0, 3, 7]))),
    "too many offsets": ("rollouts", put("batch/input_ids/offsets", torch.tensor([0, 1, 3, 7]))),
    "tokens that are numbers": ("rollouts", put("batch/input_ids/values", torch.rand(7))),
    "negative tokens": ("rollouts", put("batch/input_ids/values", torch.full((7,), -1))),
    "tokens of other lengths": ("rollouts", put("batch/num_prompt_tokens", torch.tensor([1, 1]))),
    "negative lengths": ("rollouts", put("batch/num_response_tokens", torch.tensor([-1, 3]))),
    "log-probs of other lengths": ("rollouts", put("batch/rollout_log_probs/offsets", torch.tensor([0, 3, 4]))),
    "another number of rows": ("scores", put("batch/scores", torch.rand(3))),
    "a table of scores": ("scores", put("batch/scores", torch.rand(2, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    write(tmp_path, results())
    part, damage = DAMAGES[name]
    file = tmp_path / f"queue_000003_{part}.safetensors"
    damage(file)
    with pytest.raises(ConfigError) as caught:
        read_queue(tmp_path, STATE)
    (line,) = caught.value.problems
    assert line.startswith(f"{file}: not a complete part of a queue (")
    assert "\n" not in line and len(line) < 600


def test_scores_of_another_number_of_rows_are_found(tmp_path: Path) -> None:
    scores = Scores(scores=torch.rand(3)).to_proto()
    write(tmp_path, results()._replace(scores=scores))
    with pytest.raises(ConfigError, match="has 2 responses of step 3 and 3 scores"):
        read_queue(tmp_path, STATE)
