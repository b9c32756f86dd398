"""Reads the settings: a preset or a file, with `--set` assignments on top.

This is the only module that reads the environment:

- `PILOTFISH_CONFIG`: the preset or file if none is named (default: the preset `cpu`);
- `PILOTFISH_CACHE_DIR`: the directory for converted weights (default: `~/.cache/pilotfish`);
- `PILOTFISH_CODE_DIR`: the directory for compiled code, which no other user may write (default: `compiled` in that for
  weights);
- `PILOTFISH_RAY_ADDRESS`: a running Ray cluster to join (default: start one on this machine);
- `PILOTFISH_CLUSTER_TOKEN`: the cluster token (default: from `cluster.token_file`, else derived from Ray's token);
- `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH`: Ray's token, or a file with it (default: with `RAY_AUTH_MODE=token`, the file
  `~/.ray/auth_token` if there is one; else the cluster token is drawn);
- `PILOTFISH_API_KEYS`: API keys that open the public APIs, beside those in `server.api_key_file`: `NAME KEY`,
  separated by semicolons or line ends;
- `PILOTFISH_API_KEY`: the API key that the commands present to a running server.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from importlib import resources
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from cluster.core.config.base import with_home
from cluster.core.config.draft_section import SELECTORS
from cluster.core.config.load import merge
from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from cluster.ingress.access.api_keys import ApiKey, parse_keys
from cluster.wire.peer_access import ClusterToken, PeerAccess
from deploy.chosen_draft import chosen_draft
from deploy.network.cluster_token import draw_token, find_token
from deploy.packaged_drafts import implied_paths, translator_method
from workers.serve.configuration import load_configuration

DEFAULT_PRESET = "cpu"
GARBAGE_THRESHOLD = 10_000
"""New objects after which Python looks for garbage in the processes that every event of a stream passes. With its
default of 700 they spend 5 to 8 % of their time on it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of a cluster and of the machine that starts it."""

    configuration: Configuration
    cache_directory: Path
    """Directory for converted weights and compiled code."""
    ray_address: str | None = None
    """Address of a running Ray cluster to join. `None` starts one on this machine."""
    token: ClusterToken = field(default_factory=draw_token)
    """What the processes of the cluster present to each other."""

    api_keys: tuple[ApiKey, ...] = ()
    """API keys from the environment. They open the public APIs."""
    api_key: str | None = field(default=None, repr=False)
    """The API key that commands present to a running server."""

    @property
    def demands_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_keys) or self.configuration.server.api_key_file is not None

    @property
    def access(self) -> PeerAccess:
        """What internal services demand, and what their clients present."""
        return PeerAccess(self.token, self.configuration.cluster.tls)


def load_settings(
    config: str | None = None,
    assignments: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    below: Iterable[str] = (),
    is_client: bool = False,
) -> Settings:
    """Settings from a preset name or a file, with `key=value` assignments on top.

    `below` are assignments that `assignments` override. A command that only speaks to a running server `is_client`: for
    it, the draft that `draft.path` names is neither fetched nor looked at, and drafting has its defaults. Raises
    `ConfigurationError` for an unreadable file, a malformed assignment or a refused value, and `ModelLoadError` for a
    draft that cannot be found.
    """
    layers = [parse_assignments(layer) for layer in (below, assignments)]
    return _settle(config, layers, os.environ if environment is None else environment, is_client=is_client)


def settings_from_arguments(arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from the arguments of `serve run deploy.ray.application:build_app config=cpu target.dtype=bfloat16`.

    `config` names a preset or a file. Every other key is a setting, dotted or nested, except `nodes`, which says where
    processes are planned. Strings of dotted keys are read as YAML, since a command line has no other values; nested
    ones have the types of their file. Raises `ConfigurationError`.
    """
    values = {key: value for key, value in arguments.items() if key not in ("config", "nodes")}
    overrides: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            overrides |= _flatten(value, f"{key}.")
        else:
            overrides[key] = _parse(key, value) if isinstance(value, str) else value
    config = arguments.get("config")
    return _settle(
        None if config is None else str(config), [overrides], os.environ if environment is None else environment
    )


def set_ray_environment() -> None:
    """Set the environment of Ray before it starts.

    No usage reports, and more time to start on a busy machine. Serve kills a replica that fails its health checks
    instead of waiting for it to drain: it is frozen or hangs, and its streams continue elsewhere. It looks at its
    proxies more often, to replace a frozen one sooner, but waits longer for one that starts. A proxy reads the answers
    of an ingress over gRPC, with Ray's token, because Ray's streams of objects take both processes half as much CPU
    time again. Answers have no bound there. It reads them on the event loop on which it sends them: a second one costs
    two wake-ups for each event, and reads ahead of a slow client without a bound. Its garbage is collected less often.
    Replicas have one loop, too: gRPC wakes every loop of a process for each event, whichever waits for it. gRPC polls
    sockets in the thread that waits for events: its event engine polls in another one, and an event then wakes both.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "5")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    os.environ.setdefault("RAY_SERVE_PROXY_USE_GRPC", "1")
    os.environ.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", "-1")
    os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")
    os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
    os.environ.setdefault("RAY_SERVE_PROXY_GC_THRESHOLD", str(GARBAGE_THRESHOLD))
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def _settle(
    config: str | None,
    layers: Iterable[Mapping[str, Any]],
    environment: Mapping[str, str],
    *,
    is_client: bool = False,
) -> Settings:
    """The settings of a preset or file, with each layer of dotted overrides on top of what is before it."""
    name = config or environment.get("PILOTFISH_CONFIG") or DEFAULT_PRESET
    below, layers = read_values(name), list(layers)
    nothing: dict[str, Any] = {}
    values, given = reduce(merge, layers, below), reduce(merge, layers, nothing)
    chosen = reduce(merge, layers, {} if name in presets() else below)  # a preset's methods are a default
    if is_client and _has_draft(values):
        values = values | {"draft": {}}
    values = merge(values, chosen_draft(values, given if _has_draft(given) else chosen))
    if not _has_draft(chosen, *SELECTORS):
        method = translator_method(values)
        values = values if method is None else merge(values, {"draft.method": method})
    configuration = load_configuration(values, implied_paths(values))
    if configuration.target.attention_backend != "auto" and not is_client:
        # Importing torch takes seconds, and hardly anybody names a backend.
        from workers.forward.backends.choice import check_backend_name

        check_backend_name(configuration.target.attention_backend)
    return Settings(
        configuration=configuration,
        cache_directory=cache_directory(environment),
        ray_address=environment.get("PILOTFISH_RAY_ADDRESS") or None,
        token=find_token(environment, configuration.cluster.token_file),
        api_keys=parse_keys(environment.get("PILOTFISH_API_KEYS", "").replace(";", "\n"), "PILOTFISH_API_KEYS"),
        api_key=environment.get("PILOTFISH_API_KEY", "").strip() or None,
    )


def _has_draft(values: Mapping[str, Any], *keys: str) -> bool:
    """Whether nested values have one of these keys of drafting; without any, whether they have `draft.path`."""
    draft = values.get("draft")
    return isinstance(draft, Mapping) and any(draft.get(key.removeprefix("draft.")) for key in keys or ("path",))


def cache_directory(environment: Mapping[str, str] | None = None) -> Path:
    """The directory for converted weights on this machine."""
    variables = os.environ if environment is None else environment
    return with_home("PILOTFISH_CACHE_DIR", variables.get("PILOTFISH_CACHE_DIR") or "~/.cache/pilotfish")


def code_directory(cache_directory: Path, environment: Mapping[str, str] | None = None) -> Path:
    """The directory for code compiled on this machine: that of the environment, else a folder in `cache_directory`."""
    variables = os.environ if environment is None else environment
    return with_home("PILOTFISH_CODE_DIR", variables.get("PILOTFISH_CODE_DIR") or str(cache_directory / "compiled"))


def presets() -> tuple[str, ...]:
    """The names of the presets that come with Pilotfish."""
    directory = resources.files("deploy").joinpath("presets")
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in directory.iterdir() if entry.name.endswith(".yaml"))
    )


def read_values(config: str) -> dict[str, Any]:
    """Read the nested values of a preset or a YAML file. Raises `ConfigurationError`."""
    if config in presets():
        text = resources.files("deploy").joinpath("presets", f"{config}.yaml").read_text("utf-8")
    else:
        try:
            text = Path(expanduser(config)).read_text("utf-8")
        except (OSError, ValueError) as error:  # a path with a null byte, or bytes that are no UTF-8
            known = ", ".join(presets())
            raise ConfigurationError(
                f"--config {config}: needed a readable file or a preset ({known}); {error}"
            ) from None
    return parse_values(config, text)


def parse_values(source: str, text: str) -> dict[str, Any]:
    """The nested values of the text of a YAML file that errors call `source`. Raises `ConfigurationError`."""
    values = _parse(source, text)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{source}: needed sections with keys, found {type(values).__name__}")
    for key in values:
        if not isinstance(key, str):
            raise ConfigurationError(f"{source}: {key} is refused; keys must be strings")
    return values


def read_list(file: Path) -> list[Any]:
    """Read a YAML file that holds a list. Raises `ConfigurationError`."""
    try:
        found = _parse(str(file), Path(expanduser(file)).read_text("utf-8"))
    except (OSError, ValueError) as error:  # a path with a null byte, or bytes that are no UTF-8
        raise ConfigurationError(f"{file}: needed a readable YAML file; {error}") from None
    if not isinstance(found, list):
        raise ConfigurationError(f"{file}: needed a list, found {type(found).__name__}")
    return found


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse `["target.dtype=bfloat16"]` into dotted overrides. Values are YAML. Raises `ConfigurationError`."""
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, sign, value = assignment.partition("=")
        if not sign or not key.strip():
            raise ConfigurationError(f"--set {assignment}: needed key=value, as in --set target.dtype=bfloat16")
        overrides[key.strip()] = _parse(f"--set {key}", value)
    return overrides


_MERGE = "tag:yaml.org,2002:merge"
"""The tag of `<<`, which a section may have several times: all that they name is merged."""


class _Loader(yaml.SafeLoader):
    """Reads YAML, and refuses a key that a section has twice: one of its values would be lost."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in seen:
                    raise ValueError(f"line {key.start_mark.line + 1}: {key.value} is there twice in one section")
                seen.add((key.tag, key.value))
        return node


def _parse(source: str, text: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - it makes plain values alone
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source}: not YAML; {' '.join(str(error).split())}") from None
    except (ValueError, LookupError, AttributeError, RecursionError) as error:  # not caught by PyYAML
        reason = error if isinstance(error, ValueError) else "a value is not of its tag's kind, or is nested too deep"
        raise ConfigurationError(f"{source}: refused; {reason}") from None


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
