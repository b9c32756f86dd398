"""Render a conversation with the chat template of the model, in a sandbox.

The environment is that of `transformers`, for which the templates are written.
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
    """One message of a conversation."""

    role: str
    content: str
    name: str | None = None


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. It renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template and the special tokens that it uses.

    Raises `ConfigurationError` if the source is not a valid template.
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
        """Return the conversation as text that ends where the assistant's answer begins.

        Raises `InvalidRequest` (`messages`) if the template rejects the conversation.
        """
        values = [
            {"role": message.role, "content": message.content}
            | ({"name": message.name} if message.name is not None else {})
            for message in messages
        ]
        try:
            return self._template.render(
                **self._special_tokens, messages=values, add_generation_prompt=True, tools=None, documents=None
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            roles = [message.role for message in messages]
            raise InvalidRequest(
                "messages", roles, f"a conversation that the model's template accepts: {error}"
            ) from None


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as `transformers` writes it: not escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
