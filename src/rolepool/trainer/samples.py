"""Files with all samples: `trainer.rollout_data_dir` and `trainer.validation_data_dir`.

Owns their format, which is verl's, and the thread that writes them, so that no step waits until a file is written.
"""

import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.errors import explained
from rolepool.files import write_atomically
from rolepool.protocol import DataProto
from rolepool.protocol.ragged import rows_of_responses


class Generated(NamedTuple):
    """A batch of samples: prompts, the tokens of prompts and responses, and what the reward returned for them."""

    prompts: DataProto
    rollouts: DataProto
    scored: DataProto


class SampleFiles:
    """Writes files in the background."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: Future[None] | None = None

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Wait for the last file after the block. Raises ConfigError if it could not be written."""
        try:
            yield
            self._wait()
        finally:
            self._thread.shutdown()

    def write(self, key: str, step: int, batches: Sequence[Generated]) -> None:
        """Begin to write a file to the folder that the key names. Raises ConfigError if the file before it failed."""
        self._wait()
        self._last = self._thread.submit(self._write, key, step, batches)

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def _write(self, key: str, step: int, batches: Sequence[Generated]) -> None:
        folder = Path(self._config.at(key)).expanduser()
        with explained(f"{key}={folder}: {step}.jsonl cannot be written", "fix it and resume"):
            folder.mkdir(parents=True, exist_ok=True)
            lines = (line for batch in batches for line in self._lines(step, batch))
            write_atomically(folder / f"{step}.jsonl", lines)

    def _lines(self, step: int, batch: Generated) -> Iterator[str]:
        columns, others = batch.prompts.non_tensor_batch, batch.scored.non_tensor_batch
        numbers = {name.removeprefix("reward/"): array.tolist() for name, array in others.items()}
        rows = zip(
            columns["raw_prompt_ids"],
            rows_of_responses(batch.rollouts.batch),
            columns["reward_model"],
            batch.scored.batch["scores"].tolist(),
            strict=True,
        )
        for index, (prompt, response, reward_model, score) in enumerate(rows):
            texts = [str(self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in (prompt, response)]
            sample = {"input": texts[0], "output": texts[1], "gts": reward_model.get("ground_truth"), "score": score}
            # A number that the function did not return for this row is NaN.
            given = {name: values[index] for name, values in numbers.items() if not math.isnan(values[index])}
            yield json.dumps({**sample, "step": step, **given}, default=str) + "\n"
