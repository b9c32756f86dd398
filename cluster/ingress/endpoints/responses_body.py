"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.ingress.openai.fields.types import Seed, StrictModel, Text, UInt32, Untyped
from cluster.ingress.openai.fields.unsupported import Unsupported, UnsupportedParameters

_HOSTED = "it belongs to OpenAI's hosted service"


class ResponsesBody(StrictModel):
    """The body of `POST /v1/responses`."""

    unsupported: ClassVar[UnsupportedParameters] = {
        "background": Unsupported("answers are generated while the client waits", (False,)),
        "conversation": Unsupported("previous_response_id continues a conversation"),
        "include": Unsupported(_HOSTED, ([],)),
        "prompt": Unsupported(_HOSTED),
        "top_logprobs": Unsupported("chat completions report log-probabilities", (0,)),
        "truncation": Unsupported("a conversation that is too long is refused", ("disabled",)),
        "max_tool_calls": Unsupported("there are no built-in tools"),
    }

    model: Text | None = None
    """A served name of the model."""
    input: str | list[Untyped]
    """A text of the user, or items of a conversation."""
    instructions: Text | None = None
    """What the system says first. It is not kept for later responses."""
    previous_response_id: Text | None = None
    """Continue after this response, while it is kept."""
    store: bool = True
    """Keep the conversation, so that a later request can continue it."""
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
    tools: list[Untyped] = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: Any = None
    """`auto`, `none`, `required` (a call of any tool) or the name of a function."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""
    reasoning: Untyped | None = None
    """Settings of reasoning models. `effort` becomes `reasoning_effort` in the model's chat template."""
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
