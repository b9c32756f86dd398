"""API keys in a file, or in a directory with one file per key. Changes are noticed while the server runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.core.errors import ConfigurationError
from cluster.ingress.access.api_keys import ApiKey, check_keys, parse_key, parse_keys

MAX_FILE_BYTES = 1 << 20
SETTING = "server.api_key_file"

Version = tuple[tuple[str, int, int], ...]
"""Name, time of change in nanoseconds and size of each file."""


class KeyFile:
    """Reads the keys at a path: a file with lines `NAME KEY [admin] [learn] [LIMIT=NUMBER]…`, or a directory.

    In a directory, the name of each file is a key's name and its content is the rest of such a line. Names that begin
    with a dot are skipped. A mounted Secret of Kubernetes has this form.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()

    def version(self) -> Version:
        """What changes when the keys change. It is empty if nothing is there."""
        try:
            states = [(file.name, file.stat()) for file in self._files()]
        except OSError:
            return ()
        return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)

    def read(self) -> tuple[ApiKey, ...]:
        """Return the keys. Raises `ConfigurationError`."""
        try:
            if self._path.is_dir():
                keys = tuple(parse_key(file.name, _text(file).strip(), f"{SETTING}: {file}") for file in self._files())
            else:
                keys = parse_keys(_text(self._path), f"{SETTING}: {self._path}")
        except OSError as error:
            raise ConfigurationError(
                f"{SETTING}: needed a readable file or directory, found {self._path}: {error.strerror}"
            ) from None
        return check_keys(keys, SETTING)

    def _files(self) -> Iterator[Path]:
        if not self._path.is_dir():
            yield self._path
            return
        yield from sorted(file for file in self._path.iterdir() if not file.name.startswith(".") and file.is_file())


def _text(file: Path) -> str:
    """Return the text of a file. Raises `OSError`, and `ConfigurationError` for one that is too long or not ASCII."""
    with file.open("rb") as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{SETTING}: needed at most {MAX_FILE_BYTES} bytes, found more in {file}")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{SETTING}: needed ASCII characters in {file}") from None
