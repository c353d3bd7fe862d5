"""Prompts and rewards: Parquet and JSONL files, chat templates, batches, rule rewards, and the demo.

Does not know processes or models; only `demo` creates model folders, with random weights.
"""

from rolepool.data.loader import PromptLoader, validation_batches
from rolepool.data.prompts import PromptSet, train_prompts, val_prompts
from rolepool.data.tokenizer import load_tokenizer

__all__ = ["PromptLoader", "PromptSet", "load_tokenizer", "train_prompts", "val_prompts", "validation_batches"]
