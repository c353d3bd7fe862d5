"""A local Ray that the run starts: its settings, a second attempt if it does not start, and noticing that it has died.

Owns what is said if a part of Ray dies. Workers that die while Ray lives are the business of `rolepool.cluster.group`.
"""

import logging
import os
import re
from collections.abc import Callable
from typing import Any

import ray._private.worker as ray_worker
from ray._private import ray_constants, ray_logging

from rolepool.errors import PlacementError, RayDiedError, one_line

logger = logging.getLogger(__name__)

SYSTEM_CONFIG = {"task_events_report_interval_ms": 0}
"""No record of each call. Ray's GCS process would keep the last 100,000 of them in memory, and nothing here reads
them (benchmarks/gcs_memory.py)."""
START_LIMIT = "RAY_gcs_server_port_wait_time_s"
PARTS = {ray_constants.PROCESS_TYPE_RAYLET: "raylet", ray_constants.PROCESS_TYPE_GCS_SERVER: "GCS server"}
"""The processes without which Ray does not work."""


def start_local_ray(init: Callable[..., None], **options: Any) -> None:
    """Call `init`, which calls `ray.init`, and once more with a longer time limit if Ray does not start, because a busy
    machine can be too slow for Ray's own limits. Raises PlacementError."""
    # If the raylet dies, Ray prints 40 lines of its log. `raise_if_ray_died` says what happened.
    ray_logging.stdout_deduplicator.skip_re = re.compile("^Raylet is terminated")
    try:
        return init(**options)
    except Exception as error:  # Ray raises errors of many types here, also plain `Exception`
        logger.warning("Ray did not start (%s); trying once more with a longer time limit", one_line(error))
    os.environ[START_LIMIT] = "180"
    try:
        return init(**options)
    except Exception as error:
        fix = "stop other programs if the machine is busy, or see Ray's logs (/tmp/ray/session_latest/logs)"
        raise PlacementError(f"Ray did not start, twice ({one_line(error)}); {fix}") from None


def raise_if_ray_died() -> None:
    """Raise RayDiedError if a part of the Ray that this process started has ended. This costs a few microseconds."""
    if (death := ray_death()) is not None:
        raise RayDiedError(death)


def ray_death() -> str | None:
    """Which part of the Ray that this process started has ended, and how; None if all parts run."""
    node: Any = ray_worker._global_node
    if node is None:
        return None
    for kind, name in PARTS.items():
        for process in (started.process for started in node.all_processes.get(kind, ())):
            if (code := process.poll()) is not None:
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                return f"Ray's {name} (pid {process.pid}) died: {how}; its log: {node.get_logs_dir_path()}"
    return None
