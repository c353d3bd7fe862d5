"""Views of a run folder: plots, pages, traces, comparisons. Only reads files; no torch, no ray."""
