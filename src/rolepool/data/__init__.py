"""Prompts and rewards: files and datasets, tokenizers and chat templates, batches, reward rules and
functions, the processes that run a user's code, and the demo.

Does not know ranks or models in training; only `demo` creates model folders, with random weights.
"""
