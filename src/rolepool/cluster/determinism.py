"""Deterministic arithmetic of a worker process (`trainer.deterministic`): with the same seed and the
same placement, a run computes the same bits again.

Owns the switches of torch, cuBLAS, cuDNN, NCCL and the compiler. Without them, some kernels of a
GPU add numbers in the order in which its threads happen to finish, and some are chosen by measuring
which of several is fastest.
"""

import os

import torch

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}
"""What libraries read when they start. cuBLAS gets workspaces of a fixed size, because the size
decides which kernel it chooses. NCCL adds along a ring, in which the order of ranks is fixed; a
switch that adds by itself (NVLS) has no fixed order."""


def compute_deterministically(device: str) -> None:
    """From now on, this process computes deterministically. Call it before the process uses its
    GPU, because the libraries read their variables only once.

    An operation that has no deterministic kernel raises an error that names it.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # a value that the user has exported stays
    # This also holds for attention: the backward passes of its kernels ask for this switch.
    torch.use_deterministic_algorithms(True)
    # Otherwise torch would fill each new tensor with NaN, also those that are overwritten at once.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if device != "cpu":  # nothing is compiled for a CPU
        import torch._inductor.config as inductor

        # Kernels of sums are then not chosen by measuring, so that every process has the same ones.
        inductor.deterministic = True
