"""The plan as data for other programs: what `rolepool plan --json` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rolepool.placement.advice import Advice
from rolepool.placement.memory import MemoryEstimate, PoolMemory
from rolepool.placement.plan import Plan


def plan_as_json(plan: Plan, estimate: MemoryEstimate, problems: Sequence[str], advice: Sequence[Advice]) -> str:
    """One JSON object: pools, roles, overlaps, memory, problems, advice."""
    document = plan.model_dump(mode="json")
    document["memory"] = {
        "pools": {name: _memory(memory) for name, memory in estimate.pools.items()},
        "unknown": dict(estimate.unknown),
    }
    document["problems"] = list(problems)
    document["advice"] = [{"override": item.override, "excess_bytes": item.excess} for item in advice]
    return json.dumps(document, indent=2)


def _memory(memory: PoolMemory) -> dict[str, Any]:
    roles = {
        str(role): {
            "weights_bytes": part.weights,
            "gradients_bytes": part.gradients,
            "optimizer_bytes": part.optimizer,
            "kv_cache_bytes": part.kv_cache,
            "activations_bytes": part.activations,
            "logits_bytes": part.logits,
            "working_bytes": part.working,
            "idle_bytes": part.idle,
        }
        for role, part in memory.roles.items()
    }
    return {
        "roles": roles,
        "overhead_bytes": memory.overhead,
        "peak_bytes": memory.peak,
        "peak_role": str(memory.peak_role),
        "limit_bytes": memory.limit,
        "fits": memory.fits,
    }
