"""Where the cluster token comes from: the environment, a file, or chance."""

from __future__ import annotations

import secrets
from pathlib import Path

from cluster.core.errors import ConfigurationError
from cluster.wire.peer_access import LONGEST_TOKEN, ClusterToken

_RANDOM_BYTES = 32


def draw_token() -> ClusterToken:
    """A new token of 64 hexadecimal digits."""
    return ClusterToken(secrets.token_hex(_RANDOM_BYTES))


def find_token(given: str | None, file: str | None) -> ClusterToken:
    """The token that is `given` or in `file`, without surrounding white space. A new one if there is neither.

    Raises `ConfigurationError` for an unreadable file or a token that is too short or too long.
    """
    if given:
        return ClusterToken(given.strip())
    return draw_token() if file is None else ClusterToken(_read(file))


def _read(file: str) -> str:
    try:
        with Path(file).expanduser().open("rb") as stream:
            return stream.read(2 * LONGEST_TOKEN).decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigurationError(f"cluster.token_file: needed ASCII characters in {file}") from None
    except OSError as error:
        raise ConfigurationError(
            f"cluster.token_file: needed a readable file, found {file}: {error.strerror}"
        ) from None
