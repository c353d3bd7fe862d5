"""Importing many modules without collecting garbage meanwhile."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Do not collect garbage in the block. Modules create many objects, which stay. To look through
    them again and again takes a quarter of the time in which torch and Ray are imported."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
