"""A reward for models with random weights: it differs between responses and takes no time, so
advantages and losses of a benchmark are not zero. It means nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NUM_SCORES = 101


def score_by_letters(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Scores from 0 to 1, which the letters of each response decide."""
    return [sum(map(ord, text)) % NUM_SCORES / (NUM_SCORES - 1) for text in completions]
