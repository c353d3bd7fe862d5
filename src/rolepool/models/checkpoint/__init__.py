"""Checkpoints of models in training: all ranks write them, any number of ranks can read them, and they can be exported.

Owns what a checkpoint looks like on disk: safetensors and JSON, nothing pickled. The trainer owns what else a run saves
(data position, metrics) and when.

    checkpoints/step_000010/
      trainer.json                       written by the trainer; a checkpoint without it is not complete
      actor/                             one folder for each saved role
        rank_00000_of_00002.json         size of all tensors, number of updates, random states
        shard-*.safetensors              weights by Hugging Face name; NAME/exp_avg, NAME/exp_avg_sq, NAME/step
        config.json                      the model's configuration, if it is a Hugging Face model
"""
