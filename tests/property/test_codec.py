"""The codec: values within bounds survive encoding and decoding, and everything else is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.drafting import DraftBudget, DraftRow, ListedTokens, NextTokens, Proposal
from cluster.core.errors import InvalidRequest
from cluster.core.grammar import Grammar, GrammarKind
from cluster.core.kv import KvGroup, KvLayout, KvOccupancy
from cluster.core.request import (
    BeamScoring,
    EarlyStopping,
    SamplingParameters,
    SequenceStart,
    ThinkingBudget,
    TokenLogprobs,
)
from cluster.core.tree import TokenTree
from cluster.core.verification import (
    LearningStatus,
    OpenResult,
    OpenRow,
    StepBatch,
    StepResult,
    StepSample,
    TargetInfo,
    Verdict,
    VerifyRow,
)
from cluster.wire.codec.draft import (
    decode_draft_rows,
    decode_learned,
    decode_proposals,
    encode_draft_rows,
    encode_proposals,
)
from cluster.wire.codec.opening import decode_open_result, encode_open_result, open_rows_from_bytes, open_rows_to_bytes
from cluster.wire.codec.step import decode_step_result, encode_step_result, step_batch_from_bytes, step_batch_to_bytes
from cluster.wire.codec.target_info import decode_target_info, encode_target_info
from pilotfish.v1 import draft_pb2, target_pb2
from tests.property.proposal_strategies import (
    all_fields,
    distributions,
    evidences,
    faults,
    names,
    proposals,
    tokens,
    trees,
)

logprobs = st.floats(-1e4, 0.0)


def real(least: float, most: float, **options: Any) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_nan=False, **options)


def built(kind: type[Any], /, **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a dataclass, with a strategy for each of its fields that is sent."""
    return st.builds(kind, **all_fields(kind, **parts))


few_tokens = st.lists(tokens, max_size=3).map(tuple)
words = st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple)
grammars = st.one_of(
    st.just(Grammar(GrammarKind.JSON_OBJECT)),
    st.builds(Grammar.of_schema, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)),
    st.builds(Grammar.of_choices, st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3)),
    st.builds(Grammar, st.sampled_from([GrammarKind.REGEX, GrammarKind.GRAMMAR]), st.text(min_size=1, max_size=9)),
)
samplings = built(
    SamplingParameters,
    temperature=real(0, 2),
    top_k=st.integers(0, 2**20),
    top_p=real(0, 1, exclude_min=True),
    min_p=real(0, 1),
    repetition_penalty=real(0, 2, exclude_min=True),
    presence_penalty=real(-2, 2),
    frequency_penalty=real(-2, 2),
    logit_bias=st.lists(st.tuples(tokens, real(-100, 100)), max_size=4, unique_by=lambda pair: pair[0]).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 256),
    allowed_token_ids=few_tokens,
    bad_words=words,
    bad_texts=st.lists(st.text(min_size=1, max_size=3).filter(str.strip), max_size=2).map(tuple),
    no_repeat_ngram_size=st.integers(0, 1024),
    logprob_token_ids=few_tokens,
    prompt_logprobs=st.none() | st.integers(0, 256),
    grammar=st.none() | grammars,
    thinking=st.none() | built(ThinkingBudget, max_tokens=st.integers(0, 2**20), start=few_tokens, end=few_tokens),
    end_token_ids=st.lists(tokens, max_size=4).map(tuple),
    min_tokens=st.integers(0, 2**20),
)
starts = built(
    SequenceStart,
    prompt_len=st.integers(1, 2**20),
    sampling=samplings,
    cache_salt=st.text(max_size=20),
    prediction=st.lists(tokens, max_size=8).map(tuple),
    source=few_tokens,
    allows_learning=st.booleans(),
)
budgets = built(DraftBudget, max_nodes=st.integers(0, 256), max_depth=st.integers(0, 64))


@st.composite
def listed_tokens(draw: st.DrawFn) -> ListedTokens:
    size = draw(st.integers(1, 2**20))
    found = sorted(draw(st.sets(st.integers(0, size - 1), max_size=8)))
    return ListedTokens(
        **all_fields(ListedTokens, vocabulary_size=size, tokens=tuple(found), are_allowed=draw(st.booleans()))
    )


@st.composite
def next_tokens(draw: st.DrawFn) -> NextTokens:
    """Forced tokens are within the vocabulary of the list, if there is one."""
    forced, listed = draw(few_tokens), draw(st.none() | listed_tokens())
    if listed is not None:
        forced = tuple(token % listed.vocabulary_size for token in forced)
    return NextTokens(forced, listed=listed)


@st.composite
def verify_rows(draw: st.DrawFn) -> VerifyRow:
    pending = tuple(draw(st.lists(tokens, min_size=1, max_size=8)))
    decide = draw(st.booleans())
    tree = draw(trees) if decide else TokenTree()
    return VerifyRow(
        **all_fields(
            VerifyRow,
            sequence_id=draw(names),
            base_len=len(pending) + draw(st.integers(0, 1000)),
            pending=pending,
            tree=tree,
            decide=decide,
            start=draw(st.none() | starts),
            distributions=tuple(draw(distributions()) for _ in tree.tokens) if draw(st.booleans()) else (),
            next_budget=draw(budgets),
            wants_following=draw(st.booleans()),
        )
    )


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    drafted, known = draw(st.integers(0, 10)), draw(next_tokens())
    decided = tuple(draw(st.lists(tokens, max_size=drafted + 1)))
    entries = built(
        TokenLogprobs,
        token=tokens,
        logprob=logprobs,
        top=st.lists(st.tuples(tokens, logprobs), max_size=4).map(tuple),
        rank=tokens,
    )
    return Verdict(
        **all_fields(
            Verdict,
            sequence_id=draw(names),
            base_len=draw(st.integers(1, 2**20)),
            tokens=decided,
            drafted=drafted,
            logprobs=tuple(draw(entries) for _ in decided) if draw(st.booleans()) else (),
            fault=draw(st.none() | faults),
            evidence=draw(st.none() | st.integers(1, 2**20).flatmap(evidences)),
            proposal=draw(st.none() | proposals()),
            prompt_logprobs=(draw(entries),) if draw(st.booleans()) else (),
            forced=known.forced,
            following=known.listed,
        )
    )


@st.composite
def draft_rows(draw: st.DrawFn) -> DraftRow:
    new = tuple(draw(st.lists(tokens, max_size=8)))
    start = draw(st.none() | starts)
    more = 0 if start is not None else draw(st.integers(0, 1000))
    if start is not None and not new:
        new = (draw(tokens),)
    base_len = max(1, len(new) + more)
    steps = sorted(draw(st.lists(st.integers(1, base_len), max_size=3)))
    return DraftRow(
        **all_fields(
            DraftRow,
            sequence_id=draw(names),
            base_len=base_len,
            new_tokens=new,
            budget=draw(budgets),
            start=start,
            evidence=tuple(draw(evidences(step)) for step in steps),
            next_tokens=draw(next_tokens()),
        )
    )


def distinct(rows: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(rows, max_size=4, unique_by=lambda row: row.sequence_id).map(tuple)


occupancies = st.integers(0, 2**31).flatmap(
    lambda total: built(
        KvOccupancy, blocks_total=st.just(total), blocks_free=st.integers(0, 100).map(lambda used: max(0, total - used))
    )
)
counts = st.integers(0, 2**31 - 1)
learning = built(
    LearningStatus,
    version=counts,
    clients=counts,
    texts=st.integers(0, 2**53),
    text_bytes=st.integers(0, 2**53),
    taken=counts,
    dropped=counts,
    failed=counts,
    tokens_per_step_before=real(0, 257),
    tokens_per_step=real(0, 257),
)
results = built(
    StepResult,
    verdicts=distinct(verdicts()),
    kv=occupancies,
    step_seconds=real(0, 100),
    draft_seconds=real(0, 1),
    learning=st.none() | learning,
)


groups = st.one_of(
    st.builds(KvGroup, tables=st.integers(1, 64)),
    built(KvGroup, tables=st.integers(1, 64), window=st.integers(2, 2**20), sinks=st.integers(0, 2**20)),
)
layouts = st.builds(KvLayout, st.integers(1, 256), st.lists(groups, min_size=1, max_size=4).map(tuple))
open_rows = built(
    OpenRow,
    sequence_id=names,
    tokens=st.lists(tokens, min_size=1, max_size=8).map(tuple),
    start=starts,
    parent=st.none() | names,
)
openings = built(OpenResult, stored_lens=st.lists(st.integers(0, 2**20), max_size=4).map(tuple), kv=occupancies)
step_samples = st.integers(1, 4096).flatmap(
    lambda rows: built(
        StepSample, rows=st.just(rows), tokens=st.integers(rows, 2**20), seconds=real(0, 3600, exclude_min=True)
    )
)
infos = built(
    TargetInfo,
    model=st.text(max_size=20),
    vocabulary_size=st.integers(1, 2**31 - 1),
    max_context_len=st.integers(1, 2**20),
    layout=layouts,
    kv=occupancies,
    eos_token_ids=st.lists(tokens, max_size=3).map(tuple),
    tensor_parallel=st.integers(1, 64),
    dtype=st.text(max_size=10),
    epoch=st.text(max_size=16),
    profile=st.lists(step_samples, max_size=3).map(tuple),
    is_lossless=st.booleans(),
    fingerprint=st.text(max_size=20),
    dequantized_from=st.text(max_size=20),
    decoder_start=st.lists(st.just(0), max_size=3).map(tuple),
    max_source_len=st.integers(0, 2**16),
    forced_eos_token_id=st.none() | st.just(0),
    bad_words=st.lists(st.lists(st.just(0), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    no_repeat_ngram_size=st.integers(0, 1024),
    min_tokens=st.integers(0, 2**20),
    beam_scoring=built(BeamScoring, length_penalty=st.floats(-10, 10), early_stopping=st.sampled_from(EarlyStopping)),
)
quick = settings(max_examples=80, deadline=None)


@quick
@given(distinct(verify_rows()).map(StepBatch))
def test_a_step_survives_encoding(batch: StepBatch) -> None:
    assert step_batch_from_bytes(step_batch_to_bytes(batch)) == batch


@quick
@given(results)
def test_verdicts_survive_encoding(result: StepResult) -> None:
    message = encode_step_result(result).SerializeToString()
    assert decode_step_result(target_pb2.TargetServiceStepResponse.FromString(message)) == result


@quick
@given(distinct(draft_rows()))
def test_draft_rows_survive_encoding(rows: tuple[DraftRow, ...]) -> None:
    message = encode_draft_rows(rows).SerializeToString()
    assert decode_draft_rows(draft_pb2.DraftServiceProposeRequest.FromString(message)) == rows


@quick
@given(distinct(proposals()), st.none() | learning)
def test_proposals_survive_encoding(rows: tuple[Proposal, ...], learned: LearningStatus | None) -> None:
    message = encode_proposals(rows, learning=learned).SerializeToString()
    decoded = draft_pb2.DraftServiceProposeResponse.FromString(message)
    assert (decode_proposals(decoded), decode_learned(decoded)) == (rows, learned)


@quick
@given(infos)
def test_a_targets_description_survives_encoding(info: TargetInfo) -> None:
    message = encode_target_info(info).SerializeToString()
    assert decode_target_info(target_pb2.TargetServiceGetInfoResponse.FromString(message)) == info


@quick
@given(distinct(open_rows))
def test_sequences_to_open_survive_encoding(rows: tuple[OpenRow, ...]) -> None:
    assert open_rows_from_bytes(open_rows_to_bytes(rows)) == rows


@quick
@given(openings)
def test_open_results_survive_encoding(result: OpenResult) -> None:
    message = encode_open_result(result).SerializeToString()
    assert decode_open_result(target_pb2.TargetServiceOpenResponse.FromString(message)) == result


def damaged(messages: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Valid messages with one byte replaced or the end cut off."""

    def replace(data: bytes, position: int, byte: int) -> bytes:
        return data[:position] + bytes([byte]) + data[position + 1 :]

    positions, values = st.integers(0, 200), st.integers(0, 255)
    return st.builds(replace, messages, positions, values) | st.builds(
        lambda data, end: data[:end], messages, positions
    )


def read(decode: Callable[[bytes], Any], data: bytes) -> tuple[Any, str | None]:
    """Return what was decoded, or the field that the error names."""
    try:
        return decode(data), None
    except InvalidRequest as error:
        return None, error.field


@quick
@given(st.binary(max_size=200) | damaged(distinct(verify_rows()).map(StepBatch).map(step_batch_to_bytes)))
def test_bytes_become_a_valid_step_or_an_error_that_names_a_field(data: bytes) -> None:
    batch, field = read(step_batch_from_bytes, data)
    if field is None:
        assert step_batch_from_bytes(step_batch_to_bytes(batch)) == batch
    else:
        assert re.fullmatch(r"batch|rows\[\d+\]\.sequence_id|[a-z_]+(\[\d+\][\w.\[\]]*)?", field)


@quick
@given(st.binary(max_size=200) | damaged(distinct(open_rows).map(open_rows_to_bytes)))
def test_bytes_become_valid_sequences_or_an_error_that_names_a_field(data: bytes) -> None:
    rows, field = read(open_rows_from_bytes, data)
    if field is None:
        assert open_rows_from_bytes(open_rows_to_bytes(rows)) == rows
    else:
        assert re.fullmatch(r"rows(\[\d+\]\.[\w.\[\]]+)?", field)
