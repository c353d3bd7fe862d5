"""The responses that validations and training steps recorded in a run folder, for its page.

Owns how much of them is read and shown: a run folder may come from anywhere, and a page has to stay
small.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, TypeGuard

from pydantic import TypeAdapter

from rolepool.metrics.row_text import validation_score
from rolepool.reading import open_regular
from rolepool.report.metrics_by_step import REWARD
from rolepool.report.run import ReadRun

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

_Line = TypeAdapter(dict[str, object])

SampleRow = tuple[str, str, str, float | None, str, dict[str, float]]
"""A response for the page: the question, the response, the ground truth, the score, the source of
the row, and other numbers by name."""


class SampleGroup(TypedDict):
    """The responses of a validation or of a training step, as the page's script reads them."""

    kind: str
    step: int
    score: float | None
    num: int
    """Responses that were recorded; `rows` are those that are shown."""
    rows: list[SampleRow]


class Samples(TypedDict):
    """The responses that are shown, newest first: those of validations, then those of training
    steps."""

    groups: list[SampleGroup]
    num_hidden: int
    """Files that are not shown."""


def samples_of(run: ReadRun) -> Samples:
    """The responses of some validations and of some training steps. Lines that cannot be read are
    counted in `run.skipped`."""
    groups: list[SampleGroup] = []
    num_hidden = 0
    for folder, (kind, score_of) in FOLDERS.items():
        numbered = _numbered_files(run.folder / folder)
        chosen = _spread(sorted(numbered), MAX_STEPS)
        num_hidden += len(numbered) - len(chosen)
        for step in reversed(chosen):
            name = f"{folder}/{numbered[step].name}"
            samples = list(run.read_lines(name, _Line.validate_json, _first_lines))
            if not samples:
                continue
            metrics_of_step = run.metrics.get(step, {})
            most_letters = MAX_LETTERS // len(FOLDERS) // len(chosen)
            group: SampleGroup = {
                "kind": kind,
                "step": step,
                "score": score_of(metrics_of_step),
                "num": len(samples),
                "rows": _shown(samples, most_letters),
            }
            groups.append(group)
    return {"groups": groups, "num_hidden": num_hidden}


def _numbered_files(folder: Path) -> dict[int, Path]:
    """The files `step_000012.jsonl` of a folder, by step."""
    files = {}
    for path in folder.glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        # `int` reads digits of all scripts; only ours are the name of a step.
        if number.isascii() and number.isdecimal():
            files[int(number)] = path
    return files


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """The first and the last step, and others evenly between them."""
    if len(steps) <= most:
        return list(steps)
    last = len(steps) - 1
    chosen = []
    for index in range(most):
        place = round(index * last / (most - 1))
        chosen.append(steps[place])
    return chosen


def _first_lines(path: Path) -> Iterator[bytes]:
    """The lines at the beginning of a file, without one that its end or the limit cuts."""
    with open_regular(path) as file:
        text = file.read(MAX_FILE_BYTES)
    for line in text.splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield line


def _shown(samples: Sequence[Mapping[str, object]], most_letters: int) -> list[SampleRow]:
    """The first responses, which together have at most this many letters."""
    rows: list[SampleRow] = []
    num_letters = 0
    for sample in samples[:MAX_RESPONSES]:
        question = _short(sample.get("question") or sample.get("prompt"))
        response = _short(sample.get("response"))
        truth = _short(sample.get("ground_truth"))
        source = _short(sample.get("data_source"))
        others = _other_numbers(sample)
        for text in (question, response, truth, source, *others):
            num_letters += len(text)
        if num_letters > most_letters:
            break
        score = sample.get("score")
        if not _is_number(score):
            score = None
        row = (question, response, truth, score, source, others)
        rows.append(row)
    return rows


def _other_numbers(sample: Mapping[str, object]) -> dict[str, float]:
    """What the reward function returned besides the score."""
    numbers = {}
    for name, value in sample.items():
        if name not in NAMES and _is_number(value):
            numbers[_short(name)] = value
    return numbers


def _is_number(value: object) -> TypeGuard[float]:
    """Whether a page can show it as a number: neither NaN nor infinite, nor too large for a
    float."""
    return isinstance(value, int | float) and abs(value) < MAX_NUMBER


def _short(value: object) -> str:
    """A value as text; a long text is cut, and says so."""
    if value is None:
        return ""
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False)
    num_hidden = len(text) - MAX_TEXT
    if num_hidden <= 0:
        return text
    return f"{text[:MAX_TEXT]} … ({num_hidden:,} more letters)"
