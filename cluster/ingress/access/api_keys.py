"""API keys of clients: their names, their digests, and what they allow. The keys themselves are not kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from cluster.core.config.server import ClientLimitsSection
from cluster.core.errors import ConfigurationError

MAX_KEYS = 1000
SHORTEST_KEY = 16
"""Fewest characters of a key."""
LONGEST_KEY = 512

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_NUMBER = re.compile(r"[1-9][0-9]{0,11}")
_ADMIN, _LEARN = "admin", "learn"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key: a name for logs and limits, and the SHA-256 digest of what its client presents."""

    name: str
    """1 to 64 letters, digits or ._-, different from those of other keys."""
    digest: bytes
    is_admin: bool = False
    """Whether the key also opens what belongs to operators: metrics, and requests of other clients."""
    is_internal: bool = False
    """Whether it is the key of the cluster's own processes. They may act in the name of any client."""
    allows_learning: bool = False
    """Whether drafters may be trained on the texts of its client."""
    limits: ClientLimitsSection | None = None
    """What its client may use; `None`: what the settings say."""


def digest(key: str | bytes) -> bytes:
    """Return the SHA-256 digest of a key, 32 bytes."""
    return sha256(key.encode(errors="surrogateescape") if isinstance(key, str) else key).digest()


def parse_keys(text: str, source: str) -> tuple[ApiKey, ...]:
    """Read lines of the form `NAME KEY [admin] [learn] [LIMIT=NUMBER]…`, and skip empty ones and comments (#).

    `sha256:` and 64 hexadecimal digits may stand for the key. A limit is a field of `ClientLimitsSection`. Raises
    `ConfigurationError`, which names `source` and the line, never the key.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        name, _, rest = line.strip().partition(" ")
        if name and not name.startswith("#"):
            keys.append(parse_key(name, rest, f"{source}, line {number}"))
    return tuple(keys)


def parse_key(name: str, text: str, source: str) -> ApiKey:
    """Read `KEY [admin] [learn] [LIMIT=NUMBER]…`. Raises `ConfigurationError`."""
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(f"{source}: needed a name of 1 to 64 letters, digits or ._-, found another one")
    key, *options = text.split() or [""]
    limits = _limits([option for option in options if option not in (_ADMIN, _LEARN)], source)
    admin, learn = (flag in options for flag in (_ADMIN, _LEARN))
    return ApiKey(name, _digest_of(key, source), is_admin=admin, allows_learning=learn, limits=limits)


def _limits(options: Sequence[str], source: str) -> ClientLimitsSection | None:
    """Read options of the form `LIMIT=NUMBER`. No error shows them, since one of them may be a part of a key."""
    values: dict[str, int] = {}
    for option in options:
        limit, sign, number = option.partition("=")
        if limit not in ClientLimitsSection.model_fields or not sign or _NUMBER.fullmatch(number) is None:
            known = "=NUMBER, ".join(ClientLimitsSection.model_fields)
            raise ConfigurationError(
                f"{source}: needed NAME KEY, then any of {_ADMIN}, {_LEARN}, {known}=NUMBER, found another word"
            )
        values[limit] = int(number)
    return ClientLimitsSection(**values) if values else None


def check_keys(keys: Iterable[ApiKey], source: str) -> tuple[ApiKey, ...]:
    """Return the keys. Raises `ConfigurationError` for two keys with one name or one digest, and for too many."""
    checked = tuple(keys)
    if len(checked) > MAX_KEYS:
        raise ConfigurationError(f"{source}: needed at most {MAX_KEYS} API keys, found {len(checked)}")
    names: set[str] = set()
    digests: set[bytes] = set()
    for key in checked:
        if key.name in names:
            raise ConfigurationError(f"{source}: needed different names of API keys, found {key.name} twice")
        if key.digest in digests:
            raise ConfigurationError(f"{source}: needed different API keys, found the key of {key.name} twice")
        names.add(key.name)
        digests.add(key.digest)
    return checked


def _digest_of(key: str, source: str) -> bytes:
    given = _DIGEST.fullmatch(key)
    if given is not None:
        return bytes.fromhex(given[1])
    if key.startswith("sha256:"):
        raise ConfigurationError(f"{source}: needed 64 hexadecimal digits in lower case after sha256:")
    if not SHORTEST_KEY <= len(key) <= LONGEST_KEY:
        bound = f"{SHORTEST_KEY} to {LONGEST_KEY} characters"
        raise ConfigurationError(f"{source}: needed an API key of {bound}, found {len(key)}")
    if not all("!" <= character <= "~" for character in key):
        raise ConfigurationError(f"{source}: needed an API key of printable ASCII characters")
    return digest(key)
