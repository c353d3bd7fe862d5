"""What a run folder says: plots, comparison, HTML, traces. Reads files only; neither torch nor ray."""
