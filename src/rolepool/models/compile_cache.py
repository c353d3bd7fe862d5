"""Compiled code that survives runs: where torch's compiler and Triton keep it.

Owns the folder of this machine's versions and GPU. The compilers themselves decide which entry fits
a function, and write entries atomically, so that processes can share the folder.
"""

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from rolepool.errors import logger, one_line

PACKAGES = ("torch", "triton", "transformers", "rolepool")
INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"


def use_compile_cache(setting: str | None) -> Path | None:
    """From now on, keep what this process compiles in a folder, and use what earlier processes have
    kept there. `setting` is the value of trainer.compile_cache_dir. Returns the folder; None if the
    compilers use their own.

    Environment variables of the compilers that are set already count more. If the folder cannot be
    written, there is a warning, and the compilers use their own.
    """
    if setting is None:
        return None
    folder = _root(setting) / folder_name()
    try:
        # Only this user may write there, because processes run what they find.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        logger.warning(
            "trainer.compile_cache_dir=%s: what is compiled is not kept (%s)",
            setting,
            one_line(error),
        )
        return None
    # Importing the compiler sets the variable to torch's own default, which the user has not chosen.
    if os.environ.get(INDUCTOR_VARIABLE, default_cache_dir()) == default_cache_dir():
        os.environ[INDUCTOR_VARIABLE] = str(folder / "inductor")
    os.environ.setdefault(TRITON_VARIABLE, str(folder / "triton"))
    return folder


def _root(setting: str) -> Path:
    if setting != "auto":
        return Path(setting).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "rolepool" / "compiled"


def folder_name() -> str:
    """The versions of all packages that decide what is compiled, and the name of the GPU."""
    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    names = []
    for package in PACKAGES:
        try:
            names.append(f"{package}-{version(package)}")
        except PackageNotFoundError:  # there is no Triton for CPUs
            continue
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "_".join([*names, device]))
