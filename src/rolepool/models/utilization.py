"""How much of a GPU's arithmetic an update used: its model's operations over what the data sheet promises."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from rolepool.placement.models import ModelShape

PEAK_FLOPS = {
    "A100": 312e12,
    "L40S": 362e12,
    "H20": 148e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
}
"""Matrix operations per second in 16 bits, without sparsity, by a word of the GPU's name."""


def model_utilization(shape: ModelShape | None, lengths: Tensor, seconds: float, device: str) -> float | None:
    """The utilization by one rank's update on rows of these lengths, between 0 and 1; None if the model's shape or the
    GPU's peak is not known."""
    peak = None if device == "cpu" else peak_flops(torch.cuda.get_device_name())
    if shape is None or peak is None:
        return None
    return training_flops(shape, lengths) / (seconds * peak)


def training_flops(shape: ModelShape, lengths: Tensor) -> float:
    """Forward and backward: six operations per parameter and token, and causal attention within each sequence."""
    width = shape.num_heads * shape.head_dim
    attention = 6 * shape.num_layers * width * int((lengths.long() ** 2).sum())
    return 6.0 * shape.num_params * int(lengths.sum()) + attention


def peak_flops(gpu_name: str) -> float | None:
    words = re.split(r"\W+", gpu_name)
    return next((flops for word, flops in PEAK_FLOPS.items() if word in words), None)
