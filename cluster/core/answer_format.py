"""How reasoning and calls of tools are written in an answer: what describes a format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Field(Enum):
    """A part of a call that is not the same in each call."""

    NAME = "name"
    """The name of the tool."""
    ID = "id"
    """The id that the model gives to the call."""
    ARGUMENTS = "arguments"
    """The arguments as a JSON object."""
    CALL = "call"
    """A JSON object with name and arguments, see `CallFormat.object`. A list of them is read, too."""
    LIST = "list"
    """A JSON list of such objects."""
    TAGS = "tags"
    """Each argument between tags, see `CallFormat.tags`."""
    PYTHON = "python"
    """Calls as Python writes them: `name(key=value, …)`, alone or in a list."""
    BRACES = "braces"
    """Arguments as `{key:value,…}` whose texts stand between `CallFormat.quote`."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A text around the fields of a call. White space before, in and after it is read in any amount, also none."""

    text: str
    """The text. `*` stands for a few characters when it is read, and is left out of what a grammar demands."""
    is_optional: bool = False
    """Whether calls without it are read."""
    is_written: bool = True
    """Whether calls that a grammar demands have it."""


def maybe(text: str) -> Literal:
    """Return a literal that the model writes, and without which calls are read."""
    return Literal(text, is_optional=True)


def also(text: str) -> Literal:
    """Return a literal that calls may have, and which no grammar demands."""
    return Literal(text, is_optional=True, is_written=False)


Pattern = tuple[str | Literal | Field, ...]
"""One call, in order."""


@dataclass(frozen=True, slots=True)
class Tags:
    """What surrounds an argument and its name."""

    key: str
    key_end: str
    value: str
    value_end: str
    json_key_end: str = ""
    """`key_end` before a value that is no text, where it differs."""
    strips: bool = False
    """Whether no white space around a value is part of it. Else one line break before and one after it are none."""


OWN_FORMAT = "response_template"
"""The name of formats that a checkpoint describes itself. They have no row here, so their parts are sent."""

OBJECT = '{"name": NAME, "arguments": ARGUMENTS}'


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls of tools."""

    name: str
    call: Pattern
    """One call, or all calls in a list."""
    detect: tuple[tuple[str, ...], ...] = ()
    """Texts of chat templates: a template that has all texts of one entry belongs to models of this format."""
    names: tuple[str, ...] = ()
    """Names of the setting `tool_parser` for this format, beside its own."""
    section: tuple[str, str] = ("", "")
    """What surrounds all calls. Calls without it are read."""
    between: str | None = ""
    """What stands between two calls; `None`: a required answer has one call. No beginning of the end of `section`."""
    also_read: tuple[Pattern, ...] = ()
    """Other forms of a call that are read and never demanded."""
    object: str = OBJECT
    """A call as a JSON object, in which NAME, ARGUMENTS and ID stand for the fields. NAME is a JSON text."""
    list: tuple[str, str, str] = ("[", ", ", "]")
    """The beginning, what stands between two entries, and the end of a list of calls."""
    tags: Tags | None = None
    quote: str = ""
    ids: str = "[a-zA-Z0-9]{9}"
    """A regular expression for the ids that a grammar demands."""
    spaces: str = ""
    """A regular expression for the white space that a grammar allows beside each literal."""
    history_ids: str = ""
    """Ids of calls in a conversation as the chat template demands them: `alphanumeric`, or a text with NAME and NUMBER.
    Empty: any."""

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """All forms of a call that are read."""
        return (self.call, *self.also_read)

    @property
    def markers(self) -> Iterator[str]:
        """All literals, of which some may be special tokens."""
        yield from filter(None, self.section)
        texts = (literal_of(part).text for form in self.patterns for part in form if not isinstance(part, Field))
        yield from (marker for text in texts for marker in text.split("*") if marker)
        if self.tags is not None:
            yield from filter(None, (self.tags.key, self.tags.key_end, self.tags.value, self.tags.value_end))
        if self.quote:
            yield self.quote


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes what it thinks, and which markers its content has."""

    name: str
    opening: str = ""
    """What precedes reasoning. Empty: the model does not reason. `*` stands for a few characters."""
    closing: str = ""
    """What follows it."""
    detect: tuple[tuple[str, ...], ...] = ()
    """Texts of chat templates; see `CallFormat.detect`."""
    names: tuple[str, ...] = ()
    """Names of the setting `reasoning_parser` for this format, beside its own."""
    begins_inside: bool = False
    """Whether an answer begins with reasoning although neither the prompt nor the answer opens it."""
    repeats: bool = False
    """Whether reasoning is found anywhere in the answer, or at its beginning alone."""
    frame: tuple[str, str] = ("", "")
    """What surrounds the content. It is left out at the beginning of the content, and the end after that."""
    markers_left_out: tuple[str, ...] = ()
    """Markers that are left out anywhere in the content. `*` stands for a few characters."""
    after_closing: str = ""
    """What the model writes after reasoning, in front of content and of calls."""
    answer_opening: str = ""
    """What precedes the content."""

    @property
    def reasons(self) -> bool:
        """Whether the model writes what it thinks."""
        return bool(self.closing)

    @property
    def written_opening(self) -> str:
        """What the model writes before reasoning."""
        return self.opening.replace("*", "")

    @property
    def markers(self) -> Iterator[str]:
        """All literals, of which some may be special tokens."""
        for marker in (self.opening, self.closing, *self.frame, *self.markers_left_out):
            yield from filter(None, marker.split("*"))


def literal_of(part: str | Literal) -> Literal:
    """Return a part of a pattern that is no field as a literal."""
    return part if isinstance(part, Literal) else Literal(part)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How reasoning and calls of tools are found in the text of an answer."""

    calls: CallFormat | None = None
    """How the model writes calls of tools; `None` if no tools were offered."""
    reasoning: ReasoningFormat | None = None
    """How the model writes what it thinks; `None` if it does not, and its content has no markers."""
    begins_in_reasoning: bool = False
    """Whether the answer begins with what the model thinks, without a marker."""

    @property
    def reasons(self) -> bool:
        """Whether the model writes what it thinks."""
        return self.reasoning is not None and self.reasoning.reasons

    @property
    def markers(self) -> tuple[str, ...]:
        """All literals that must be in the text, of which some may be special tokens."""
        return tuple(marker for one in (self.calls, self.reasoning) if one is not None for marker in one.markers)


TEXT_ONLY = AnswerFormat()
"""Neither reasoning nor calls of tools."""
