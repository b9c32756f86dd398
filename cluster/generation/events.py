"""The events of a request that a client reads: started once, then deltas and an end for each answer."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.answer_format import TEXT_ONLY, AnswerFormat
from cluster.core.draft_origin import DraftOrigin
from cluster.core.ids import RequestId
from cluster.core.request import FinishReason, TokenLogprobs, Usage
from cluster.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted."""

    request_id: RequestId
    model: str
    seed: int
    """The seed in force. Sending it again gives the same answer."""
    prompt_tokens: int
    prompt: tuple[int, ...] = ()
    """The tokens of the prompt, if requested."""
    answer_format: AnswerFormat = TEXT_ONLY
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens after the first, if requested."""
    queue_seconds: float | None = None
    """How long the request waited before it ran, in seconds."""
    fingerprint: str = ""
    """A name of what answers depend on: weights, number format, kernels, ranks and lossy settings."""


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """How the tokens of one commit were drafted."""

    tree: TokenTree
    """The verified tree. Its root is the token before the commit."""
    accepted: tuple[int, ...]
    """The accepted nodes, from the root on."""
    texts: tuple[str, ...]
    """The text that became complete with each committed token. Together they are the text of the delta."""
    origins: tuple[DraftOrigin, ...] = ()
    """Where each node of the tree comes from."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The text and tokens that one commit added to an answer."""

    text: str
    """Text that cannot change any more. It may lag behind `tokens`; all texts together are the answer."""
    tokens: tuple[int, ...]
    accepted: int
    """How many of the leading `tokens` are accepted draft tokens."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    """Number of the answer, from 0."""
    drafted: int = 0
    """Number of draft tokens that were verified to commit `tokens`."""
    draft: VerifiedDraft | None = None
    """How `tokens` were drafted, if requested."""
    origins: tuple[DraftOrigin, ...] = ()
    """Where each accepted draft token comes from."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: the reason and the usage."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    """The stop string that ended the answer, if one did."""
    stop_token: int | None = None
    """The stop token that ended the answer, if one did."""
    index: int = 0
    """Number of the answer, from 0."""
    accepted_prediction: int | None = None
    """Number of tokens of the client's prediction that are in the answer; `None` without a prediction."""
    rejected_prediction: int | None = None
    """Number of tokens of the client's prediction that are not in the answer; `None` without a prediction."""
    seed: int = 0
    """The seed of the answer. A request for one answer with this seed gives the same answer. 0 of a beam search."""
    reduced_max_tokens: int | None = None
    """Most tokens that the answer could have, if there was no room for the `max_tokens` of the request."""


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, as clients see it."""

    name: str
    root: str
    """The first name, which its answers have."""
    created: int
    """Time of loading, in seconds since the epoch."""
    max_context_len: int
    vocabulary_size: int
    draft_method: str
    is_lossless: bool
    """Whether answers are exactly those of the model alone."""
    max_source_len: int = 0
    """Longest source of an encoder-decoder model, in tokens; 0 for other models."""
    shares_between_keys: bool = False
    """Whether requests with different API keys share the prefix cache, and drafts from earlier texts."""
    dequantized_from: str = ""
    """What the weights were before they were de-quantized, as `GGUF Q4_1`; empty if they are as published."""
