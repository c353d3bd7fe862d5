"""Rollout: the engine interface and the engines.

Does not know about pools, nor how responses become training batches.
"""

from rolepool.rollout.engine import Completion, Engine, Request, Sampling
from rolepool.rollout.native import NativeEngine
from rolepool.rollout.sampling import sample_seed

__all__ = ["Completion", "Engine", "NativeEngine", "Request", "Sampling", "sample_seed"]
