"""Pools of real processes on Ray. The only folder that imports ray."""

from rolepool.cluster.cluster import Cluster
from rolepool.cluster.group import RoleProxy, WorkerGroup, next_call_number
from rolepool.cluster.live import LiveState

__all__ = ["Cluster", "LiveState", "RoleProxy", "WorkerGroup", "next_call_number"]
