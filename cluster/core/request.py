"""What a client asks for and what it receives: requests, parameters, commits, usage.

Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.core.ids import RequestId


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the target's distribution at a position becomes one token.

    Applied in this order: penalties and bias, temperature, top-k, top-p, min-p. The result depends
    on nothing but the model, the tokens before the position, these values and the seed.
    """

    temperature: float = 1.0
    """0 takes the most probable token; otherwise logits are divided by it. Bound: 0 to 2."""
    top_k: int = 0
    """Keep the `top_k` most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches `top_p`; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less probable than `min_p` times the most probable one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or answer; in (0, 2]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens seen in the answer; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the answer; in [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, added logit) pairs; values in [-100, 100]."""
    seed: int = 0
    """Unsigned 64-bit; the noise at a position is a pure function of it, the position and the token."""
    logprobs: int | None = None
    """How many most probable tokens to report beside the chosen one; `None` reports nothing."""


@dataclass(frozen=True, slots=True)
class StoppingCriteria:
    """When an answer ends."""

    max_tokens: int = 16
    """Most tokens the answer may have; at least 1."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; the model's end-of-sequence tokens are among them unless ignored."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the answer, wherever they fall across tokens; cut from the text."""


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """What a worker must know once per sequence; rides on the sequence's first row."""

    prompt_len: int
    """How many of the first tokens are the prompt (penalties count the answer alone)."""
    sampling: SamplingParameters
    cache_salt: str = ""
    """Only sequences of one salt share stored keys and values: tenants cannot probe each other's prompts."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural) at one position, of the model's own distribution before warping."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob), most probable first."""


class EarlyStopping(Enum):
    """When a beam search ends, once it has as many finished answers as beams."""

    YES = "yes"
    """At once."""
    NO = "no"
    """When the best running beam, at its present length, scores no better than the worst finished answer."""
    NEVER = "never"
    """When no running beam can ever score better than the worst finished answer."""


@dataclass(frozen=True, slots=True)
class BeamParameters:
    """Beam search: the `width` most probable continuations are followed side by side."""

    width: int
    """At least 2."""
    length_penalty: float = 1.0
    """A finished answer scores its summed log-probability ÷ (its tokens ** length_penalty)."""
    early_stopping: EarlyStopping = EarlyStopping.NO


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as the coordinator admits it: validated and tokenized."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingCriteria = field(default_factory=StoppingCriteria)
    deadline: float | None = None
    """On the coordinator's monotonic clock, in seconds; `None` never passes."""
    cache_salt: str = ""
    """See `SequenceStart`."""
    n: int = 1
    """Answers to the one prompt. The seed of answer `i` is the request's plus `i`, modulo 2**64."""
    beam: BeamParameters | None = None
    """Set: the `n` best answers of a beam search (`n` at most its width), instead of samples."""
    max_draft_tokens: int | None = None
    """Most nodes of a tree of guesses; 0 turns speculation off for this request, `None` leaves it to the server."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer cost."""

    prompt_tokens: int
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Tokens of the answer that a drafter wrote first."""
    target_steps: int = 0
    """Verdicts that decided tokens: `completion_tokens / target_steps` is the mean committed length."""

    @property
    def rejected_tokens(self) -> int:
        return self.drafted_tokens - self.accepted_tokens


@dataclass(frozen=True, slots=True)
class Commit:
    """What one verdict added to one answer; the unit of emission."""

    tokens: tuple[int, ...]
    accepted: int
    """How many of the leading `tokens` a drafter wrote first (the rest are the target's own)."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    """Set with `finish`."""
    drafted: int = 0
    """Nodes in the tree that was verified for it: whoever ends an answer early still knows its cost."""
    index: int = 0
    """Which of the request's `n` answers it belongs to; each has one commit with `finish`."""
