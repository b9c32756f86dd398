"""Parameters that OpenAI's API or vLLM has and this server does not support, with the reason.

Each is listed with the values that have no effect. Those values are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why a parameter is refused, and its values that are accepted because they have no effect."""

    reason: str
    neutral: tuple[object, ...] = ()


UnsupportedParameters = Mapping[str, Unsupported]

_TEXT_ONLY = "models here read and write text only"
_TRANSFER = "prompts and answers are computed by the same workers"
HOSTED = "it belongs to OpenAI's hosted service"
_ROUTED = "expert routing is not reported"
_RENDER = "there is no endpoint that only renders prompts"

_BOTH_ENDPOINTS: dict[str, Unsupported] = {
    "service_tier": Unsupported(HOSTED, ("auto", "default")),
    # vLLM's parameters
    "ec_transfer_params": Unsupported(_TRANSFER),
    "kv_transfer_params": Unsupported(_TRANSFER),
    "logits_processors": Unsupported("code of clients is never run"),
    "repetition_detection": Unsupported("answers end at stop strings, stop tokens and max_tokens only"),
    "return_mm_kwargs": Unsupported(_RENDER, (True,)),
    "return_token_offsets": Unsupported(_RENDER, (False,)),
    "routed_experts_prompt_start": Unsupported(_ROUTED, (0,)),
    "session_id": Unsupported("requests of a session find each other's prefixes by content"),
    "vllm_xargs": Unsupported("there are no extensions that read it", ({},)),
    "watermarking": Unsupported("answers are not watermarked", (False,)),
}

COMPLETIONS: UnsupportedParameters = MappingProxyType(
    {
        **_BOTH_ENDPOINTS,
        "prompt_embeds": Unsupported("prompts are text or tokens"),
        "suffix": Unsupported("the models continue a prompt; they are not trained to fill in before a suffix", ("",)),
    }
)
"""`/v1/completions`."""

CHAT: UnsupportedParameters = MappingProxyType(
    {
        **_BOTH_ENDPOINTS,
        "audio": Unsupported(_TEXT_ONLY),
        "chat_template": Unsupported("templates of clients are never run; the model's own is used"),
        "echo": Unsupported("an answer never repeats a message", (False,)),
        "function_call": Unsupported("OpenAI has replaced it by tool_choice", ("none",)),
        "functions": Unsupported("OpenAI has replaced it by tools", ([],)),
        "media_io_kwargs": Unsupported(_TEXT_ONLY, ({},)),
        "mm_processor_kwargs": Unsupported(_TEXT_ONLY, ({},)),
        "modalities": Unsupported(_TEXT_ONLY, (["text"],)),
        "moderation": Unsupported(HOSTED),
        "prompt_cache_options": Unsupported(HOSTED),
        "prompt_cache_retention": Unsupported(HOSTED),
        "return_prompt_text": Unsupported("return_token_ids reports the prompt's tokens", (False,)),
        "verbosity": Unsupported(HOSTED, ("medium",)),
        "web_search_options": Unsupported(HOSTED),
    }
)
"""`/v1/chat/completions`."""
