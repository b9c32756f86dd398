"""Numbered versions of learned weights, in memory or in a directory.

A directory has a folder for each salt, named by its key, with a file `NUMBER.safetensors` for each version and a text
file `served` with the number that is to be served, 0 for the weights that the drafter was loaded with. Whoever writes
another number there chooses another version, also while the server runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.core.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

SERVED = "served"
_MOST_VERSIONS = 8
"""Most stored versions of a salt; the oldest are removed."""
_KEY = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"([0-9]{6})\.safetensors")


class Versions:
    """The versions of all salts. Without a directory, only their numbers are kept."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._served: dict[str, int] = {}

    def changed(self) -> tuple[str, ...]:
        """The keys whose file `served` names another version than when it was last read. At first: all with one."""
        if self._directory is None or not self._directory.is_dir():
            return ()
        found = {
            folder.name: number
            for folder in self._directory.iterdir()
            if _KEY.fullmatch(folder.name) and (number := served_version(folder)) is not None
        }
        changed = tuple(key for key, number in found.items() if number != self._served.get(key, 0))
        self._served |= found
        return changed

    def served(self, key: str) -> int:
        """The number of the served version; 0 before the first."""
        return self._served.get(key, 0)

    def weights(self, key: str) -> Mapping[str, Tensor] | None:
        """The weights of the served version, float32; `None` for version 0. Raises `OSError`, `ValueError`."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not self.served(key) or self._directory is None:
            return None
        try:
            stored = load_file(self._directory / key / _name(self.served(key)))
        except SafetensorError as error:
            raise ValueError(f"version {self.served(key)}: {error}") from None
        return {name: value.float() for name, value in stored.items()}

    def store(self, key: str, weights: Mapping[str, Tensor]) -> int:
        """Store weights as the next version, to be served from now on. Returns its number. Raises `OSError`."""
        from safetensors.torch import save_file

        if self._directory is None:
            self._served[key] = self.served(key) + 1
            return self._served[key]
        folder = self._directory / key
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = 1 + max(stored_versions(folder), default=0)
        unfinished = folder / f".{number}"
        save_file({name: value.bfloat16().contiguous() for name, value in weights.items()}, unfinished)
        os.replace(unfinished, folder / _name(number))
        _serve(folder, number)
        self._served[key] = number
        for old in stored_versions(folder)[:-_MOST_VERSIONS]:
            (folder / _name(old)).unlink(missing_ok=True)
        return number


def roll_back(directory: Path) -> dict[str, int]:
    """Let every salt be served with the version before the served one. Returns the new numbers, by key.

    The removed versions stay stored, but the next version has a higher number. Raises `ConfigurationError` if the
    directory has no versions.
    """
    folders = [one for one in directory.iterdir() if _KEY.fullmatch(one.name)] if directory.is_dir() else []
    rolled: dict[str, int] = {}
    for folder in folders:
        served = served_version(folder)
        if served:
            rolled[folder.name] = max((one for one in stored_versions(folder) if one < served), default=0)
            _serve(folder, rolled[folder.name])
    if not rolled:
        raise ConfigurationError(f"draft.learn_directory: {directory} has no version to go back from")
    return rolled


def stored_versions(folder: Path) -> list[int]:
    """The numbers of the stored versions of one salt, ascending."""
    found = (_VERSION.fullmatch(file.name) for file in folder.iterdir())
    return sorted(int(one[1]) for one in found if one is not None)


def served_version(folder: Path) -> int | None:
    """The number in the file `served`; `None` without a readable one."""
    try:
        return int((folder / SERVED).read_text("ascii"))
    except (OSError, ValueError):
        return None


def _serve(folder: Path, number: int) -> None:
    unfinished = folder / f".{SERVED}"
    unfinished.write_text(f"{number}\n", "ascii")
    os.replace(unfinished, folder / SERVED)


def _name(number: int) -> str:
    return f"{number:06d}.safetensors"
