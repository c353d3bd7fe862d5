"""What was measured: spans, and later their reduction to metrics. No torch, no ray."""

from rolepool.metrics.spans import Span

__all__ = ["Span"]
