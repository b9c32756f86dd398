"""The events of a request that a client reads: started once, then deltas and an end for each answer."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import RequestId
from cluster.core.request import FinishReason, TokenLogprobs, Usage
from cluster.ingress.text.prompts import TEXT_ONLY, AnswerFormat


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


Event = Started | Delta | Finished
