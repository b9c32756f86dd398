"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.ingress.openai.fields.types import Seed, StrictModel, Text, Texts, UInt32, Untyped, Untypeds
from cluster.ingress.openai.fields.unsupported import HOSTED, Unsupported, UnsupportedParameters

_LOGPROBS = "message.output_text.logprobs"
_ANSWERED_ITEMS = frozenset({"message", "function_call", "function_call_output"})
"""The items of an input that the model reads."""
_READ_PARTS = {"reasoning": ("effort",), "text": ("format",)}
"""The parts of two fields that have an effect."""


class ResponsesBody(StrictModel):
    """The body of `POST /v1/responses`."""

    unsupported: ClassVar[UnsupportedParameters] = {
        "background": Unsupported("answers are generated while the client waits", (False,)),
        "conversation": Unsupported("previous_response_id continues a conversation"),
        "prompt": Unsupported(HOSTED),
        "truncation": Unsupported("a conversation that is too long is refused", ("disabled",)),
        "max_tool_calls": Unsupported("there are no built-in tools"),
    }

    model: Text | None = None
    """A served name of the model."""
    input: Text | Untypeds
    """A text of the user, or items of a conversation."""
    instructions: Text | None = None
    """What the system says first. It is not kept for later responses."""
    previous_response_id: Text | None = None
    """Continue after this response, while it is kept."""
    store: bool = True
    """Keep the conversation, so that a later request can continue it. `false` also excludes it from training drafts."""
    stream: bool = False
    """Send server-sent events while the answer is generated."""
    max_output_tokens: UInt32 | None = None
    """Most tokens of the answer."""
    temperature: float | None = None
    """Logits are divided by it."""
    top_p: float | None = None
    """Keep the smallest set of most probable tokens whose probability reaches it."""
    seed: Seed | None = None
    """The seed, as in chat completions."""
    tools: Untypeds = Field(default_factory=list)
    """Functions that the model may call. Tools of other types, which OpenAI runs, are left out."""
    tool_choice: Any = None
    """`auto`, `none`, `required` (a call of any tool) or the name of a function."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""
    reasoning: Untyped | None = None
    """Settings of reasoning models. `effort` becomes `reasoning_effort` in the model's chat template."""
    include: Texts = Field(default_factory=list)
    """`message.output_text.logprobs` reports the log-probability of each token of the text. The other parts that OpenAI
    has are left out: reasoning is never encrypted, and no hosted tools run."""
    top_logprobs: UInt32 | None = None
    """Number of alternatives for each token, if `include` asks for log-probabilities."""
    text: Untyped | None = None
    """The form of the answer. `format` takes what `response_format` of a chat completion takes."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """No effect: labels that the client chooses."""
    user: Text | None = None
    """No effect."""
    safety_identifier: Text | None = None
    """No effect."""
    prompt_cache_key: Text | None = None
    """No effect."""
    service_tier: Literal["auto", "default"] = "auto"
    """No effect."""

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions among the tools."""
        return [tool for tool in self.tools if tool.get("type") == "function"]

    @property
    def requires_call(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, dict)

    @property
    def includes_logprobs(self) -> bool:
        """Whether the log-probabilities of the text are reported."""
        return _LOGPROBS in self.include

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """The tools, items and parts that are left out."""
        items = [] if isinstance(self.input, str) else [item.get("type", "message") for item in self.input]
        names = [*super().ignored_fields]
        names += [f"tools.{tool.get('type')}" for tool in self.tools if tool.get("type") != "function"]
        names += [f"include.{part}" for part in self.include if part != _LOGPROBS]
        names += [f"input.{kind}" for kind in items if isinstance(kind, str) and kind not in _ANSWERED_ITEMS]
        for name, read in _READ_PARTS.items():
            given = getattr(self, name) or {}
            names += [f"{name}.{part}" for part, value in given.items() if part not in read and value is not None]
        if self.requires_call and (self.text or {}).get("format") is not None:
            names.append("text.format")
        if self.top_logprobs and not self.includes_logprobs:
            names.append("top_logprobs")
        return tuple(names)
