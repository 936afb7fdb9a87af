"""Who ran what, where, with which versions: collected before work starts and kept in every run record."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "dflash-offline",
    "torch",
    "transformers",
    "zarr",
    "numcodecs",
    "duckdb",
    "numpy",
    "safetensors",
    "tokenizers",
)


def collect() -> dict[str, Any]:
    """argv, working folder, versions, git revision of the code, host, cores and GPUs, as JSON values.

    GPU names come from nvidia-smi so that the parent process needs no torch; absent means no NVIDIA driver.
    """
    return {
        "argv": sys.argv,
        "cwd": str(Path.cwd()),
        "started": time.time(),
        "user": user_name(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "world_size": _world_size(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "versions": versions(),
        "git": _git(),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    """Installed versions of what results depend on; a package that is not installed is left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def distribution_version() -> str:
    """Our own version, which a store's identity holds; "unknown" when run from a folder that was never installed."""
    return versions().get("dflash-offline", "unknown")


def _world_size() -> int | None:
    """How many processes torchrun or Slurm started, None for our own launcher."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdigit() and "RANK" in os.environ else None


def user_name() -> str:
    """Who runs this; the number of a user without a name (a container's)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _git() -> dict[str, Any]:
    home = str(Path(__file__).parent)
    revision = _run("git", "-C", home, "rev-parse", "HEAD")
    return {"revision": revision, "dirty": bool(_run("git", "-C", home, "status", "--porcelain"))} if revision else {}


def _gpus() -> list[str]:
    listing = _run("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return listing.splitlines()
