"""What a run folder tells, after the run: plots, pages, traces, comparisons. Reads files only; no torch, no ray."""
