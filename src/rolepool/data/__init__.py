"""Prompts and rewards: files and datasets, chat templates, batches, reward rules and functions, and
the demo.

Does not know processes or models; only `demo` creates model folders, with random weights.
"""
