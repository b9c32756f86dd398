"""What files that are kept for later starts depend on: the files of the model, and code of this project.

The verdict of a trial and the packed weights have keys of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from hashlib import blake2b
from pathlib import Path

from cluster.core.config.model_section import ModelSection
from workers.model.fingerprint import weights_digest
from workers.model.gguf_header import parts_of
from workers.model.stored.source import stored_file

_WORKERS, _OWN = Path(__file__).parents[1], Path(__file__).parent.name
_SUFFIXES = (".py", ".c", ".h")
_IMPORT = re.compile(rb"^\s*(?:from|import) workers\.(\w+)", re.MULTILINE)
FileState = tuple[str, int, int, int]
"""Name, size in bytes, and times of the last change of content and of status, in nanoseconds."""


def model_state(section: ModelSection) -> tuple[str, list[FileState]]:
    """The digest of the model's weights, and the states of its files. Raises `OSError`, `ModelLoadError`.

    Nobody can set the time of a status change (`ctime`), so weights that are edited in place are noticed.
    """
    directory = Path(section.path)
    files = [one for one in sorted(directory.iterdir()) if one.suffix in (".safetensors", ".json")]
    source = stored_file(directory) if section.quantization == "stored" else None
    files += [] if source is None else parts_of(source)
    found = [(one.name, one.stat()) for one in files]
    states = [(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for name, status in found]
    return weights_digest(directory), states


@cache
def code_digest() -> str:
    """A hash of the code that loads models and computes their passes: of all `computing_files`."""
    digest = blake2b(digest_size=16)
    for file in computing_files():
        digest.update(f"{file.relative_to(_WORKERS)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def computing_files() -> list[Path]:
    """The files of the package `workers.model`, and of all that it imports of `workers`, directly or not.

    A package counts whole, whichever of its modules is imported: some are imported by a name that is text.
    """
    root, found, waiting = _WORKERS, dict[str, list[Path]](), [_OWN]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        package = root / name
        files: Iterable[Path] = package.rglob("*") if package.is_dir() else [root / f"{name}.py"]
        found[name] = sorted(file for file in files if file.suffix in _SUFFIXES and file.is_file())
        for file in found[name]:
            waiting += (match.decode() for match in _IMPORT.findall(file.read_bytes()))
    return [file for name in sorted(found) for file in found[name]]
