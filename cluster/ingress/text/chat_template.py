"""Render a conversation with the template that came with the model, in a sandbox.

The environment is the one Hugging Face templates are written for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.core.errors import ConfigurationError, InvalidRequest


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it renders as it stands."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the special tokens it may name.

    Raises `ConfigurationError` when the source is no valid template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigurationError(f"chat template: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, open for the assistant's turn.

        Raises `InvalidRequest` (`messages`) when the template refuses it.
        """
        turns = [
            {"role": turn.role, "content": turn.content} | ({"name": turn.name} if turn.name is not None else {})
            for turn in messages
        ]
        try:
            return self._template.render(
                **self._special_tokens, messages=turns, add_generation_prompt=True, tools=None, documents=None
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            roles = [turn.role for turn in messages]
            raise InvalidRequest("messages", roles, f"a conversation the model's template takes: {error}") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    """As Hugging Face defines it: readable, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
