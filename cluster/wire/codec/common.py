"""Conversion between protobuf and types, for messages that several services use. Decoding checks every bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from cluster.core import bounds
from cluster.core.drafting import RowFault, RowFaultCode
from cluster.core.errors import InvalidRequest
from cluster.core.ids import CacheSalt, SequenceId
from cluster.core.request import (
    BeamScoring,
    EarlyStopping,
    SamplingParameters,
    SequenceStart,
    ThinkingBudget,
    TokenLogprobs,
)
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.wire.codec.grammar import decode_grammar, encode_grammar
from pilotfish.v1 import common_pb2 as pb
from pilotfish.v1 import generation_pb2

_FAULTS = {
    pb.ROW_FAULT_CODE_OUT_OF_SYNC: RowFaultCode.OUT_OF_SYNC,
    pb.ROW_FAULT_CODE_KV_EXHAUSTED: RowFaultCode.KV_EXHAUSTED,
    pb.ROW_FAULT_CODE_INVALID: RowFaultCode.INVALID,
    pb.ROW_FAULT_CODE_NOT_READY: RowFaultCode.NOT_READY,
}
_FAULT_NUMBERS = {code: number for number, code in _FAULTS.items()}


def encode_sampling(sampling: SamplingParameters) -> pb.SamplingParameters:
    """Encode the sampling parameters that clients may set. All fields are set, so workers need no defaults.

    `encode_start` encodes `end_token_ids` and `min_tokens`, which follow from the stopping criteria.
    """
    return pb.SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[pb.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[pb.TokenIds(ids=word) for word in sampling.bad_words],
        bad_texts=sampling.bad_texts,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        logprob_token_ids=sampling.logprob_token_ids,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=None if sampling.grammar is None else encode_grammar(sampling.grammar),
        thinking=None if sampling.thinking is None else _encode_thinking(sampling.thinking),
    )


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Bounds of sampling parameters that depend on who receives them. The defaults hold between workers."""

    max_logprobs: int = bounds.MAX_LOGPROBS
    max_logit_bias: int = bounds.MAX_LOGIT_BIAS
    vocabulary_size: int = bounds.MAX_TOKEN_ID + 1


_WORKER_LIMITS = SamplingLimits()


def decode_sampling(
    message: pb.SamplingParameters, prefix: str = "", limits: SamplingLimits = _WORKER_LIMITS
) -> SamplingParameters:
    """Check and convert sampling parameters; unset fields take their defaults, and the seed is then 0.

    `prefix` is put before the name of the field in an error. Raises `InvalidRequest`.
    """
    default = SamplingParameters()

    def number(name: str, least: float, most: float, *, above: bool = False) -> float:
        if not message.HasField(name):  # type: ignore[arg-type]
            return float(getattr(default, name))
        return bounds.number(f"{prefix}{name}", getattr(message, name), least, most, above=above)

    return SamplingParameters(
        temperature=number("temperature", 0.0, bounds.MAX_TEMPERATURE),
        top_k=bounds.integer(f"{prefix}top_k", message.top_k, 0, bounds.MAX_TOP_K),
        top_p=number("top_p", 0.0, 1.0, above=True),
        min_p=number("min_p", 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 0.0, bounds.MAX_REPETITION_PENALTY, above=True),
        presence_penalty=number("presence_penalty", -bounds.MAX_PENALTY, bounds.MAX_PENALTY),
        frequency_penalty=number("frequency_penalty", -bounds.MAX_PENALTY, bounds.MAX_PENALTY),
        logit_bias=_decode_logit_bias(message.logit_bias, f"{prefix}logit_bias", limits),
        seed=message.seed,
        logprobs=bounds.integer(f"{prefix}logprobs", message.logprobs, 0, limits.max_logprobs)
        if message.HasField("logprobs")
        else None,
        allowed_token_ids=bounds.tokens(
            f"{prefix}allowed_token_ids",
            message.allowed_token_ids,
            0,
            bounds.MAX_ALLOWED_TOKENS,
            limits.vocabulary_size,
        ),
        bad_words=decode_words(message.bad_words, f"{prefix}bad_words", limits.vocabulary_size),
        bad_texts=decode_texts(message.bad_texts, f"{prefix}bad_texts"),
        no_repeat_ngram_size=bounds.integer(
            f"{prefix}no_repeat_ngram_size", message.no_repeat_ngram_size, 0, bounds.MAX_NO_REPEAT_NGRAM
        ),
        logprob_token_ids=bounds.tokens(
            f"{prefix}logprob_token_ids",
            message.logprob_token_ids,
            0,
            bounds.MAX_LOGPROBS,
            limits.vocabulary_size,
        ),
        prompt_logprobs=bounds.integer(f"{prefix}prompt_logprobs", message.prompt_logprobs, 0, limits.max_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
        grammar=decode_grammar(message.grammar, f"{prefix}grammar") if message.HasField("grammar") else None,
        thinking=_decode_thinking(message.thinking, f"{prefix}thinking", limits)
        if message.HasField("thinking")
        else None,
    )


def _encode_thinking(thinking: ThinkingBudget) -> pb.ThinkingBudget:
    return pb.ThinkingBudget(max_tokens=thinking.max_tokens, start_token_ids=thinking.start, end_token_ids=thinking.end)


def _decode_thinking(message: pb.ThinkingBudget, field: str, limits: SamplingLimits) -> ThinkingBudget:
    def marker(name: str, tokens: Sequence[int]) -> tuple[int, ...]:
        return bounds.tokens(f"{field}.{name}", tokens, 0, bounds.MAX_THINK_MARKER, limits.vocabulary_size)

    return ThinkingBudget(
        bounds.integer(f"{field}.max_tokens", message.max_tokens, 0, bounds.MAX_TOKENS),
        marker("start_token_ids", message.start_token_ids),
        marker("end_token_ids", message.end_token_ids),
    )


def decode_texts(texts: Sequence[str], field: str) -> tuple[str, ...]:
    """Check texts that an answer must not contain. Raises `InvalidRequest`."""
    bounds.count(field, texts, 0, bounds.MAX_BAD_TEXTS, "texts")
    for text in texts:
        if not text.strip() or len(text) > bounds.MAX_BAD_TEXT_CHARS:
            bound = f"between 1 and {bounds.MAX_BAD_TEXT_CHARS} characters, not all spaces"
            raise InvalidRequest(field, text, bound)
    return tuple(texts)


def decode_words(words: Sequence[pb.TokenIds], field: str, vocabulary_size: int) -> tuple[tuple[int, ...], ...]:
    """Decode token sequences that an answer never contains. Raises `InvalidRequest`."""
    bounds.count(field, words, 0, bounds.MAX_BAD_WORDS)
    return tuple(
        bounds.tokens(f"{field}[{index}]", word.ids, 1, bounds.MAX_BAD_WORD_TOKENS, vocabulary_size)
        for index, word in enumerate(words)
    )


def _decode_logit_bias(
    entries: Sequence[pb.LogitBias], field: str, limits: SamplingLimits
) -> tuple[tuple[int, float], ...]:
    """Decode logit biases. Errors name the token, not its position, because JSON clients send a mapping."""
    bounds.count(field, entries, 0, limits.max_logit_bias)
    biases: dict[int, float] = {}
    for entry in entries:
        bounds.integer(field, entry.token_id, 0, limits.vocabulary_size - 1)
        if entry.token_id in biases:
            raise InvalidRequest(field, entry.token_id, "each token at most once")
        biases[entry.token_id] = bounds.number(
            f"{field}[{entry.token_id}]", entry.bias, -bounds.MAX_BIAS, bounds.MAX_BIAS
        )
    return tuple(biases.items())


def encode_start(start: SequenceStart) -> pb.SequenceStart:
    """Encode the parameters of a sequence."""
    return pb.SequenceStart(
        prompt_len=start.prompt_len,
        sampling=encode_sampling(start.sampling),
        cache_salt=start.cache_salt,
        end_token_ids=start.sampling.end_token_ids,
        min_tokens=start.sampling.min_tokens,
        prediction=start.prediction,
        source=start.source,
        allows_learning=start.allows_learning,
    )


def decode_start(message: pb.SequenceStart, field: str) -> SequenceStart:
    """Decode the parameters of a sequence. Raises `InvalidRequest`."""
    sampling = decode_sampling(message.sampling, f"{field}.sampling.")
    ends = bounds.tokens(f"{field}.end_token_ids", message.end_token_ids, 0, bounds.MAX_END_TOKENS)
    min_tokens = bounds.integer(f"{field}.min_tokens", message.min_tokens, 0, bounds.MAX_TOKENS)
    return SequenceStart(
        prompt_len=bounds.integer(f"{field}.prompt_len", message.prompt_len, 1, bounds.MAX_TOKENS),
        sampling=replace(sampling, end_token_ids=ends, min_tokens=min_tokens),
        cache_salt=CacheSalt(bounds.text(f"{field}.cache_salt", message.cache_salt, bounds.MAX_SCOPED_SALT_BYTES)),
        prediction=bounds.tokens(f"{field}.prediction", message.prediction, 0, bounds.MAX_PREDICTION_TOKENS),
        source=bounds.tokens(f"{field}.source", message.source, 0, bounds.MAX_SOURCE_TOKENS),
        allows_learning=message.allows_learning,
    )


def encode_tree(tree: TokenTree) -> pb.TokenTree:
    """Encode a token tree."""
    return pb.TokenTree(tokens=tree.tokens, parents=tree.parents)


def decode_tree(message: pb.TokenTree, field: str) -> TokenTree:
    """Decode a token tree. Check its size, depth, order of parents and siblings. Raises `InvalidRequest`."""
    if not message.tokens and not message.parents:
        return EMPTY_TREE
    tokens = bounds.tokens(f"{field}.tokens", message.tokens, 0, bounds.MAX_TREE_NODES)
    bounds.count(f"{field}.parents", message.parents, len(tokens), len(tokens))
    return to_tree(tokens, tuple(message.parents), field)


def to_tree(tokens: tuple[int, ...], parents: tuple[int, ...], field: str) -> TokenTree:
    """Return the tree of as many tokens and parents. Check its depth, order of parents and siblings.

    Raises `InvalidRequest`.
    """
    try:
        tree = TokenTree(tokens, parents)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}.{error.field.removeprefix('tree.')}", error.value, error.bound) from None
    if len(tokens) > bounds.MAX_TREE_DEPTH and tree.depth() > bounds.MAX_TREE_DEPTH:
        raise InvalidRequest(f"{field}.parents", f"depth {tree.depth()}", f"at most {bounds.MAX_TREE_DEPTH} deep")
    return tree


def encode_fault(fault: RowFault) -> pb.RowFault:
    """Encode a fault. Its message is cut to the bound of the receiver."""
    text = fault.message.encode()[: bounds.MAX_FAULT_BYTES].decode(errors="ignore")
    return pb.RowFault(code=_FAULT_NUMBERS[fault.code], message=text, stored_len=fault.stored_len)


def decode_fault(message: pb.RowFault, field: str) -> RowFault:
    """Decode a fault. Raises `InvalidRequest`."""
    code = _FAULTS.get(message.code)
    if code is None:
        raise InvalidRequest(f"{field}.code", message.code, f"one of {sorted(_FAULTS)}")
    bounds.count(f"{field}.message", message.message.encode(), 0, bounds.MAX_FAULT_BYTES)
    stored = bounds.integer(f"{field}.stored_len", message.stored_len, 0, bounds.MAX_TOKENS)
    return RowFault(code, message.message, stored)


def encode_logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """Encode the log-probabilities at one position."""
    return pb.TokenLogprobs(
        token_id=logprobs.token,
        logprob=logprobs.logprob,
        top=[pb.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
        rank=logprobs.rank,
    )


def decode_logprobs(message: pb.TokenLogprobs, field: str = "logprobs") -> TokenLogprobs:
    """Decode the log-probabilities at one position. Raises `InvalidRequest`."""
    bounds.count(f"{field}.top", message.top, 0, bounds.MAX_LOGPROBS)
    return TokenLogprobs(
        token=bounds.integer(f"{field}.token_id", message.token_id, 0, bounds.MAX_TOKEN_ID),
        logprob=_logprob(f"{field}.logprob", message.logprob),
        top=tuple(
            (
                bounds.integer(f"{field}.top[{index}].token_id", entry.token_id, 0, bounds.MAX_TOKEN_ID),
                _logprob(f"{field}.top[{index}].logprob", entry.logprob),
            )
            for index, entry in enumerate(message.top)
        ),
        rank=bounds.integer(f"{field}.rank", message.rank, 0, bounds.MAX_TOKEN_ID),
    )


def _logprob(field: str, value: float) -> float:
    return bounds.number(field, value, bounds.MIN_LOGPROB, 0.0)


def decode_client(client: str) -> str:
    """Return the prefix that a worker puts before a client's sequence ids, so that no other client has the same ids.

    Raises `InvalidRequest`.
    """
    return f"{bounds.client(client)}/"


def decode_id(field: str, value: str, prefix: str = "") -> SequenceId:
    """Decode a sequence id and put the client's prefix before it. Raises `InvalidRequest`."""
    return SequenceId(bounds.identifier(field, prefix + value if value else value))


def decode_sequence_ids(values: Sequence[str], prefix: str = "") -> tuple[SequenceId, ...]:
    """Decode sequence ids and put the client's prefix before each. Raises `InvalidRequest`."""
    bounds.count("sequence_ids", values, 0, bounds.MAX_ROWS)
    named = [prefix + value if value else value for value in values] if prefix else values
    return cast("tuple[SequenceId, ...]", bounds.identifiers("sequence_ids", named))


_DECODED_STOPPING = {
    generation_pb2.EARLY_STOPPING_NO: EarlyStopping.NO,
    generation_pb2.EARLY_STOPPING_YES: EarlyStopping.YES,
    generation_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
_ENCODED_STOPPING = {decoded: encoded for encoded, decoded in _DECODED_STOPPING.items()}


def encode_beam_search(scoring: BeamScoring) -> generation_pb2.BeamSearch:
    """Encode how a beam search scores and ends."""
    return generation_pb2.BeamSearch(
        length_penalty=scoring.length_penalty, early_stopping=_ENCODED_STOPPING[scoring.early_stopping]
    )


def decode_beam_search(message: generation_pb2.BeamSearch, default: BeamScoring) -> BeamScoring:
    """Decode how a beam search scores and ends; unset fields are those of `default`. Raises `InvalidRequest`."""
    penalty = message.length_penalty if message.HasField("length_penalty") else default.length_penalty
    ending = message.early_stopping
    if ending != generation_pb2.EARLY_STOPPING_UNSPECIFIED and ending not in _DECODED_STOPPING:
        raise InvalidRequest("early_stopping", ending, "true, false or never")
    return BeamScoring(
        bounds.number("length_penalty", penalty, -bounds.MAX_LENGTH_PENALTY, bounds.MAX_LENGTH_PENALTY),
        _DECODED_STOPPING.get(ending, default.early_stopping),
    )
