"""The responses that validations and training steps recorded in a run folder, for its page.

Owns how much of them is read and shown: a run folder may come from anywhere, and a page has to stay
small.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rolepool.metrics.row_text import validation_score
from rolepool.reading import open_regular
from rolepool.report.metrics_by_step import REWARD
from rolepool.report.run import Run

MAX_STEPS = 12
"""Validations, and training steps, that are shown: the first and the last one, and others evenly
between them."""
MAX_RESPONSES = 64
"""Responses of a validation or step that are shown."""
MAX_TEXT = 2_000
"""Letters of a text that are shown."""
MAX_LETTERS = 600_000
"""Letters of all texts on a page."""
MAX_FILE_BYTES = 2**23
"""How much of a file is read."""
MAX_NUMBER = 1e300
NAMES = ("prompt", "question", "response", "ground_truth", "score", "data_source")
"""What a line contains besides other numbers of the reward function."""

FOLDERS: dict[str, tuple[str, Callable[[Mapping[str, float]], float | None]]] = {
    "validation": ("validation", validation_score),
    "training_responses": ("training", lambda metrics: metrics.get(REWARD)),
}
"""For each folder what its responses come from, and their mean score, from the metrics of the
step."""

_Line = TypeAdapter(dict[str, Any])


def samples_of(run: Run) -> dict[str, Any]:
    """The responses of some validations, then those of some training steps, newest first; and the
    number of files that are not shown. Lines that cannot be read are counted in `run.skipped`."""
    groups = []
    num_hidden = 0
    for folder, (kind, score_of) in FOLDERS.items():
        numbered = _numbered_files(run.folder / folder)
        chosen = _spread(sorted(numbered), MAX_STEPS)
        num_hidden += len(numbered) - len(chosen)
        for step in reversed(chosen):
            name = f"{folder}/{numbered[step].name}"
            samples = list(run.read_lines(name, _Line.validate_json, _first_lines))
            if samples:
                score = score_of(run.metrics.get(step, {}))
                shown = _shown(samples, MAX_LETTERS // len(FOLDERS) // len(chosen))
                groups.append(
                    {"kind": kind, "step": step, "score": score, "num": len(samples), "rows": shown}
                )
    return {"groups": groups, "num_hidden": num_hidden}


def _numbered_files(folder: Path) -> dict[int, Path]:
    """The files `step_000012.jsonl` of a folder, by step."""
    files = {path.stem.removeprefix("step_"): path for path in folder.glob("step_*.jsonl")}
    return {
        int(number): path
        for number, path in files.items()
        if number.isascii() and number.isdecimal()
    }


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """The first and the last step, and others evenly between them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def _first_lines(path: Path) -> Iterator[bytes]:
    """The lines at the beginning of a file, without one that its end or the limit cuts."""
    with open_regular(path) as file:
        text = file.read(MAX_FILE_BYTES)
    for line in text.splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield line


def _shown(samples: Sequence[Mapping[str, Any]], most_letters: int) -> list[list[Any]]:
    """The first responses, until they have so many letters."""
    rows: list[list[Any]] = []
    num_letters = 0
    for sample in samples[:MAX_RESPONSES]:
        question = _short(sample.get("question") or sample.get("prompt"))
        response = _short(sample.get("response"))
        truth = _short(sample.get("ground_truth"))
        source = _short(sample.get("data_source"))
        others = {
            _short(name): value
            for name, value in sample.items()
            if name not in NAMES and _is_number(value)
        }
        num_letters += (
            len(question) + len(response) + len(truth) + len(source) + sum(map(len, others))
        )
        if num_letters > most_letters:
            break
        score = sample.get("score")
        rows.append(
            [question, response, truth, score if _is_number(score) else None, source, others]
        )
    return rows


def _is_number(value: Any) -> bool:
    """Whether a page can show it as a number: neither NaN nor infinite, nor too large for a
    float."""
    return isinstance(value, int | float) and abs(value) < MAX_NUMBER


def _short(value: Any) -> str:
    """A value as text; a long text is cut, and says so."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    num_hidden = len(text) - MAX_TEXT
    return text if num_hidden <= 0 else f"{text[:MAX_TEXT]} … ({num_hidden:,} more letters)"
