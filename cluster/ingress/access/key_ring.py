"""The API keys in force, also those of a file that changes, and the search for the one that a caller presents."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster.core.config.base import with_home
from cluster.core.config.server import ClientLimitsSection
from cluster.core.errors import ConfigurationError, Unauthenticated
from cluster.ingress.access.api_keys import ApiKey, check_keys, digest, parse_key, parse_keys

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""How often the key file may be looked at, in seconds."""
OWN_NAME = "pilotfish"
"""Name of the key of the cluster's own processes."""


class KeyRing:
    """Knows the keys that open the public APIs. Without a key and a file, everybody may call.

    The file is read again when it has changed. Keys that were removed from it are refused from then on. A file that
    cannot be read leaves the keys as they were, and is logged.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        file: str | None = None,
        own_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own_key` is what the cluster's own processes present. Raises `ConfigurationError`."""
        self._given = check_keys(keys, "PILOTFISH_API_KEYS")
        self._own = () if own_key is None else (ApiKey(OWN_NAME, digest(own_key), is_admin=True, is_internal=True),)
        self._file = None if file is None else KeyFile(file)
        self._clock = clock
        self._looked_at = clock()
        self._version = () if self._file is None else self._file.version()
        self._keys = self._read()
        if self._file is not None and not self._keys:
            raise ConfigurationError(f"{SETTING}: needed at least one API key, found none in {file}")

    @property
    def demands_keys(self) -> bool:
        """Whether callers must present a key."""
        return bool(self._given) or self._file is not None

    def identify(self, presented: str | bytes) -> ApiKey:
        """Return the key that was presented. Raises `Unauthenticated`.

        Every key is compared in constant time, so that the time of the search says nothing about the keys.
        """
        given = digest(presented)
        found: ApiKey | None = None
        for key in (*self._own, *self._current()):
            if hmac.compare_digest(key.digest, given):
                found = key
        if found is None:
            raise Unauthenticated("the API key is not valid")
        return found

    def limits_of(self, name: str) -> ClientLimitsSection | None:
        """Return the limits that the keys give to the client with this name; `None` if they give none."""
        return next((key.limits for key in self._current() if key.name == name), None)

    def _current(self) -> tuple[ApiKey, ...]:
        now = self._clock()
        if self._file is not None and now - self._looked_at >= RELOAD_SECONDS:
            self._looked_at = now
            version = self._file.version()
            if version != self._version:
                self._version = version
                self._reload()
        return self._keys

    def _reload(self) -> None:
        try:
            self._keys = self._read()
        except ConfigurationError as error:
            log.error("the API keys stay as they were: %s", error)
        else:
            log.info("read %d API keys", len(self._keys))

    def _read(self) -> tuple[ApiKey, ...]:
        found = () if self._file is None else self._file.read()
        return check_keys((*self._given, *found), SETTING)


def bearer_key(authorization: str = "") -> str:
    """Return the key in the value of `Authorization: Bearer KEY`. Raises `Unauthenticated`."""
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("an API key is needed: send it as Authorization: Bearer KEY")
    return key.strip()


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
        self._path = with_home(SETTING, path)

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
