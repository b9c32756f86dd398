"""The directory of a draft is replaced as a whole, and nothing but a draft is replaced."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.core.errors import ConfigurationError
from workers.model.draft_card import is_written_here


@contextmanager
def replaced_directory(directory: Path, card: str, pictures: dict[str, bytes]) -> Iterator[Path]:
    """A new directory to write a draft into, which replaces `directory` at the end. It holds the model card already.

    A symbolic link stays, and what it names is replaced. Raises `ConfigurationError` where the directory holds
    something other than a draft.
    """
    check_replaceable(directory)
    directory = directory.resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        (scratch / "README.md").write_text(card, encoding="utf-8")
        for name, picture in pictures.items():
            (scratch / name).write_bytes(picture)
        yield scratch
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        _exchange(scratch, directory)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _exchange(new: Path, directory: Path) -> None:
    """Rename a directory to `directory`, and remove the one that is there only once that is done."""
    former = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        if directory.exists():
            _move(directory, former)
        new.rename(directory)
    except BaseException:
        with suppress(OSError):
            former.rmdir()  # unless it has what was there
        if former.exists() and not directory.exists():
            former.rename(directory)
        raise
    shutil.rmtree(former, ignore_errors=True)


def _move(directory: Path, former: Path) -> None:
    """Rename a directory to `former`, which is empty. An error leaves all of `directory` at one of the two places.

    Overlay file systems do not rename a directory of a lower layer, such as one in a container's image. It is copied.
    """
    try:
        directory.rename(former)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    try:
        shutil.copytree(directory, former, dirs_exist_ok=True)
    except BaseException:
        shutil.rmtree(former, ignore_errors=True)
        raise
    try:
        shutil.rmtree(directory)
    except BaseException:  # some of its files may be gone
        shutil.copytree(former, directory, dirs_exist_ok=True)
        shutil.rmtree(former, ignore_errors=True)
        raise


def check_replaceable(directory: Path) -> None:
    """Raise `ConfigurationError` unless this user may replace `directory`: it is absent, empty, or holds a draft."""
    try:
        whole = directory.resolve()
        existing = next((one for one in whole.parents if one.exists()), whole)
        is_usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        is_mount = whole.is_mount()
        is_ours = directory.is_dir() and (is_written_here(directory) or not any(directory.iterdir()))
    except (OSError, RuntimeError):  # a name that is too long, a directory that this user may not search, or a cycle
        existing, is_usable, is_mount, is_ours = directory, False, False, False
    if is_mount:
        raise ConfigurationError(f"--out {directory}: needed a directory that can be renamed, found a mount point")
    if not is_usable:
        raise ConfigurationError(f"--out {directory}: needed a directory that this user may write, found {existing}")
    if directory.exists() and not is_ours:
        raise ConfigurationError(f"--out {directory}: needed an empty directory or an earlier draft to replace")
