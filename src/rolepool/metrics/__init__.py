"""What a run measures: spans, samples of GPUs and processes, and the run folder. No torch, no
ray."""

from rolepool.metrics.spans import Span as Span
