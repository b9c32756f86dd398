"""Render a conversation with the chat template of the model, in a sandbox.

The environment is that of `transformers`, for which the templates are written.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.core.answer_format_rows import call_format_of, reasoning_format_of
from cluster.core.errors import ConfigurationError, InvalidRequest
from cluster.generation.text.chat_messages import (
    CalledTool,
    Expected,
    Message,
    as_object,
    as_text,
    has_broken_call,
    to_json,
    with_results_as_text,
    with_tools_as_text,
)

RENDER_SECONDS = 5.0
"""Longest time for which a template may compute, in seconds of its thread."""
Clock = Callable[[], float]
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))
"""Characters without a meaning, one of which marks a place in a text."""
_MARGIN = " \t "
"""White space after a mark, which shows whether a template strips a text."""

_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What a template raises that does not accept a conversation."""
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception"})
"""Variables of templates that requests cannot set by name."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a template renders besides the messages, and where the prompt ends."""

    tools: tuple[str, ...] = ()
    """Tools that the model may call, as JSON objects in OpenAI's form."""
    arguments: str = ""
    """Further variables, as a JSON object; empty: none."""
    continue_final_message: bool = False
    """End the prompt with the last message, which the answer continues."""
    add_generation_prompt: bool = True
    """End the prompt with the beginning of a new message of the assistant."""


PLAIN = TemplateOptions()
"""The messages alone, and the beginning of the answer."""


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. It renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates end with an error when they have computed for long."""

    clock: Clock
    """Returns the time that the current thread has computed, in seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.clock = clock
        self._thread = threading.local()

    def begin(self) -> None:
        """Begin to render in this thread."""
        self._thread.ends = self.clock() + RENDER_SECONDS

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Templates read attributes here."""
        self._check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Templates read entries here."""
        self._check()
        return super().getitem(obj, argument)

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Templates call functions and macros here."""
        self._check()
        return super().call(*args, **kwargs)

    def _check(self) -> None:
        if self.clock() > getattr(self._thread, "ends", math.inf):
            raise ValueError(f"it computes for more than {RENDER_SECONDS:g} s")


class TextTooLong(Exception):
    """A template has written more characters than it may; `chars` of them."""

    def __init__(self, chars: int) -> None:
        super().__init__(chars)
        self.chars = chars


class ChatTemplate:
    """A compiled chat template and the special tokens that it uses.

    Raises `ConfigurationError` if the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock = time.thread_time) -> None:
        self._environment = environment = _BoundedEnvironment(clock)
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
            variables = meta.find_undeclared_variables(tree)
        except TemplateError as error:
            raise ConfigurationError(f"chat template: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._characters = frozenset(source).union(*special_tokens.values())
        self._renders_tools = "tools" in variables
        self.call_format = call_format_of(source if self._renders_tools else "")
        """How the model writes calls of tools."""
        self._expected = Expected.of(source, tree, self.call_format.history_ids if self._renders_tools else "")
        self.reasoning_format = reasoning_format_of(source)
        """How the model writes what it thinks; `None` if it does not."""

    def render(
        self, messages: Sequence[Message], options: TemplateOptions = PLAIN, most_chars: int | None = None
    ) -> str:
        """Return the conversation as text that ends where the assistant's answer begins.

        Raises `TextTooLong` if the template writes more than `most_chars` characters, and `InvalidRequest` (`messages`)
        if it rejects the conversation or computes for more than `RENDER_SECONDS`.
        """
        if options.continue_final_message:
            return self._render_until_end_of_last(messages, options, most_chars)
        return self._render(messages, options, most_chars)

    def _render_until_end_of_last(
        self, messages: Sequence[Message], options: TemplateOptions, most_chars: int | None
    ) -> str:
        """Return the conversation up to the end of the last message's content.

        The content is rendered with a mark at its end, a character that occurs nowhere else, so its place is known.
        White space at its end is left out where the template strips it. Raises `InvalidRequest`
        (`continue_final_message`) if the template does not show the content.
        """
        *before, last = messages
        mark = self._unused_character(messages, options)
        end = f"{mark}{_MARGIN}"
        parts = (*last.parts[:-1], f"{last.parts[-1]}{end}") if last.parts else ()
        marked = replace(last, content=f"{last.content}{end}", parts=parts)
        text = self._render([*before, marked], options, most_chars)
        prompt, found, rest = text.rpartition(mark)
        if not found:
            raise InvalidRequest("continue_final_message", True, "false: the model's template changes the last message")
        return prompt if rest.startswith(_MARGIN) else prompt.rstrip()

    def _unused_character(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        """Return a private-use character that neither the template nor what it renders contains."""
        rendered = (
            [self._expected.variables(message, as_text) for message in messages],
            [json.loads(text) for text in (*options.tools, options.arguments or "{}")],
        )
        used = self._characters.union(to_json(rendered))
        found = next((char for char in map(chr, _PRIVATE_USE) if char not in used), None)
        if found is None:
            raise InvalidRequest("messages", f"{len(used)} different characters", "without all private-use characters")
        return found

    def _render(self, messages: Sequence[Message], options: TemplateOptions, most_chars: int | None) -> str:
        tools = [json.loads(tool) for tool in options.tools]
        variables = {"documents": None, **(json.loads(options.arguments) if options.arguments else {})}
        variables |= {"tools": tools or None, "add_generation_prompt": options.add_generation_prompt}
        for turns in self._turns(messages, options):
            try:
                return self._generate({**variables, "messages": turns}, most_chars)
            except _REFUSALS as error:
                reason = str(error)
        roles = [message.role for message in messages]
        raise InvalidRequest("messages", roles, f"a conversation that the model's template accepts: {reason}")

    def _turns(self, messages: Sequence[Message], options: TemplateOptions) -> Iterator[list[dict[str, Any]]]:
        """Yield the messages as the template reads them, first in the form that most templates take."""
        prepared: Sequence[Message] = self._expected.prepared(messages)
        offers = [prepared]
        if options.tools and not self._renders_tools:
            offers = [with_tools_as_text(prepared, options.tools, in_system=is_first) for is_first in (True, False)]
        if not self._renders_tools and any(message.role == "tool" for message in messages):
            as_user: list[Sequence[Message]] = [*map(with_results_as_text, offers)]
            offers = [*offers, *as_user] if self._shows_results else as_user
        # Arguments that are no object are shown as text. Some templates take objects only.
        forms = (as_text, as_object) if any(map(has_broken_call, messages)) else (as_text,)
        # Where a template asks if a content is none, it may still read that of another message as a text.
        expected = (self._expected, *([replace(self._expected, knows_none=False)] if self._expected.knows_none else ()))
        for turns, form, expects in product(offers, forms, expected):
            yield [expects.variables(turn, form) for turn in turns]

    @cached_property
    def _shows_results(self) -> bool:
        """Whether the template takes a result of a tool in its own role and shows it."""
        call = CalledTool("call00000", "f", "{}")
        before = (Message("user", "a"), Message("assistant", "b", tool_calls=(call,)))
        mark = self._unused_character(before, PLAIN)
        messages = self._expected.prepared((*before, Message("tool", mark, tool_call_id=call.id)))
        turns = [self._expected.variables(message, as_text) for message in messages]
        variables = {"documents": None, "tools": None, "add_generation_prompt": False, "messages": turns}
        try:
            return mark in self._generate(variables, None)
        except _REFUSALS:
            return False

    def _generate(self, variables: Mapping[str, Any], most_chars: int | None) -> str:
        parts, length = [], 0
        self._environment.begin()
        for part in self._template.generate({**self._special_tokens, **variables}):
            parts.append(part)
            length += len(part)
            if most_chars is not None and length > most_chars:
                raise TextTooLong(length)
        return "".join(parts)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
