"""Numbered versions of learned weights, in memory or in a directory.

A directory has a folder for each salt, named by its key. Each version in it is a draft in a folder named by its number.
The text file `served` has the number that is to be served, 0 for the weights that the drafter was loaded with.
Whoever writes another number there chooses another version, also while servers run. Several may share the directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.core.errors import ConfigurationError
from workers.draft.common.learning import LearnedWeights

if TYPE_CHECKING:
    from torch import Tensor

SERVED = "served"
ABOUT = "learned.json"
"""Name of the file beside a version's weights that says how they were measured."""
_MOST_VERSIONS = 8
"""Most stored versions of a salt; the oldest are removed."""
_MOST_SALTS = 256
"""Most salts with stored versions; those whose last one is the oldest are removed."""
_UNFINISHED = ".unfinished-"
"""Begins the names of folders of versions that are being written."""
_KEY = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"[0-9]{6}")


class Versions:
    """The versions of all salts. Without a directory, only their numbers are kept."""

    def __init__(self, directory: Path | None, weights: LearnedWeights) -> None:
        """`weights` writes and reads the drafts."""
        self._directory = directory
        self._weights = weights
        self._served: dict[str, int] = {}

    def changed(self) -> tuple[str, ...]:
        """The keys whose file `served` names another version than when it was last read, the latest last.

        At first, these are all with a version.
        """
        if self._directory is None or not self._directory.is_dir():
            return ()
        found = {folder.name: number for folder in _folders(self._directory) if (number := served_version(folder)) >= 0}
        changed = tuple(key for key, number in found.items() if number != self._served.get(key, 0))
        self._served |= found
        return changed

    def served(self, key: str) -> int:
        """The number of the served version; 0 before the first."""
        return self._served.get(key, 0)

    def read(self, key: str) -> Mapping[str, Tensor] | None:
        """The weights of the served version; `None` for version 0 and without a directory.

        Raises `ValueError` for a draft that does not fit.
        """
        if not self.served(key) or self._directory is None:
            return None
        return self._weights.read(self._directory / key / _name(self.served(key)))

    def store(self, key: str, weights: Mapping[str, Tensor], about: Mapping[str, object], *, after: int) -> int:
        """Store weights as the next version, to be served from now on. Returns its number.

        `about` says how they were measured, and `after` is the version that they were trained from. Raises `ValueError`
        if another one has been chosen by now, and `OSError`.
        """
        if self._directory is None:
            self._served[key] = self.served(key) + 1
            return self._served[key]
        folder = self._directory / key
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._directory):
            chosen = max(0, served_version(folder))
            if chosen != after:
                raise ValueError(f"version {chosen} was chosen meanwhile, and they were trained from {after}")
            number = 1 + max(stored_versions(folder), default=0)
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._directory))
            try:
                self._weights.save(unfinished, weights)
                (unfinished / ABOUT).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
                unfinished.rename(folder / _name(number))
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
            _serve(folder, number)
        self._served[key] = number
        self._remove_oldest(folder)
        return number

    def remove_unfinished(self) -> None:
        """Remove the folders of versions that a process was writing when it was killed.

        Whoever writes one holds the lock. While somebody does, and where the directory is read-only, all stay.
        """
        if self._directory is None:
            return
        with suppress(OSError), _locked(self._directory, waits=False):
            for entry in self._directory.glob(f"{_UNFINISHED}{'?' * 8}"):
                shutil.rmtree(entry, ignore_errors=True)

    def _remove_oldest(self, folder: Path) -> None:
        for number in stored_versions(folder)[:-_MOST_VERSIONS]:
            shutil.rmtree(folder / _name(number), ignore_errors=True)
        for other in _folders(folder.parent)[:-_MOST_SALTS]:
            shutil.rmtree(other, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class SaltVersions:
    """The versions of one salt."""

    key: str
    """`salt_key` of the salt."""
    served: int
    """Number of the version that drafts; 0: the draft's files do."""
    stored: tuple[int, ...]
    """Numbers of the stored versions, ascending."""


def versions_of(directory: Path) -> tuple[SaltVersions, ...]:
    """The versions in a directory, those of the salt whose version was chosen last at the end."""
    folders = _folders(directory) if directory.is_dir() else []
    return tuple(
        SaltVersions(folder.name, max(0, served_version(folder)), tuple(stored_versions(folder))) for folder in folders
    )


def roll_back(directory: Path, key: str | None = None) -> dict[str, int]:
    """Let every salt, or the one with this key, be served with the version before the served one.

    Returns the new numbers, by key. The removed versions stay stored, and the next version has a higher number. Raises
    `ConfigurationError` if there is no version to go back from.
    """
    rolled: dict[str, int] = {}
    folders = _folders(directory) if directory.is_dir() else []
    for folder in folders:
        if key is not None and folder.name != key:
            continue
        with _locked(directory):
            served = served_version(folder)
            if served > 0:
                rolled[folder.name] = max((one for one in stored_versions(folder) if one < served), default=0)
                _serve(folder, rolled[folder.name])
    if not rolled:
        raise ConfigurationError(f"draft.learn_directory: {directory} has no version to go back from")
    return rolled


def stored_versions(folder: Path) -> list[int]:
    """The numbers of the stored versions of one salt, ascending."""
    return sorted(int(entry.name) for entry in folder.iterdir() if _VERSION.fullmatch(entry.name))


def served_version(folder: Path) -> int:
    """The number in the file `served`; -1 without a readable one."""
    try:
        return int((folder / SERVED).read_text("ascii"))
    except (OSError, ValueError):
        return -1


def _folders(directory: Path) -> list[Path]:
    """The folders of the salts, the one whose version was chosen last at the end."""
    found = [(_chosen_at(entry), entry) for entry in directory.iterdir() if _KEY.fullmatch(entry.name)]
    return [entry for _, entry in sorted(found)]


def _chosen_at(folder: Path) -> int:
    try:
        return (folder / SERVED).stat().st_mtime_ns
    except OSError:
        return 0


@contextmanager
def _locked(directory: Path, *, waits: bool = True) -> Iterator[None]:
    """Only one process at a time is inside. Without `waits`, raises `BlockingIOError` where another one is."""
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _serve(folder: Path, number: int) -> None:
    unfinished = folder / f".{SERVED}"
    unfinished.write_text(f"{number}\n", "ascii")
    os.replace(unfinished, folder / SERVED)


def _name(number: int) -> str:
    return f"{number:06d}"
