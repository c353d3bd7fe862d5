"""One line of each file of a run folder, checked and read.

A line may come from another version, so unknown fields are ignored, and fields of spans that have a
default may be missing. Readers raise ValueError for a line that they cannot read.
"""

import math
from functools import partial
from typing import Annotated, Any, NamedTuple, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, create_model

from rolepool.metrics.run_rows import event_kind
from rolepool.metrics.sampling import Sample
from rolepool.metrics.spans import Recorded, Span
from rolepool.reading import LARGEST

MAX_STEP = 2**31
"""Rows and spans of later steps are not those of a run."""


class Event(NamedTuple):
    """A row of metrics.jsonl about a restart or a move."""

    kind: str
    step: int
    """The step in which something died, or the first step after a move."""
    what: str
    """What died, or the placements before and after a move."""
    seconds: float
    """From the death, or from the end of the last step, until training resumed."""
    repeated_from_step: int | None = None
    """After a restart."""


def _span_fields() -> dict[str, Any]:
    """The fields of a line of spans.jsonl, as pydantic wants them: each with its type and default;
    `...` stands for no default."""
    types = {
        "step": Annotated[int, Field(ge=0, le=MAX_STEP)],
        "operation": str,
        **get_type_hints(Span, include_extras=True),
    }
    fields = {}
    for name, type_ in types.items():
        fields[name] = (type_, Span._field_defaults.get(name, ...))
    return fields


_SpanLine = create_model(
    "_SpanLine",
    __config__=ConfigDict(strict=True, allow_inf_nan=False),
    **_span_fields(),
)
_MetricsLine = TypeAdapter(dict[str, float], config=ConfigDict(strict=True))  # a loss may be NaN
_Event = TypeAdapter(Event)
_Object = TypeAdapter(dict[str, object])

read_sample = partial(TypeAdapter(Sample).validate_json, strict=True)


def read_span(line: bytes) -> Recorded:
    fields = vars(_SpanLine.model_validate_json(line))
    span = Span(*(fields[name] for name in Span._fields))
    if span.end_s < span.start_s:
        raise ValueError("ends before it starts")
    return Recorded(fields["step"], fields["operation"], span)


def read_row(line: bytes) -> tuple[int, dict[str, float]] | Event:
    """A step and its metrics, or an event."""
    kind = event_kind(line)
    if kind:
        return _read_event(kind, line)
    metrics = _MetricsLine.validate_json(line)
    step = metrics.pop("step", math.nan)
    is_step = step.is_integer() and 0 <= step <= MAX_STEP
    if not is_step:
        raise ValueError("has no step")
    for name, value in metrics.items():
        # Sums of larger numbers would overflow.
        if abs(value) > LARGEST:
            metrics[name] = math.copysign(math.inf, value)
    return int(step), metrics


def _read_event(kind: str, line: bytes) -> Event:
    """An event: `{"step": 7, "restart": {"what": ..., "seconds": ...}}`."""
    row = _Object.validate_json(line)
    details = _Object.validate_python(row.get(kind))
    values = {**row, "kind": kind, **details}
    known_fields = {name: values[name] for name in Event._fields if name in values}
    return _Event.validate_python(known_fields)
