"""The configurations that take part in a benchmark: all registered methods that can run, and those of the user."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.core.config.draft_section import NO_DRAFTS
from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, ModelLoadError, PilotfishError, shorten
from deploy.bench.contestants.answers import RequestOptions
from deploy.bench.options import ContestOptions
from deploy.models import resolve_models
from deploy.packaged_drafts import needs_path
from deploy.settings import Settings, load_settings, parse_assignments, read_list
from workers.draft.registry import METHODS, MethodPlugin

FREE_PORTS = ("server.http_port=0", "server.grpc_port=0")
_MODEL = "model"
"""The drafting method with an independent draft model."""
_NEXT_KEY = re.compile(r",(?=[A-Za-z_][\w.]*=)")
"""A comma that is followed by a key; other commas belong to a value."""
_COMBINATIONS = Path(__file__).parents[1] / "combinations"
_NEUTRAL = ("target.kv.prefix_cache", "target.kv.pool_bytes", "target.kv.host_bytes", "target.max_context_len")
"""Settings of the target that no answer depends on."""
_NO_CHANGE = RequestOptions()
_REQUEST = "request."
"""Beginning of the keys that change requests instead of the cluster."""


@dataclass(frozen=True, slots=True)
class Competitor:
    """One configuration of cluster and requests."""

    name: str
    configuration: Configuration
    """With resolved model paths and free ports."""
    assignments: tuple[str, ...] = ()
    """The settings that distinguish it, as `key=value`."""
    request: RequestOptions = _NO_CHANGE
    """What it changes in every request: the assignments to `request.…`."""

    @property
    def alters_target(self) -> bool:
        """Whether its answers may differ from those of plain decoding, because it changes the target."""
        return any(text.startswith("target.") and not text.startswith(_NEUTRAL) for text in self.assignments)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A competitor that does not run."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Builds the configuration of each competitor from the settings of the command line."""

    config: str | None
    assignments: tuple[str, ...]
    """`--set`; a competitor's own settings take precedence."""

    def given(self) -> Settings:
        """The settings of the command line as they are. Raises `ConfigurationError`."""
        return load_settings(self.config, self.assignments)

    def client(self) -> Settings:
        """The settings of the command line for a client of running servers. Raises `ConfigurationError`."""
        return load_settings(self.config, self.assignments, is_client=True)

    def plain(self) -> Settings:
        """The settings without drafts. Raises `PilotfishError`."""
        return self.settings(_selecting(NO_DRAFTS))

    def check(self, own: Sequence[str]) -> None:
        """Raise `ConfigurationError` for settings of one competitor that are refused whatever drafts the target has."""
        drafts = [f"draft.{name}.path=unknown" for name, _ in METHODS.items() if needs_path(name)]
        with suppress(ModelLoadError):
            load_settings(self.config, own, below=[*drafts, *self.assignments, *self._chosen_draft(own)])

    def settings(self, own: Sequence[str]) -> Settings:
        """The settings of one competitor, with models as local directories. Raises `PilotfishError`."""
        found = load_settings(self.config, own, below=[*FREE_PORTS, *self.assignments, *self._chosen_draft(own)])
        models = resolve_models(found.configuration, found.cache_directory, lambda _: None)
        return Settings(models.configuration, found.cache_directory, found.ray_address)

    def _chosen_draft(self, own: Sequence[str]) -> tuple[str, ...]:
        """The method and its path in place of `draft.path`, which refuses the other methods that competitors select."""
        try:
            draft = self.given().configuration.draft
        except ConfigurationError:  # as long as a competitor adds nothing
            return ()
        if not draft.path or any(text.startswith("draft.path=") for text in own):
            return ()
        chosen = {"method": draft.name, "path": "", f"{draft.name}.path": draft.path}
        if draft.revision is not None:
            chosen[f"{draft.name}.revision"] = draft.revision
        return tuple(f"draft.{key}={json.dumps(value)}" for key, value in chosen.items())


def find_competitors(
    options: ContestOptions, settings_source: BenchSettings
) -> tuple[tuple[Competitor, ...], tuple[Skipped, ...]]:
    """The competitors in order, and those that cannot run with the reason.

    Raises `ConfigurationError` for an unknown method, and for a configuration that cannot be read or whose settings are
    refused.
    """
    wanted: dict[str, tuple[str, ...]] = {}
    named = options.method_names
    if not named and not options.configuration:
        named = tuple(method for method, plugin in METHODS.items() if _is_default(method, plugin))
    for method in named:
        wanted[method] = (*_selecting(method), *_own_dtype(method, METHODS.get(method), settings_source))
    for text in options.configuration:
        for name, assignments in read_configurations(text).items():
            if name in wanted:
                raise ConfigurationError(f"--configuration: {name!r} is named twice; each name must be unique")
            wanted[name] = assignments
            _check(name, assignments, settings_source)
    found: list[Competitor] = []
    skipped: list[Skipped] = []
    for name, assignments in wanted.items():
        try:
            request, own = split_request_options(assignments)
            configuration = settings_source.settings(own).configuration
            found.append(Competitor(name, configuration, assignments, request))
        except PilotfishError as error:
            skipped.append(Skipped(name, str(error)))
    return tuple(found), tuple(skipped)


def _check(name: str, assignments: Sequence[str], settings_source: BenchSettings) -> None:
    try:
        settings_source.check(split_request_options(assignments)[1])
    except ConfigurationError as error:
        raise ConfigurationError(f"--configuration {name}: {error}") from None


def draft_model_directory(settings_source: BenchSettings) -> Path:
    """The directory of the configured draft model, or of the target's shipped one. Raises `PilotfishError`."""
    own = (*_selecting(_MODEL), *_own_dtype(_MODEL, METHODS.get(_MODEL), settings_source))
    weights = settings_source.settings(own).configuration.draft.weights
    if weights is None:
        raise ConfigurationError("draft.model.path must be set to a draft model")
    return Path(weights.path)


def read_configurations(text: str) -> dict[str, tuple[str, ...]]:
    """The settings of each competitor in `NAME=KEY=VALUE,KEY=VALUE`, in a YAML file with a list of `name` and `set`, or
    in a combination that comes with Pilotfish, by its name.

    Raises `ConfigurationError`.
    """
    if text in combinations():
        return read_configurations(str(combinations()[text]))
    if text.endswith((".yaml", ".yml")):
        return dict(_entry(text, entry) for entry in read_list(Path(text)))
    name, _, assignments = text.partition("=")
    parts = tuple(part.strip() for part in _NEXT_KEY.split(assignments))
    if not name.strip() or not all("=" in part for part in parts):
        raise ConfigurationError(
            f"--configuration {text}: needed NAME=KEY=VALUE, as in lookup=draft.method=ngram, a YAML file, or one of "
            f"{', '.join(combinations())}"
        )
    parse_assignments(parts)
    return {name.strip(): parts}


def combinations() -> dict[str, Path]:
    """The files of combined settings that come with Pilotfish, by name."""
    return {file.stem: file for file in sorted(_COMBINATIONS.glob("*.yaml"))}


def split_request_options(assignments: Sequence[str]) -> tuple[RequestOptions, tuple[str, ...]]:
    """The options of requests (`request.beams=4`), and the settings of the cluster. Raises `ConfigurationError`."""
    own = tuple(text for text in assignments if not text.startswith(_REQUEST))
    values = parse_assignments([text.removeprefix(_REQUEST) for text in assignments if text.startswith(_REQUEST)])
    try:
        return RequestOptions(**values), own
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{_REQUEST}{where}: {shorten(first['input'])} is refused; {first['msg']}") from None


def _entry(file: str, entry: Any) -> tuple[str, tuple[str, ...]]:
    if (
        not isinstance(entry, Mapping)
        or set(entry) != {"name", "set"}
        or not isinstance(entry["name"], str)
        or not isinstance(entry["set"], Mapping)
    ):
        raise ConfigurationError(
            f"--configuration {file}: each entry needs a `name` and a mapping `set`, found {shorten(entry)}"
        )
    return entry["name"], tuple(f"{key}={_as_yaml(value)}" for key, value in entry["set"].items())


def _as_yaml(value: Any) -> str:
    """A value as it is written after `--set key=`: YAML in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _selecting(method: str) -> tuple[str, ...]:
    return (f"draft.method={method}",)


def _is_default(method: str, plugin: MethodPlugin) -> bool:
    """Whether a method takes part if the user names none. Methods that change the target's answers do not."""
    return method != NO_DRAFTS and plugin.target_settings is None


def _own_dtype(method: str, plugin: MethodPlugin, settings_source: BenchSettings) -> tuple[str, ...]:
    """The target's dtype for a packaged draft model: one whose path is not set."""
    if "dtype" not in plugin.settings.model_fields:
        return ()
    found = settings_source.given().configuration
    if getattr(found.draft.settings(method, plugin.settings), "path", ""):
        return ()
    return (f"draft.{method}.dtype={found.target.dtype}",)
