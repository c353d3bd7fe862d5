"""Rollout: the engine interface and the engines.

Does not know about pools, nor how responses become training batches.
"""

from __future__ import annotations

from rolepool.rollout.engine import (
    Capabilities,
    Completion,
    Engine,
    Progress,
    Request,
    Sampling,
    sample_seed,
)
from rolepool.rollout.native import NativeEngine

__all__ = [
    "Capabilities",
    "Completion",
    "Engine",
    "NativeEngine",
    "Progress",
    "Request",
    "Sampling",
    "sample_seed",
]
