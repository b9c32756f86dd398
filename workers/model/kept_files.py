"""What files that are kept for later starts depend on: the files of the model, and code of this project.

The verdict of a trial and the packed weights have keys of these.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

from cluster.core.config.model_section import ModelSection
from workers.model.fingerprint import weights_digest
from workers.model.gguf_header import parts_of
from workers.model.stored.source import stored_file

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
def code_digest(patterns: tuple[str, ...]) -> str:
    """A hash of the files below `workers` whose paths match a pattern."""
    root = Path(__file__).parents[1]
    digest = blake2b(digest_size=16)
    for pattern in patterns:
        for file in sorted(root.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()
