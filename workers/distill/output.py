"""The directory of a draft is replaced as a whole, and nothing but a draft is replaced."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.core.errors import ConfigurationError
from workers.model.draft_card import is_written_here


@contextmanager
def replaced_directory(directory: Path, card: str, pictures: dict[str, bytes]) -> Iterator[Path]:
    """A new directory to write a draft into, which replaces `directory` at the end. It holds the model card already.

    Raises `ConfigurationError` where the directory holds something other than a draft.
    """
    check_replaceable(directory)
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
        if directory.exists():
            shutil.rmtree(directory)
        scratch.rename(directory)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def check_replaceable(directory: Path) -> None:
    """Raise `ConfigurationError` unless this user may write `directory` and it is absent, empty, or holds a draft."""
    try:
        existing = next((one for one in directory.absolute().parents if one.exists()), directory)
        is_usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        is_ours = directory.is_dir() and (is_written_here(directory) or not any(directory.iterdir()))
    except OSError:  # a name that is too long, or a directory that this user may not search
        existing, is_usable, is_ours = directory, False, False
    if not is_usable:
        raise ConfigurationError(f"--out {directory}: needed a directory that this user may write, found {existing}")
    if directory.exists() and not is_ours:
        raise ConfigurationError(f"--out {directory}: needed an empty directory or an earlier draft to replace")
