"""A client's request and what it receives: parameters, commits, usage.

Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from cluster.core.answer_format import ReasoningFormat
from cluster.core.draft_origin import NO_ORIGINS, DraftOrigin, OriginCounts
from cluster.core.grammar import Grammar
from cluster.core.ids import NO_SALT, CacheSalt, RequestId
from cluster.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Bounds what a model thinks before it answers: once the budget is spent, the end of its thinking is forced."""

    max_tokens: int
    """Most tokens that the model thinks."""
    start: tuple[int, ...] = ()
    """The tokens that begin its thinking, at the beginning of the answer; empty if the prompt ends with them."""
    end: tuple[int, ...] = ()
    """The tokens that end its thinking; where there are none, nothing is forced."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How a token is sampled from the target's distribution at a position.

    The order is: penalties and bias, excluded tokens and the grammar, the forced end of thinking, temperature, top-k,
    top-p, min-p. The token depends only on the model, the tokens before the position, these parameters and the seed.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most probable token. Bound: 0 to 1e6."""
    top_k: int = 0
    """Keep the `top_k` most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches `top_p`; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less probable than `min_p` times the most probable one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or answer; in (0, 1e6]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens seen in the answer; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the answer; in [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, added logit) pairs; values in [-100, 100]."""
    seed: int = 0
    """Unsigned, 64 bits. The noise is a pure function of the seed, the position and the token."""
    logprobs: int | None = None
    """Number of most probable tokens to report beside the sampled one; `None` reports nothing."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer. Draft tokens after one of them are not accepted."""
    min_tokens: int = 0
    """No token of `end_token_ids` is sampled before the answer has this many tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens are sampled; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer never contains: where all but the last token precede, the last is not sampled."""
    bad_texts: tuple[str, ...] = ()
    """Texts that no word of the answer begins with, however they are spelled by tokens."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens occurs twice in prompt and answer; 0 allows repetition."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported instead of those of the most probable ones, if `logprobs` is set."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens to report beside each prompt token; `None` reports nothing of the prompt."""
    grammar: Grammar | None = None
    """What the answer matches: only tokens that continue it are sampled, and where it is complete the answer ends."""
    thinking: ThinkingBudget | None = None
    """How much the model may think; `None` leaves it unbounded. Not with a grammar."""

    def repeated_ngram_ends(self, tokens: Sequence[int]) -> frozenset[int]:
        """Tokens that, after prompt and answer so far, would repeat a sequence of `no_repeat_ngram_size` tokens."""
        size = self.no_repeat_ngram_size
        if not size or len(tokens) < size:
            return frozenset()
        before = size - 1
        last, starts = tokens[len(tokens) - before :], range(len(tokens) - before)
        return frozenset(tokens[start + before] for start in starts if tokens[start : start + before] == last)


@dataclass(frozen=True, slots=True)
class StoppingCriteria:
    """When an answer ends."""

    max_tokens: int = 16
    """Most tokens the answer may have; at least 1."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; the model's end-of-sequence tokens are among them unless ignored."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the answer, also across tokens."""
    forced_eos_token_id: int | None = None
    """The last token of an answer that reaches `max_tokens`, whatever the model decides there; `None` forces none."""

    def finish_after(self, token: int, count: int) -> FinishReason | None:
        """Return why an answer ends whose token number `count` is `token`, stop strings aside; `None` if it goes on.

        The token that is forced at `max_tokens` ends it by its length, also where the model decides the same: the
        tokens alone say why an answer has ended, so that a resumed one ends for the same reason.
        """
        is_last = count >= self.max_tokens
        if token in self.stop_token_ids and not (is_last and token == self.forced_eos_token_id):
            return FinishReason.STOP
        return FinishReason.LENGTH if is_last else None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the tokens of an answer become its text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop: bool = False
    """Keep the stop string, or the text of the stop token, in the text."""
    kept_special_ids: tuple[int, ...] = ()
    """Special tokens that stay in the text all the same, because they mark calls of tools or reasoning."""
    reasoning: ReasoningFormat | None = None
    """How the model writes what it thinks; `None` for an answer without such a part."""
    begins_in_reasoning: bool = False
    """Whether the answer begins with what the model thinks, without a marker."""


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """The parameters of a sequence. Only the first row of the sequence on a worker contains them."""

    prompt_len: int
    """Number of prompt tokens at the start. Presence and frequency penalties count only the tokens after the prompt."""
    sampling: SamplingParameters
    cache_salt: CacheSalt = NO_SALT
    """Only sequences with the same salt share KV blocks and drafts, so tenants cannot detect each other's prompts."""
    prediction: tuple[int, ...] = ()
    """The answer that the client expects. Drafts may be taken from it; the answer does not depend on it."""
    source: tuple[int, ...] = ()
    """Tokens that the encoder of an encoder-decoder model reads; empty for a decoder-only model. The prompt is then the
    decoder's start, `TargetInfo.decoder_start`."""
    allows_learning: bool = False
    """Whether drafters may be trained on the tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the model's distribution before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob), most probable first."""
    rank: int = 0
    """The rank of `token` among all tokens, from 1; of equally probable ones, the lower id comes first. 0: unknown."""


class EarlyStopping(Enum):
    """When a beam search ends, once it has as many finished answers as beams."""

    YES = "yes"
    """End at once."""
    NO = "no"
    """End when the best running beam, at its current length, scores no better than the worst finished answer."""
    NEVER = "never"
    """End when no running beam can ever score better than the worst finished answer."""


@dataclass(frozen=True, slots=True)
class BeamScoring:
    """How a beam search scores its answers and when it ends."""

    length_penalty: float = 1.0
    """The score of a finished answer is its summed log-probability ÷ (its tokens ** length_penalty)."""
    early_stopping: EarlyStopping = EarlyStopping.NO


USUAL_SCORING = BeamScoring()
"""The length penalty of a beam search that neither its request nor the model sets."""


@dataclass(frozen=True, slots=True)
class BeamParameters:
    """Beam search, which follows the `width` most probable continuations in parallel. See `BeamScoring`."""

    width: int
    """Number of beams; at least 2."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.NO


_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """What was generated of one answer before its request was sent again. The answer continues after it."""

    tokens: tuple[int, ...] = ()
    is_finished: bool = False
    """Whether nothing more of the answer is generated."""
    drafted_tokens: int = 0
    """Draft tokens that were verified for `tokens`."""
    accepted_tokens: int = 0
    """How many of `tokens` were accepted draft tokens."""
    target_steps: int = 0
    """Number of verdicts that decided `tokens`."""
    accepted_by_origin: OriginCounts = NO_ORIGINS
    """Where the accepted draft tokens among `tokens` came from."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as the coordinator admits it: validated and tokenized."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingCriteria = field(default_factory=StoppingCriteria)
    deadline: float | None = None
    """Time on the coordinator's monotonic clock, in seconds; `None` means no deadline."""
    cache_salt: CacheSalt = NO_SALT
    """Only sequences with the same salt share KV blocks and drafts."""
    n: int = 1
    """Number of answers. The seed of answer `i` is the seed of the request plus `i`, modulo 2**64."""
    beam: BeamParameters | None = None
    """Parameters of a beam search, whose `n` best beams are the answers; `n` is at most its width. `None` samples."""
    max_draft_tokens: int | None = None
    """Most nodes of a draft tree; 0 turns speculation off for this request, `None` takes the server's bound."""
    prediction: tuple[int, ...] = ()
    """The answer that the client expects. Drafts may be taken from it; the answer does not depend on it."""
    source: tuple[int, ...] = ()
    """Tokens that the encoder of an encoder-decoder model reads; empty for a decoder-only model."""
    resumed: tuple[GeneratedPart, ...] = ()
    """What was generated before: one entry per answer, or none for a new request. Not for beam search."""
    client: str = ""
    """The name of the caller's API key; empty where no keys are demanded. It is a part of `request_id`."""
    text: TextOptions = field(default_factory=TextOptions)
    traceparent: str = ""
    """The span that the request belongs to, in W3C's form; empty if there is none."""
    returns_drafts: bool = False
    """Whether commits have their draft trees. The answer does not depend on it."""
    streams: bool = True
    """Whether the caller reads each commit as it comes. Otherwise commits may wait for later ones."""
    priority: int = 0
    """Requests with a lower priority start earlier."""
    allows_learning: bool = False
    """Whether drafters may be trained on prompt and answer. The answer does not depend on it."""

    @property
    def input(self) -> tuple[int, ...]:
        """The tokens of what the client sent: the source for an encoder-decoder target, else the prompt."""
        return self.source or self.prompt

    @property
    def open_answers(self) -> tuple[int, ...]:
        """The indices of the answers that are to be generated, ascending."""
        return tuple(index for index in range(self.n) if not (self.resumed and self.resumed[index].is_finished))

    def seed_of(self, index: int) -> int:
        """Return the seed of answer `index`; 0 for a beam search, which draws nothing."""
        return 0 if self.beam is not None else (self.sampling.seed + index) % _SEEDS


@dataclass(frozen=True, slots=True)
class Usage:
    """Token and step counts of one answer."""

    prompt_tokens: int
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Tokens of the answer that are accepted draft tokens."""
    target_steps: int = 0
    """Number of verdicts that decided tokens. `completion_tokens / target_steps` is the mean tokens per step."""
    resumed_tokens: int = 0
    """Tokens of the answer that an earlier call generated, see `GenerationRequest.resumed`."""
    cached_tokens: int = 0
    """Tokens of the prompt whose KV was stored when the sequence began."""
    reasoning_tokens: int = 0
    """Tokens of the answer with which the model thinks, its markers included."""
    accepted_by_origin: OriginCounts = NO_ORIGINS
    """Where the accepted draft tokens come from."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the phases of an answer took, in seconds."""

    queue: float
    """From the request's arrival until it ran."""
    prefill: float
    """From then to the request's first tokens."""
    decode: float
    """From then to the end of the answer."""

    @property
    def total(self) -> float:
        """From the request's arrival to the end of the answer."""
        return self.queue + self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Commit:
    """The tokens that one verdict added to one answer."""

    tokens: tuple[int, ...]
    accepted: int
    """How many of the leading `tokens` are accepted draft tokens. The rest are the target's own."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    """Usage of the answer; set exactly when `finish` is set."""
    drafted: int = 0
    """Number of nodes in the verified draft tree. The usage of an answer that a stop string ends sums them."""
    index: int = 0
    """Number of the answer, from 0. Each of the `n` answers has one commit with `finish`."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If requested, one entry per token of the prompt apart from the first, in the first commit of one answer."""
    cached_tokens: int = 0
    """Tokens of the prompt whose KV was stored when the sequence began. Needed when a stop string ends the answer."""
    queue_seconds: float | None = field(default=None, compare=False)
    """How long the request waited before it ran, in seconds; set in the first commit of a request."""
    tree: TokenTree = EMPTY_TREE
    """The verified draft tree, if requested. It grew from the token before `tokens`."""
    tree_origins: tuple[DraftOrigin, ...] = ()
    """Where each node of `tree` comes from."""
    origins: tuple[DraftOrigin, ...] = ()
    """Where each of the accepted draft tokens comes from."""
