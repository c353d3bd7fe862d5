"""Placement: which roles are in which pools on which GPUs. Only data and arithmetic, no torch, no
ray."""

from rolepool.placement.parallel import ParallelDims
from rolepool.placement.plan import Plan, ResourcePool, ResourcePoolManager
from rolepool.placement.roles import Role
from rolepool.placement.strategies import build_plan

__all__ = ["ParallelDims", "Plan", "ResourcePool", "ResourcePoolManager", "Role", "build_plan"]
