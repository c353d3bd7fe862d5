"""Importing many modules: without collecting garbage meanwhile, or beside other work."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module


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


@contextmanager
def imported_beside(*modules: str) -> Iterator[None]:
    """Import these modules in a thread while the block runs. At its end they are imported.

    They must be modules of libraries that the block does not import itself, because Python lets two
    threads that import modules of one library see halves of them.
    """
    thread = threading.Thread(target=_import, args=modules, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _import(*modules: str) -> None:
    with quick_imports():
        for module in modules:
            # Who needs the module imports it again, and then the error is reported.
            with suppress(Exception):
                import_module(module)
