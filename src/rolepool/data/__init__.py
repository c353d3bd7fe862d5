"""Prompts in, rewards out: Parquet and JSONL files, chat templates, batches with a position, rule rewards, the demo.

Knows no process and no model; `demo` alone makes model folders, with random weights.
"""

from rolepool.data.loader import PromptLoader, validation_batches
from rolepool.data.prompts import Prompt, PromptSet, train_prompts, val_prompts
from rolepool.data.rewards import RewardError, RewardFunction, Scored, load_reward_function, score_batch
from rolepool.data.tokenizer import load_tokenizer

__all__ = [
    "Prompt",
    "PromptLoader",
    "PromptSet",
    "RewardError",
    "RewardFunction",
    "Scored",
    "load_reward_function",
    "load_tokenizer",
    "score_batch",
    "train_prompts",
    "val_prompts",
    "validation_batches",
]
