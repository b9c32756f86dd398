"""Folders that compiled code is loaded from. Whoever may write there decides what this process runs."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUTE_DSL_CACHE_DIR": "cute"}
"""The environment variables by which compilers find their caches, with the folder of each in the compiled code."""

_chosen: dict[str, str] = {}
"""What this process has set these variables to."""


class UnsafeFolder(OSError):
    """A folder belongs to another user, or others may write to it: no code is loaded from it."""


def folder_fault(directory: Path) -> str | None:
    """Why code in `directory` is not to be trusted, with the remedy; `None` if only this user and root may write it.

    Raises `OSError` if there is no such folder.
    """
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is no folder; remove it"
    if status.st_uid not in (0, os.geteuid()):
        return f"{directory} belongs to user {status.st_uid}; set PILOTFISH_CODE_DIR to a folder of your own"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{directory} may be written by others; empty it, then run `chmod go-w {directory}`"
    return None


def is_private_file(file: Path) -> bool:
    """Whether `file` is a plain file, of this user or root, that nobody else may write. `False` if there is none."""
    try:
        status = file.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISREG(status.st_mode) and status.st_uid in (0, os.geteuid()) and not status.st_mode & others


def make_private_folder(directory: Path) -> None:
    """Make `directory` unless it exists. Raises `UnsafeFolder` if others may write to it, `OSError`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fault = folder_fault(directory)
    if fault is not None:
        raise UnsafeFolder(fault)


def keep_compiled_code(directory: str | None) -> None:
    """Let the compilers of PyTorch, Triton and CuTe keep their code below `directory`, or for this process alone.

    They read their folders only from the environment, and by default look in a shared one whose name everybody knows.
    A folder that the environment names stays if it is private. Call it before anything is compiled.
    """
    for variable, name in _VARIABLES.items():
        given = os.environ.get(variable)
        if given == _chosen.get(variable):
            given = None
        _chosen[variable] = os.environ[variable] = str(_compiler_folder(directory, name, given))


def _compiler_folder(directory: str | None, name: str, given: str | None) -> Path:
    """The folder `given` by the environment, else `name` in `directory`; a folder of this process if that is unsafe."""
    try:
        if given is not None:
            make_private_folder(Path(given))
            return Path(given)
        if directory is not None:
            make_private_folder(Path(directory))
            make_private_folder(Path(directory, name))
            return Path(directory, name)
    except OSError as error:
        logger.warning("code that is compiled here is not kept: %s", error)
    return Path(_own_folder().name, name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, which it removes when it ends."""
    return tempfile.TemporaryDirectory(prefix="pilotfish-code-")
