"""Numbered versions of learned weights, in memory or in a directory.

A directory has a folder for each salt, named by its key. Each version in it is a draft in a folder named by its number.
The text file `served` has the number that is to be served, 0 for the weights that the drafter was loaded with.
Whoever writes another number there chooses another version, also while servers run; whoever removes the folder of a
salt, version 0. Several may share the directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.core.errors import ConfigurationError
from workers.draft.common.learning import LearnedWeights

if TYPE_CHECKING:
    from torch import Tensor

SERVED = "served"
ABOUT = "learned.json"
"""Name of the file beside a version's weights that says how they were measured."""
MOST_BYTES = 16 << 30
"""Most bytes of all versions where `draft.learn_directory_bytes` is unset."""
LEAST_VERSIONS = 3
"""Versions of one salt that must have room: the served one, the one to roll back to, and the next one."""
_ABOUT_BYTES = 1024
"""Most bytes of the file `ABOUT`."""
_MOST_VERSIONS = 8
"""Most stored versions of a salt."""
_MOST_SALTS = 256
"""Most salts with stored versions."""
_BEFORE = "before"
"""Key of the number of the version that was served before."""
_UNFINISHED = ".unfinished-"
"""Begins the names of folders of versions that are being written or removed."""
_KEY = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"[0-9]{6}")


class Versions:
    """The versions of all salts. Without a directory, only their numbers are kept."""

    def __init__(self, directory: Path | None, weights: LearnedWeights, most_bytes: int = MOST_BYTES) -> None:
        """`weights` writes and reads the drafts; all of them take at most `most_bytes`."""
        self._directory = directory
        self._weights = weights
        self._most_bytes = most_bytes
        self._served: dict[str, int] = {}
        self._stamps: dict[str, tuple[int, int]] = {}

    def changed(self) -> tuple[str, ...]:
        """The keys of salts that are to be served with another version than at the last call, the latest last.

        At first, these are all with a version.
        """
        if self._directory is None or not self._directory.is_dir():
            return ()
        stamps = _stamps(self._directory, self._stamps)
        found = {key: 0 for key, number in self._served.items() if number and key not in stamps}
        for key in sorted(stamps, key=stamps.__getitem__):
            if stamps[key] == self._stamps.get(key):
                continue
            number = served_version(self._directory / key)
            if number < 0:  # somebody writes it: what is served stays, and it is read again
                stamps[key] = self._stamps.get(key, (0, 0))
            else:
                found[key] = number
        self._stamps = stamps
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

        `about` says how they were measured, and `client` in it the `salt_key` of the client's own salt. `after` is the
        version that they were trained from. Raises `OSError`, and `ValueError` if another version has been chosen by
        now, or if there is no room.
        """
        if self._directory is None:
            self._served[key] = self.served(key) + 1
            return self._served[key]
        folder = self._directory / key
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._directory):
            folder.mkdir(mode=0o700, exist_ok=True)
            chosen = max(0, served_version(folder))
            if chosen != after:
                raise ValueError(f"version {chosen} was chosen meanwhile, and they were trained from {after}")
            number = 1 + max(stored_versions(folder), default=0)
            try:
                self._make_room(folder, version_bytes(self._weights))
            except (OSError, ValueError):
                with suppress(OSError):  # it has versions
                    folder.rmdir()
                raise
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._directory))
            try:
                self._weights.save(unfinished, weights)
                text = json.dumps({**about, _BEFORE: after}, indent=2)
                (unfinished / ABOUT).write_text(text + "\n", "utf-8")
                unfinished.rename(folder / _name(number))
                try:
                    _serve(folder, number)
                except OSError:
                    _remove(folder / _name(number))
                    raise
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        self._served[key] = number
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

    def _make_room(self, folder: Path, needed: int) -> None:
        """Remove versions until another one of a salt has room. Raises `ValueError` if it has none.

        Versions that are not served, and that no rollback would serve, are removed first; then other salts, each time
        that of the client that takes the most bytes whose version was chosen first.
        """
        salts = [_StoredSalt.read(one) for one in _folders(folder.parent)]
        (own,) = (one for one in salts if one.folder == folder)
        least = needed + sum(size for number, size in own.versions.items() if number in own.kept)
        if least > self._most_bytes:
            raise ValueError(f"draft.learn_directory_bytes: {self._most_bytes} is too small; it must be {least}")
        excess = sum(one.size for one in salts) + needed - self._most_bytes
        for number in own.spare[: max(0, 1 + len(own.versions) - _MOST_VERSIONS)]:
            excess -= own.remove(number)
        for salt in salts:
            for number in salt.spare:
                if excess > 0:
                    excess -= salt.remove(number)
        while len(salts) > 1 and (excess > 0 or len(salts) > _MOST_SALTS):
            clients: Counter[str] = Counter()
            for salt in salts:
                clients[salt.client] += salt.size
            others = [one for one in salts if one is not own]
            largest = max(clients[one.client] for one in others)
            oldest = next(one for one in others if clients[one.client] == largest)
            salts.remove(oldest)
            _remove(oldest.folder)
            excess -= oldest.size
        disk = shutil.disk_usage(folder)
        if disk.total and disk.free < needed:  # some file systems tell neither
            raise ValueError(f"draft.learn_directory: {disk.free} bytes are free, and a version takes {needed}")


@dataclass(slots=True, eq=False)
class _StoredSalt:
    """What is stored of one salt."""

    folder: Path
    versions: dict[int, int]
    """The bytes of each version."""
    kept: frozenset[int]
    """The served version, and the one that a rollback would serve."""
    client: str
    """`salt_key` of the client's own salt; empty where it is not known."""

    @staticmethod
    def read(folder: Path) -> _StoredSalt:
        versions = {number: _bytes_in(folder / _name(number)) for number in stored_versions(folder)}
        served = max(0, served_version(folder))
        return _StoredSalt(folder, versions, frozenset((served, _before(folder, served))), _client(folder))

    @property
    def size(self) -> int:
        return sum(self.versions.values())

    @property
    def spare(self) -> list[int]:
        """The other versions, ascending."""
        return [number for number in self.versions if number not in self.kept]

    def remove(self, number: int) -> int:
        """Remove a version. Returns its bytes."""
        _remove(self.folder / _name(number))
        return self.versions.pop(number)


@dataclass(frozen=True, slots=True)
class SaltVersions:
    """The versions of one salt."""

    key: str
    """`salt_key` of the salt."""
    client: str
    """`salt_key` of the salt of its client's requests without a `cache_salt`; empty where it is not known."""
    served: int
    """Number of the version that drafts; 0: the draft's files do."""
    stored: tuple[int, ...]
    """Numbers of the stored versions, ascending."""


def version_bytes(weights: LearnedWeights) -> int:
    """Most bytes of one version. Raises `OSError`, and `ValueError` where the draft's files cannot be read."""
    return weights.saved_bytes + _ABOUT_BYTES


def versions_of(directory: Path) -> tuple[SaltVersions, ...]:
    """The versions in a directory, those of the salt whose version was chosen last at the end."""
    folders = _folders(directory) if directory.is_dir() else []
    return tuple(
        SaltVersions(folder.name, _client(folder), max(0, served_version(folder)), tuple(stored_versions(folder)))
        for folder in folders
    )


def roll_back(directory: Path, key: str | None = None) -> dict[str, int]:
    """Let salts be served with the version that was served before the present one.

    These are all salts, or the one with this key and those of its client. Returns the new numbers, by key: 0 where that
    version is not stored any more. The removed versions stay stored, and the next version has a higher number. Raises
    `ConfigurationError` if there is no version to go back from.
    """
    rolled: dict[str, int] = {}
    folders = _folders(directory) if directory.is_dir() else []
    for folder in folders:
        if key not in (None, folder.name, _client(folder)):
            continue
        with _locked(directory):
            served = served_version(folder)
            if served > 0:
                rolled[folder.name] = _before(folder, served)
                _serve(folder, rolled[folder.name])
    if not rolled:
        raise ConfigurationError(f"draft.learn_directory: {directory} has no version to go back from")
    return rolled


def stored_versions(folder: Path) -> list[int]:
    """The numbers of the stored versions of one salt, ascending; none where its folder has just been removed."""
    try:
        return sorted(int(entry.name) for entry in folder.iterdir() if _VERSION.fullmatch(entry.name))
    except FileNotFoundError:
        return []


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


def _stamps(directory: Path, known: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Time and inode of each salt's file `served`. Reading them all takes long where requests run in other threads.

    A file that cannot be looked at for another reason than its absence stays as it is `known`.
    """
    found: dict[str, tuple[int, int]] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if _KEY.fullmatch(entry.name):
                try:
                    status = os.stat(f"{entry.path}/{SERVED}")
                    found[entry.name] = status.st_mtime_ns, status.st_ino
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError:
                    if entry.name in known:
                        found[entry.name] = known[entry.name]
    return found


def _before(folder: Path, number: int) -> int:
    """The version that was served before this one, if it is stored; else 0."""
    stored = stored_versions(folder)
    found = _about(folder, number).get(_BEFORE)
    if number in stored and isinstance(found, int):
        return found if found in stored else 0
    return max((one for one in stored if one < number), default=0)


def _client(folder: Path) -> str:
    """`salt_key` of the own salt of a salt's client, as its latest version says; empty where none does."""
    found = _about(folder, max(stored_versions(folder), default=0)).get("client", "")
    return found if isinstance(found, str) else ""


def _about(folder: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads((folder / _name(number) / ABOUT).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _bytes_in(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in folder.iterdir())
    except OSError:
        return 0


def _remove(folder: Path) -> None:
    """Remove a folder of the directory at once: a process that is killed meanwhile leaves no part under its name."""
    directory = next(one.parent for one in (folder, *folder.parents) if _KEY.fullmatch(one.name))
    unfinished = directory / f"{_UNFINISHED}{secrets.token_hex(4)}"
    with suppress(OSError):
        folder = folder.rename(unfinished)
    shutil.rmtree(folder, ignore_errors=True)


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
