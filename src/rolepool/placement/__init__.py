"""Placement: which roles are in which pools on which GPUs. Only data and arithmetic, no torch, no
ray."""

from rolepool.placement.parallel import ParallelDims
from rolepool.placement.plan import Plan, ResourcePool, ResourcePoolManager, build_plan
from rolepool.placement.roles import Role

__all__ = ["ParallelDims", "Plan", "ResourcePool", "ResourcePoolManager", "Role", "build_plan"]
