"""The whole configuration, and the sections that bound steps and requests.

Each setting is declared once, with its type, bounds, default and meaning. The other sections have files of their own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.core.config.base import MIB, Positive, Seconds, Section
from cluster.core.config.cluster_section import ClusterSection
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.server import ServerSection
from cluster.core.config.target_section import TargetSection


class SchedulerSection(Section):
    """Bounds of one step and of the waiting queue."""

    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 32
    """Most sequences that run at once."""
    max_step_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    """Most tokens in one step of the target: prompt chunks, last committed tokens and draft trees together."""
    max_prompt_tokens: Positive | None = None
    """Most prompt tokens in a step in which other sequences decode, to bound their delay; unset: `max_step_tokens` on a
    CPU. Unset on a GPU, it is four times the tokens for which products take as long to compute as to read weights, as a
    power of two within `max_step_tokens`: on an H100 1,024 in bfloat16, 512 with weights in 8 bits or fewer, and more
    for a mixture of experts. `pilotfish plan` prints it. `pilotfish simulate step --prompts` predicts for an 8B model
    beside 32 sequences that a token then waits 50 ms and a prompt of 16,384 tokens takes 0.79 s. With 256, about where
    computing takes longer than reading, these are 18 ms and 1.18 s; with 2,048 they are 92 ms and 0.74 s."""
    max_waiting: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Most waiting requests; further ones are refused as overloaded (HTTP 429, RESOURCE_EXHAUSTED)."""
    policy: Literal["fair", "priority"] = "fair"
    """Who starts next: `fair` lets clients take turns; `priority` serves requests with the lowest `priority` first."""


class LimitsSection(Section):
    """Bounds on requests, over HTTP and gRPC alike."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * MIB
    """Largest HTTP body and gRPC message, in bytes."""
    max_output_tokens: Positive | None = None
    """Largest `max_tokens` of a request; unset: the context of the model."""
    max_stop_strings: Annotated[int, Field(ge=0)] = 16
    """Most stop strings in one request; OpenAI's own bound is 4."""
    max_stop_string_chars: Positive = 256
    """Longest stop string, in characters."""
    max_stop_token_ids: Annotated[int, Field(ge=0, le=1024)] = 64
    """Most stop token ids in one request."""
    max_logprobs: Annotated[int, Field(ge=0, le=20)] = 20
    """Most alternatives with log-probabilities for each token."""
    max_logit_bias: Annotated[int, Field(ge=0, le=1024)] = 1024
    """Most tokens with a logit bias in one request."""
    max_prediction_tokens: Annotated[int, Field(ge=0, le=65536)] = 8192
    """Most tokens of a request's `prediction`."""
    max_prompts: Positive = 64
    """Most prompts in one completions request."""
    max_n: Annotated[int, Field(ge=1, le=128)] = 16
    """Most sequences for one prompt: the bound of `n`, `best_of` and the beam width."""
    max_messages: Positive = 1024
    """Most messages in one chat request."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What happens to fields of HTTP bodies that neither OpenAI nor vLLM has: `ignore` names them in the header
    `x-ignored-fields`; `refuse` refuses the request."""
    max_timeout_seconds: Seconds = 3600.0
    """Longest timeout of a request, in seconds; it is also the default."""


class Configuration(Section):
    """All settings."""

    target: TargetSection = TargetSection()
    """The target model."""
    draft: DraftSection = DraftSection()
    """Drafting."""
    scheduler: SchedulerSection = SchedulerSection()
    """Bounds of one step and of the waiting queue."""
    limits: LimitsSection = LimitsSection()
    """Bounds on requests."""
    server: ServerSection = ServerSection()
    """Addresses and lifetime of the public APIs."""
    cluster: ClusterSection = ClusterSection()
    """The traffic inside the cluster."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level of messages that are logged."""
