"""Where the cluster token comes from: the environment, a file, the token of Ray, or chance."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path

from cluster.core.config.base import with_home
from cluster.core.errors import ConfigurationError
from cluster.wire.peer_access import LONGEST_TOKEN, ClusterToken

_RANDOM_BYTES = 32
_PURPOSE = b"pilotfish cluster token"


def draw_token() -> ClusterToken:
    """A new token of 64 hexadecimal digits."""
    return ClusterToken(secrets.token_hex(_RANDOM_BYTES))


def is_token_given(environment: Mapping[str, str], file: str | None) -> bool:
    """Whether `find_token` returns a token that processes of other systems can be given as well.

    They cannot know one that is derived from Ray's, or drawn.
    """
    return file is not None or bool(environment.get("PILOTFISH_CLUSTER_TOKEN"))


def find_token(environment: Mapping[str, str], file: str | None) -> ClusterToken:
    """The token in `PILOTFISH_CLUSTER_TOKEN` or in `file`, without surrounding white space.

    Without either, it is derived from the token of Ray, so that an application which is deployed again has the token of
    the processes that still run. Ray has it in the environment, or with `RAY_AUTH_MODE=token` in `~/.ray/auth_token`.
    Where Ray has none, it is drawn. Raises `ConfigurationError` for an unreadable file or a token that is too short or
    too long.
    """
    given = environment.get("PILOTFISH_CLUSTER_TOKEN")
    if given:
        return ClusterToken(given.strip())
    if file is not None:
        return ClusterToken(_read("cluster.token_file", file))
    ray_token = environment.get("RAY_AUTH_TOKEN")
    ray_file = environment.get("RAY_AUTH_TOKEN_PATH") or _default_ray_file(environment)
    shared = (ray_token or (_read("RAY_AUTH_TOKEN_PATH", ray_file) if ray_file else "")).strip()
    if not shared:
        return draw_token()
    return ClusterToken(hmac.new(shared.encode(), _PURPOSE, "sha256").hexdigest())


def _default_ray_file(environment: Mapping[str, str]) -> str | None:
    """The file in which Ray itself keeps the token that it has drawn; `None` if it demands none or has no file."""
    if environment.get("RAY_AUTH_MODE", "").lower() != "token" or not environment.get("HOME"):
        return None
    file = Path(environment["HOME"], ".ray", "auth_token")
    return str(file) if file.is_file() else None


def _read(source: str, file: str) -> str:
    try:
        with with_home(source, file).open("rb") as stream:
            return stream.read(2 * LONGEST_TOKEN).decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{source}: needed ASCII characters in {file}") from None
    except OSError as error:
        raise ConfigurationError(f"{source}: needed a readable file, found {file}: {error.strerror}") from None
