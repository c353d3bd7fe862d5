"""The title of a worker process, which `ps`, `top` and `nvidia-smi` show.

Ray gives a process a new title before and after each call, such as "ray::WorkerProcess.run". It has
no setting for that. So this module replaces the function of Ray that does it, in this process only:
https://github.com/ray-project/ray/blob/ray-2.60.0/python/ray/_private/worker.py
(`_changeproctitle`). A version of Ray without that function keeps its own titles.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import ray._private.worker as ray_worker
import ray._raylet as raylet

PREFIX = "rolepool "


@contextmanager
def _unchanged(title: str, next_title: str) -> Iterator[None]:
    yield


def keep_title() -> None:
    """From the next call on, Ray does not change the title of this process."""
    if hasattr(ray_worker, "_changeproctitle"):
        ray_worker._changeproctitle = _unchanged


def set_title(pool: str, rank: int) -> None:
    if ray_worker._changeproctitle is _unchanged:
        raylet.setproctitle(f"{PREFIX}{pool}/{rank}")  # type: ignore[attr-defined]
