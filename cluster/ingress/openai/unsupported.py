"""Parameters that OpenAI's API or vLLM has and this server does not support.

Each is listed with the values that have no effect. Those values are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

IgnoredValues = Mapping[str, tuple[object, ...]]

_NEVER: tuple[object, ...] = ()

_BOTH_ENDPOINTS: dict[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    # vLLM's parameters
    "add_special_tokens": _NEVER,
    "allowed_token_ids": _NEVER,
    "bad_words": ([],),
    "guided_choice": _NEVER,
    "guided_grammar": _NEVER,
    "guided_json": _NEVER,
    "guided_regex": _NEVER,
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": _NEVER,
    "logits_processors": _NEVER,
    "priority": (0,),
    "prompt_logprobs": _NEVER,
    "repetition_detection": _NEVER,
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": _NEVER,
    "truncate_prompt_tokens": _NEVER,
    "vllm_xargs": _NEVER,
}

COMPLETIONS: IgnoredValues = MappingProxyType(
    {
        **_BOTH_ENDPOINTS,
        "echo": (False,),
        "suffix": ("",),
        "prompt_embeds": _NEVER,
        "response_format": ({"type": "text"},),
    }
)
"""`/v1/completions`."""

CHAT: IgnoredValues = MappingProxyType(
    {
        **_BOTH_ENDPOINTS,
        "add_generation_prompt": (True,),
        "audio": _NEVER,
        "chat_template": _NEVER,
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": _NEVER,
        "echo": (False,),
        "function_call": ("none",),
        "functions": _NEVER,
        "include_reasoning": _NEVER,
        "mm_processor_kwargs": _NEVER,
        "modalities": (["text"],),
        "moderation": _NEVER,
        "parallel_tool_calls": _NEVER,
        "prompt_cache_options": _NEVER,
        "prompt_cache_retention": _NEVER,
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": _NEVER,
        "web_search_options": _NEVER,
    }
)
"""`/v1/chat/completions`."""
