"""Prompts in, rewards out: Parquet and JSONL files, chat templates, batches with a position, rule rewards, the demo.

Knows no process and no model; `demo` alone makes model folders, with random weights.
"""

from rolepool.data.loader import PromptLoader, validation_batches
from rolepool.data.prompts import PromptSet, train_prompts, val_prompts
from rolepool.data.tokenizer import load_tokenizer

__all__ = ["PromptLoader", "PromptSet", "load_tokenizer", "train_prompts", "val_prompts", "validation_batches"]
