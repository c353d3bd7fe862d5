"""Placement: which roles are in which pools on which GPUs. Only data and arithmetic, no torch, no ray."""

from rolepool.placement.plan import Plan, build_plan
from rolepool.placement.pools import ResourcePool, ResourcePoolManager
from rolepool.placement.roles import Role

__all__ = ["Plan", "ResourcePool", "ResourcePoolManager", "Role", "build_plan"]
