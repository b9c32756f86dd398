"""How the drafter is reached: `additional_config["pilotfish"]` of vLLM, and two variables of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pilotfish_client.access import Tls

ADDRESS_VARIABLE = "PILOTFISH_DRAFTER"
"""The variable with the drafter's address, which `address` overrides."""
TOKEN_VARIABLE = "PILOTFISH_CLUSTER_TOKEN"  # noqa: S105 - the name of a variable, not a secret
"""The variable with the cluster token, which `token_file` overrides."""
SECTION = "additional_config.pilotfish"
LONGEST_SECONDS = 60.0


class RefusedSettings(ValueError):
    """A setting is refused, or the drafter at the address refuses this client or cannot draft for it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the drafter is reached, and how long a step may wait for it."""

    address: str
    """The drafter, as `host:port`."""
    token: str | None = field(default=None, repr=False)
    """The cluster token that the drafter demands; `None`: it demands none."""
    tls: Tls | None = None
    """The certificate of this client and the authorities by which the drafter's is checked; `None`: no TLS."""
    timeout_seconds: float = 0.5
    """Longest wait for the drafts of one step, in seconds; then vLLM decodes this step without drafts."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return () if self.token is None else (("x-pilotfish-cluster-token", self.token),)


def read_settings(section: Any, environment: Mapping[str, str]) -> Settings:
    """The settings in `additional_config["pilotfish"]` over those of the environment.

    The keys are `address`, `token_file`, `timeout_seconds` and `tls` with `ca`, `certificate`, `key` and
    `server_name`. Raises `RefusedSettings`, which names the key, the value and the bound.
    """
    found = _section(SECTION, section, ("address", "token_file", "timeout_seconds", "tls"))
    address = found.get("address") or environment.get(ADDRESS_VARIABLE)
    if not isinstance(address, str) or not all(address.rpartition(":")[::2]):
        raise RefusedSettings(
            f"{SECTION}.address or {ADDRESS_VARIABLE}: {address!r} is refused; it must be HOST:PORT of a drafter"
        )
    seconds = found.get("timeout_seconds", 0.5)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_SECONDS:
        raise RefusedSettings(
            f"{SECTION}.timeout_seconds: {seconds!r} is refused; it must be above 0 and at most {LONGEST_SECONDS:g}"
        )
    return Settings(address, _token(found.get("token_file"), environment), _tls(found.get("tls")), float(seconds))


def _section(name: str, value: Any, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RefusedSettings(f"{name}: {value!r} is refused; it must be an object with {', '.join(keys)}")
    unknown = [key for key in value if key not in keys]
    if unknown:
        raise RefusedSettings(f"{name}.{unknown[0]}: unknown; it must be one of {', '.join(keys)}")
    return value


def _token(file: Any, environment: Mapping[str, str]) -> str | None:
    if file is None:
        token = environment.get(TOKEN_VARIABLE, "").strip()
        if not token:
            return None
        source = TOKEN_VARIABLE
    else:
        try:
            token = Path(file).expanduser().read_text("ascii").strip()
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise RefusedSettings(
                f"{SECTION}.token_file: needed a readable ASCII file, found {file!r}: {error}"
            ) from None
        source = f"{SECTION}.token_file {file!r}"
    if not token or not all("!" <= character <= "~" for character in token):
        raise RefusedSettings(f"{source}: needed one line with the token, of printable ASCII characters without spaces")
    return token


def _tls(value: Any) -> Tls | None:
    if value is None:
        return None
    found = _section(f"{SECTION}.tls", value, tuple(one.name for one in fields(Tls)))
    try:
        tls = Tls(**{"server_name": "pilotfish", **found})
        tls.credentials()
    except (OSError, TypeError, ValueError) as error:
        raise RefusedSettings(f"{SECTION}.tls: {error}") from None
    return tls
