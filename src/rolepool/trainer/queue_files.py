"""The files of a queue in a checkpoint: responses and scores that no step has learned from yet.

    checkpoints/step_000010/
      trainer.json                                 the steps of the queue, and where their prompts begin
      queue_000011_rollouts.safetensors            one file for each part of the results of a step
      queue_000011_scores.safetensors
      queue_000011_baselines.safetensors           only with adv_estimator=remax
      trainer.sha256                               the hashes of these files

Tensors are stored as safetensors, and all other columns as JSON in the same file; nothing is
pickled. Whoever reads a file may have got it from anywhere, so everything in it is checked.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from rolepool.errors import ConfigError, DataError, explained
from rolepool.protocol import DataProto
from rolepool.protocol.batches import Rollouts, Scores, TypedBatch
from rolepool.protocol.columns import INPUT_IDS, is_ragged, lengths_of, ragged_parts
from rolepool.protocol.encoding import load_parts, save_parts
from rolepool.reading import open_regular
from rolepool.trainer.queue import StoredBatch
from rolepool.trainer.results import Results
from rolepool.trainer.state import QueuedStep, TrainState

KINDS: dict[str, type[TypedBatch]] = {"rollouts": Rollouts, "scores": Scores, "baselines": Scores}
"""The parts of results, and the columns that each of them must have."""
DAMAGED = (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, SafetensorError)
"""What reading and checking a file raise if it is damaged."""


def write_queue(folder: Path, queue: Iterable[StoredBatch]) -> list[Path]:
    """Write the results of a queue. Returns the files."""
    files: list[Path] = []
    for queued, results in queue:
        for part, batch in results._asdict().items():
            if batch is None:
                continue
            file = _file(folder, queued, part)
            try:
                save_parts(file, batch.batch, batch.non_tensor_batch, batch.meta_info)
            except DataError as error:
                what = f"the {part} of step {queued.step} cannot be saved in a checkpoint"
                reason = error.problems[0]
                fix = "return numbers, texts, and lists and dicts of them"
                raise DataError(f"{what}, because their column {reason}; {fix}") from None
            files.append(file)
    return files


def read_queue(folder: Path, state: TrainState) -> list[StoredBatch]:
    """The batches of a state's queue. Raises ConfigError if a file is missing or damaged."""
    return [StoredBatch(queued, _read_results(folder, queued)) for queued in state.queue]


def _file(folder: Path, queued: QueuedStep, part: str) -> Path:
    return folder / f"queue_{queued.step:06d}_{part}.safetensors"


def _read_results(folder: Path, queued: QueuedStep) -> Results:
    rollouts = _read(_file(folder, queued, "rollouts"), "rollouts")
    scores = _read(_file(folder, queued, "scores"), "scores")
    baselines = None
    file = _file(folder, queued, "baselines")
    if file.exists():
        baselines = _read(file, "baselines")
    if len(scores) != len(rollouts):
        what = f"{folder}: the queue has {len(rollouts)} responses of step {queued.step}"
        raise ConfigError(f"{what} and {len(scores)} scores; use another checkpoint")
    return Results(rollouts, scores, baselines)


def _read(file: Path, part: str) -> DataProto:
    """One part of the results of a step."""
    problem = f"{file}: not a complete part of a queue"
    with explained(problem, "copy the checkpoint again, or use another one", *DAMAGED):
        # To open a pipe could take forever.
        open_regular(file).close()
        batch, arrays, meta_info = load_parts(file)
        data = DataProto(batch, arrays, meta_info)
        for name, column in data.columns().items():
            if isinstance(column, Tensor) and is_ragged(column):
                _check_ragged(name, column, len(data))
        KINDS[part].of(data)
        if part == "rollouts":
            _check_tokens(Rollouts.of(data))
        else:
            _check_numbers("scores", Scores.of(data).scores, len(data))
    return data


def _check_ragged(name: str, column: Tensor, num_rows: int) -> None:
    """Raise DataError if the rows of a ragged column are not its values, one after another."""
    values, offsets = ragged_parts(column)
    is_list = offsets.dtype == torch.int64 and offsets.dim() == 1 and values.dim() >= 1
    if not is_list or len(offsets) != num_rows + 1:
        raise DataError(f"{name} has impossible offsets")
    is_in_order = bool((offsets.diff() >= 0).all())
    if offsets[0] != 0 or offsets[-1] != len(values) or not is_in_order:
        raise DataError(f"{name} has impossible offsets")


def _check_tokens(rollouts: Rollouts) -> None:
    """Raise DataError if the lengths of prompts and responses are not those of the tokens."""
    if not is_ragged(rollouts.input_ids):
        raise DataError(f"{INPUT_IDS} is not a ragged column")
    num_rows = len(rollouts.input_ids)
    if num_rows == 0:
        raise DataError("it has no rows")
    num_prompt = rollouts.num_prompt_tokens
    num_response = rollouts.num_response_tokens
    for name, counts in (("prompt", num_prompt), ("response", num_response)):
        _check_numbers(f"num_{name}_tokens", counts, num_rows)
        if counts.dtype != torch.int64 or bool((counts < 0).any()):
            raise DataError(f"num_{name}_tokens has impossible numbers")
    if not torch.equal(num_prompt + num_response, lengths_of(rollouts.input_ids)):
        raise DataError("its rows have other lengths than their prompts and responses together")
    tokens, _ = ragged_parts(rollouts.input_ids)
    if tokens.dtype != torch.int64 or bool((tokens < 0).any()):
        raise DataError(f"{INPUT_IDS} has impossible tokens")
    for name in _OF_RESPONSES:
        column: Tensor | None = getattr(rollouts, name)
        if column is None:
            continue
        if not is_ragged(column) or not torch.equal(lengths_of(column), num_response):
            raise DataError(f"{name} has other lengths than the responses")


_OF_RESPONSES: Sequence[str] = (
    "old_log_probs",
    "rollout_log_probs",
    "response_mask",
    "turn_scores",
)
"""The columns with a number for each token of the response."""


def _check_numbers(name: str, column: object, num_rows: int) -> None:
    """Raise DataError if a column does not have one number for each row."""
    if not isinstance(column, Tensor) or is_ragged(column) or tuple(column.shape) != (num_rows,):
        raise DataError(f"{name} is not a list of {num_rows} numbers")
