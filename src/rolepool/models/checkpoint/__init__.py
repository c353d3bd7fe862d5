"""Saved states of models in training: written by all ranks, read under any number of them, exported for anyone.

Owns what a checkpoint looks like on disk: safetensors and JSON, nothing pickled. What else a run saves (data position,
metrics) and when, is the trainer's.

    checkpoints/step_000010/
      trainer.json                       the trainer's own; its presence is part of being whole
      actor/                             one folder for each saved role
        rank_00000_of_00002.json         how much was saved, number of updates, random states
        shard-*.safetensors              weights by Hugging Face name; NAME/exp_avg, NAME/exp_avg_sq, NAME/step
        config.json                      the model's configuration, where it is a Hugging Face model
"""

from rolepool.models.checkpoint.export import export_hf
from rolepool.models.checkpoint.folders import (
    checkpoint_folder,
    newest_checkpoint,
    publish,
    remove_old,
    remove_unfinished,
    temporary_folder,
)
from rolepool.models.checkpoint.state import load_trained, save_trained

__all__ = [
    "checkpoint_folder",
    "export_hf",
    "load_trained",
    "newest_checkpoint",
    "publish",
    "remove_old",
    "remove_unfinished",
    "save_trained",
    "temporary_folder",
]
