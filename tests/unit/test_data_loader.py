"""The loader gives every prompt once an epoch, in an order the seed decides, and goes on exactly
where it was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from rolepool.config import load_config
from rolepool.config.model_keys import PolicyModelConfig
from rolepool.data.demo import LETTERS
from rolepool.data.prompts import PromptLoader, PromptSet, validation_batches
from rolepool.data.tokenizer import load_tokenizer
from rolepool.errors import ConfigError, DataError
from rolepool.protocol import DataProto


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(PolicyModelConfig(path=str(model)))


def prompts_of(folder: Path, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> PromptSet:
    """As many rows, of different lengths; row i says i in its extra_info."""
    rows = [
        {
            "prompt": " ".join(LETTERS[: 1 + i % 5]),
            "data_source": "exact_match",
            "reward_model": {"ground_truth": str(i)},
            "extra_info": {"i": i},
        }
        for i in range(num_rows)
    ]
    file = folder / f"{num_rows}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = load_config(overrides=[f"data.train_files={file}", "data.max_prompt_length=8"]).config
    return PromptSet("train", config, tokenizer)


@pytest.fixture
def prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    return prompts_of(tmp_path, tokenizer, 10)


def uids(batch: DataProto) -> list[str]:
    return list(batch.non_tensor_batch["uid"])


def indices(batch: DataProto) -> list[int]:
    return [int(i) for i in batch.non_tensor_batch["index"]]


def take(loader: PromptLoader, num_batches: int) -> list[list[str]]:
    return [uids(loader.next_batch()) for _ in range(num_batches)]


def test_a_batch_has_the_columns_that_a_step_needs(prompts: PromptSet) -> None:
    batch = PromptLoader(prompts, 4, seed=1, shuffle=False).next_batch()
    assert (len(batch), batch.batch, batch.meta_info) == (4, None, {})
    columns = batch.non_tensor_batch
    assert list(columns["raw_prompt_ids"]) == [[4], [4, 5], [4, 5, 6], [4, 5, 6, 7]]
    assert columns["raw_prompt_ids"].shape == (4,)
    assert uids(batch) == ["epoch0-row0", "epoch0-row1", "epoch0-row2", "epoch0-row3"]
    assert list(columns["data_source"]) == ["exact_match"] * 4
    assert list(columns["reward_model"]) == [{"ground_truth": str(i)} for i in range(4)]
    assert list(columns["extra_info"]) == [{"i": i} for i in range(4)]
    assert columns["index"].dtype == np.int64
    assert indices(batch) == [0, 1, 2, 3]
    assert columns["origin"][3].endswith("10.jsonl, line 4")


def test_prompts_of_one_length_are_still_one_list_per_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = PromptLoader(prompts_of(tmp_path, tokenizer, 1), 1, seed=1).next_batch()
    assert batch.non_tensor_batch["raw_prompt_ids"].shape == (1,)
    assert batch.non_tensor_batch["raw_prompt_ids"][0] == [4]


def test_an_epoch_takes_each_prompt_at_most_once_and_drops_the_incomplete_batch(
    prompts: PromptSet,
) -> None:
    loader = PromptLoader(prompts, 4, seed=1)
    assert loader.num_batches_per_epoch == 2
    for epoch in range(3):
        assert loader.epoch == epoch
        seen = [index for _ in range(2) for index in indices(loader.next_batch())]
        assert len(set(seen)) == 8


def test_an_epoch_whose_batches_fit_takes_all_prompts(prompts: PromptSet) -> None:
    loader = PromptLoader(prompts, 5, seed=1)
    assert sorted(indices(loader.next_batch()) + indices(loader.next_batch())) == list(range(10))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else(prompts: PromptSet) -> None:
    a, b, other = (
        PromptLoader(prompts, 5, seed=1),
        PromptLoader(prompts, 5, seed=1),
        PromptLoader(prompts, 5, seed=2),
    )
    np.random.seed(7)
    first = take(a, 4)
    assert first == take(b, 4)
    assert first != take(other, 4)
    rows = [[uid.split("-")[1] for uid in batch] for batch in first]
    assert rows[0] + rows[1] != rows[2] + rows[3]


def test_without_shuffling_rows_come_in_the_order_of_the_files(prompts: PromptSet) -> None:
    loader = PromptLoader(prompts, 5, seed=1, shuffle=False)
    assert [indices(loader.next_batch()) for _ in range(3)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [0, 1, 2, 3, 4],
    ]


def test_uids_differ_between_epochs_and_are_those_of_any_other_run(prompts: PromptSet) -> None:
    loader = PromptLoader(prompts, 10, seed=1)
    first, second = take(loader, 2)
    assert not set(first) & set(second)
    assert sorted(first) == sorted(f"epoch0-row{i}" for i in range(10))


@pytest.mark.parametrize("num_before", range(6))
def test_a_restored_loader_goes_on_with_the_very_next_batch(
    prompts: PromptSet, num_before: int
) -> None:
    loader = PromptLoader(prompts, 4, seed=3)
    take(loader, num_before)
    state = json.loads(json.dumps(loader.state_dict()))
    restored = PromptLoader(prompts, 4, seed=3)
    take(restored, 1)
    restored.load_state_dict(state)
    assert restored.state_dict() == state
    assert take(restored, 5) == take(loader, 5)


def test_a_position_is_good_for_another_batch_size(prompts: PromptSet) -> None:
    loader = PromptLoader(prompts, 4, seed=3)
    seen = take(loader, 1)[0]
    smaller = PromptLoader(prompts, 2, seed=3)
    smaller.load_state_dict(loader.state_dict())
    rest = [uid for batch in take(smaller, 3) for uid in batch]
    assert sorted(seen + rest) == sorted(f"epoch0-row{i}" for i in range(10))


def test_a_larger_batch_that_does_not_fit_the_rest_starts_the_next_epoch(
    prompts: PromptSet,
) -> None:
    loader = PromptLoader(prompts, 4, seed=3)
    take(loader, 1)
    larger = PromptLoader(prompts, 8, seed=3)
    larger.load_state_dict(loader.state_dict())
    assert larger.epoch == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 9}, "seed was 9, is 3"),
        ({"shuffle": False}, "shuffle was False, is True"),
        ({"num_rows": 12}, "num_rows was 12, is 10"),
        ({"digest": "0"}, "digest was 0, is "),
    ],
)
def test_a_position_of_other_data_is_refused(
    prompts: PromptSet, change: dict[str, Any], expected: str
) -> None:
    loader = PromptLoader(prompts, 4, seed=3)
    with pytest.raises(DataError) as caught:
        loader.load_state_dict({**loader.state_dict(), **change})
    assert expected in str(caught.value)


def test_a_position_without_all_its_entries_is_refused(prompts: PromptSet) -> None:
    with pytest.raises(
        DataError, match="belongs to other data: num_rows was None, is 10; digest was None"
    ):
        PromptLoader(prompts, 4, seed=3).load_state_dict({"epoch": 0, "index": 0})


def test_fewer_prompts_than_one_batch_are_an_error_with_the_fix(prompts: PromptSet) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptLoader(prompts, 11, seed=1)
    assert str(caught.value) == (
        "data.train_batch_size=11: data.train_files has 10 prompts, less than one batch; use at most 10"
    )


def test_validation_takes_every_prompt_in_order_and_keeps_the_incomplete_batch(
    prompts: PromptSet,
) -> None:
    assert [indices(batch) for batch in validation_batches(prompts, 4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    (whole,) = validation_batches(prompts)
    assert uids(whole) == [f"val-row{i}" for i in range(10)]
