"""Prompts and rewards: Parquet and JSONL files, chat templates, batches, rule rewards, and the demo.

Does not know processes or models; only `demo` creates model folders, with random weights.
"""
