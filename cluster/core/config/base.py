"""Building blocks of the configuration: the base of every section, and the types that several fields share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, SerializeAsAny

from cluster.core.errors import ConfigurationError

MIB = 1024 * 1024
"""Bytes of a mebibyte."""


class Section(BaseModel):
    """A part of the configuration. It is frozen and refuses unknown keys, and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class PluginSettings(Section):
    """Settings of one plug-in. The plug-in's name is the name of the subsection, as in `draft.ngram`."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Maps keys of earlier versions, relative to the enclosing section, to current keys. Errors name the new key."""
    draft_kind: ClassVar[str] = ""
    """Kind of the drafts that a drafting method loads from its `path`, as their cards name it; empty: it loads none."""
    reads_target_files: ClassVar[bool] = False
    """Whether a drafting method without weights reads files of the target."""
    learns: ClassVar[bool] = False
    """Whether a drafting method can be trained on what it drafts for: what it makes is a `LearnsOnline`."""

    @property
    def graphs(self) -> str:
        """The passes of a drafting method that a GPU runs as CUDA graphs, in words; empty: it has none."""
        return ""

    def graph_logits(self, vocabulary_size: int) -> int:  # noqa: ARG002 - by default there are none
        """The logits that the largest of these CUDA graphs computes, for a target with so many tokens."""
        return 0

    def check_selected(self) -> None:
        """Raise `ValueError` when the plug-in is selected but a setting that it needs is missing."""


class ModuleSection(PluginSettings):
    """Settings of a drafting method that can load a trained module."""

    path: str = ""
    """A module that was trained for the target: a local directory, a hub id, or the name of a packaged one; unset: the
    target's packaged one, if there is one."""


Settings = TypeVar("Settings", bound=PluginSettings)


class PluginHost(Section):
    """A section that has one subsection for each registered plug-in of a kind, in addition to its own fields."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, SerializeAsAny[InstanceOf[PluginSettings]]]

    def selected(self, key: str) -> tuple[str, ...]:
        """Names of the plug-ins that the field `key` selects."""
        return (str(getattr(self, key)),)

    def settings(self, plugin: str, kind: type[Settings]) -> Settings:
        """Settings of the plug-in, or the defaults of `kind` when the section was built without plug-ins."""
        found = self.__pydantic_extra__.get(plugin)
        return found if isinstance(found, kind) else kind()


def _yaml_choice(value: object) -> object:
    """Map the booleans that YAML 1.1 reads for bare `on` and `off` back to these words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


ChoiceType = TypeVar("ChoiceType")
Choice = Annotated[ChoiceType, BeforeValidator(_yaml_choice)]
"""A `Literal` among whose values is `on` or `off`. It accepts YAML's booleans as well."""

Taps = Annotated[tuple[Annotated[int, Field(ge=-64, le=4096)] | Literal["middle"], ...], Field(max_length=16)]
"""Names of hidden states of a target. `cluster.core.drafting.Tap` says what they mean."""


@dataclass(frozen=True, slots=True)
class Unshared:
    """Marks, in an `Annotated` type, a setting in which targets and drafters that serve each other may differ."""


UNSHARED = Unshared()
"""Marks a number of processes, threads or sequences, or where a process runs."""


def shared_settings(section: Section) -> dict[str, Any]:
    """Return all settings of a section as JSON values, also those of its subsections, but those that are `UNSHARED`."""
    values = section.model_dump(mode="json")
    for name, value in section:
        field = type(section).model_fields.get(name)
        if field is not None and UNSHARED in field.metadata:
            del values[name]
        elif isinstance(value, Section):
            values[name] = shared_settings(value)
    return values


Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]


def with_home(setting: str, path: str) -> Path:
    """The path that `setting` names, with the home directory in place of a first `~` or `~USER`.

    Raises `ConfigurationError` for a user without a home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigurationError(f"{setting}: needed a known user, found {path}") from None
