"""The private folder of a Ray that a run starts itself. Its files and sockets are there, and nobody else can open them.

Owns the removal of such folders, and of processes of Ray that outlived a driver that was killed. This module does not
import ray.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from rolepool.errors import PlacementError

END_TIMEOUT_S = 5.0


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder, removed after the block. Folders that killed drivers of this user have left are removed first.

    A driver holds a lock on its folder. The kernel releases the lock when the driver ends, no matter how it ends.
    """
    root = _private_root()
    with ExitStack() as cleanup:
        with _locked(root):  # no other driver removes the folder before it is locked
            for path in root.iterdir():
                _remove_if_left(path)
            folder = Path(tempfile.mkdtemp(prefix="", dir=root))
            cleanup.enter_context(_locked(folder))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def make_token_private() -> None:
    """Make Ray's token file readable for this user only. Ray writes a token into it if it is empty."""
    token = Path.home() / ".ray" / "auth_token"
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":
        with suppress(OSError):  # Ray says so if it cannot read its token
            token.parent.mkdir(exist_ok=True)
            token.touch(mode=0o600)
            token.chmod(0o600)


def _private_root() -> Path:
    """The folder of all private folders. Its path is short, because the paths of sockets must be short. Ray makes its
    own folder accessible to all users, so only the folder above it can be private."""
    root = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"rolepool-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PlacementError(f"{root}: does not belong to this user; remove it, or set RAY_TMPDIR to another folder")
    root.chmod(0o700)
    return root


@contextmanager
def _locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder, and end the processes of Ray that use it, if its driver has ended."""
    with suppress(BlockingIOError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or belongs to another user
                if _is_ray_in(folder, process):
                    process.kill()
                    process.wait(END_TIMEOUT_S)
        shutil.rmtree(folder, ignore_errors=True)


def _is_ray_in(folder: Path, process: psutil.Process) -> bool:
    """Whether a process of Ray has a file of the folder open, such as its log."""
    is_ray = any(word.startswith("ray::") or "/ray/" in word for word in process.cmdline())
    return is_ray and any(Path(file.path).is_relative_to(folder) for file in process.open_files())
