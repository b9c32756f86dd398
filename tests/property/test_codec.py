"""The codec: what is in bounds travels unchanged, and everything else is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.kv import KvGroup, KvLayout, KvOccupancy
from cluster.core.request import SamplingParameters, SequenceStart, TokenLogprobs
from cluster.core.tree import TokenTree
from cluster.core.verification import (
    OpenResult,
    OpenRow,
    RowFault,
    RowFaultCode,
    StepBatch,
    StepResult,
    TargetInfo,
    Verdict,
    VerifyRow,
)
from cluster.wire.codec_common import decode_sequence_ids
from cluster.wire.codec_draft import decode_draft_rows, decode_proposals, encode_draft_rows, encode_proposals
from cluster.wire.codec_target import (
    decode_open_result,
    decode_open_rows,
    decode_step_batch,
    decode_step_result,
    decode_target_info,
    encode_open_result,
    encode_step_result,
    encode_target_info,
    open_rows_from_bytes,
    open_rows_to_bytes,
    step_batch_from_bytes,
    step_batch_to_bytes,
)
from pilotfish.v1 import common_pb2, draft_pb2, target_pb2

tokens = st.integers(0, 2**31 - 1)
names = st.text(min_size=1, max_size=30).map(SequenceId)
logprobs = st.floats(-1e4, 0.0)


def real(least: float, most: float, **options: Any) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_nan=False, **options)


samplings = st.builds(
    SamplingParameters,
    temperature=real(0, 2),
    top_k=st.integers(0, 2**20),
    top_p=real(0, 1, exclude_min=True),
    min_p=real(0, 1),
    repetition_penalty=real(0, 2, exclude_min=True),
    presence_penalty=real(-2, 2),
    frequency_penalty=real(-2, 2),
    logit_bias=st.lists(st.tuples(tokens, real(-100, 100)), max_size=4).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 256),
)
starts = st.builds(SequenceStart, prompt_len=st.integers(1, 2**20), sampling=samplings, cache_salt=st.text(max_size=20))
trees = st.lists(st.lists(tokens, min_size=1, max_size=6), max_size=5).map(
    lambda candidates: TokenTree.from_candidates(candidates, 24)
)
faults = st.builds(
    RowFault,
    code=st.sampled_from(RowFaultCode),
    message=st.text(max_size=40),
    stored_len=st.integers(0, 2**20),
)


@st.composite
def verify_rows(draw: st.DrawFn) -> VerifyRow:
    pending = tuple(draw(st.lists(tokens, min_size=1, max_size=8)))
    decide = draw(st.booleans())
    return VerifyRow(
        sequence_id=draw(names),
        base_len=len(pending) + draw(st.integers(0, 1000)),
        pending=pending,
        tree=draw(trees) if decide else TokenTree(),
        decide=decide,
        start=draw(st.none() | starts),
    )


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    drafted = draw(st.integers(0, 10))
    decided = tuple(draw(st.lists(tokens, max_size=drafted + 1)))
    entries = st.builds(
        TokenLogprobs,
        token=tokens,
        logprob=logprobs,
        top=st.lists(st.tuples(tokens, logprobs), max_size=4).map(tuple),
    )
    return Verdict(
        sequence_id=draw(names),
        base_len=draw(st.integers(1, 2**20)),
        tokens=decided,
        drafted=drafted,
        logprobs=tuple(draw(entries) for _ in decided) if draw(st.booleans()) else (),
        fault=draw(st.none() | faults),
    )


@st.composite
def draft_rows(draw: st.DrawFn) -> DraftRow:
    new = tuple(draw(st.lists(tokens, max_size=8)))
    start = draw(st.none() | starts)
    more = 0 if start is not None else draw(st.integers(0, 1000))
    if start is not None and not new:
        new = (draw(tokens),)
    return DraftRow(
        sequence_id=draw(names),
        base_len=max(1, len(new) + more),
        new_tokens=new,
        budget=DraftBudget(draw(st.integers(0, 256)), draw(st.integers(0, 64))),
        start=start,
    )


def distinct(rows: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(rows, max_size=4, unique_by=lambda row: row.sequence_id).map(tuple)


occupancies = st.builds(
    lambda total, used: KvOccupancy(total, max(0, total - used)), st.integers(0, 2**31), st.integers(0, 100)
)
results = st.builds(StepResult, verdicts=distinct(verdicts()), kv=occupancies, step_seconds=real(0, 100))
proposals = st.builds(Proposal, sequence_id=names, base_len=st.integers(1, 2**20), tree=trees, fault=st.none() | faults)
groups = st.one_of(
    st.builds(KvGroup, tables=st.integers(1, 64)),
    st.builds(KvGroup, tables=st.integers(1, 64), window=st.integers(2, 2**20), sinks=st.integers(0, 2**20)),
)
layouts = st.builds(KvLayout, st.integers(1, 256), st.lists(groups, min_size=1, max_size=4).map(tuple))
open_rows = st.builds(
    OpenRow,
    sequence_id=names,
    tokens=st.lists(tokens, min_size=1, max_size=8).map(tuple),
    start=starts,
    parent=st.none() | names,
)
openings = st.builds(OpenResult, stored_lens=st.lists(st.integers(0, 2**20), max_size=4).map(tuple), kv=occupancies)
infos = st.builds(
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
)
quick = settings(max_examples=80, deadline=None)


@quick
@given(distinct(verify_rows()).map(StepBatch))
def test_a_step_travels_unchanged(batch: StepBatch) -> None:
    assert step_batch_from_bytes(step_batch_to_bytes(batch)) == batch


@quick
@given(results)
def test_verdicts_travel_unchanged(result: StepResult) -> None:
    message = encode_step_result(result).SerializeToString()
    assert decode_step_result(target_pb2.TargetServiceStepResponse.FromString(message)) == result


@quick
@given(distinct(draft_rows()))
def test_draft_rows_travel_unchanged(rows: tuple[DraftRow, ...]) -> None:
    message = encode_draft_rows(rows).SerializeToString()
    assert decode_draft_rows(draft_pb2.DraftServiceProposeRequest.FromString(message)) == rows


@quick
@given(distinct(proposals))
def test_proposals_travel_unchanged(rows: tuple[Proposal, ...]) -> None:
    message = encode_proposals(rows).SerializeToString()
    assert decode_proposals(draft_pb2.DraftServiceProposeResponse.FromString(message)) == rows


@quick
@given(infos)
def test_a_targets_description_travels_unchanged(info: TargetInfo) -> None:
    message = encode_target_info(info).SerializeToString()
    assert decode_target_info(target_pb2.TargetServiceGetInfoResponse.FromString(message)) == info


@quick
@given(distinct(open_rows))
def test_sequences_to_open_travel_unchanged(rows: tuple[OpenRow, ...]) -> None:
    assert open_rows_from_bytes(open_rows_to_bytes(rows)) == rows


@quick
@given(openings)
def test_what_was_found_travels_unchanged(result: OpenResult) -> None:
    message = encode_open_result(result).SerializeToString()
    assert decode_open_result(target_pb2.TargetServiceOpenResponse.FromString(message)) == result


@pytest.mark.parametrize("read", [step_batch_from_bytes, open_rows_from_bytes])
@quick
@given(data=st.binary(max_size=200))
def test_garbage_is_refused_or_read_but_never_anything_else(read: Callable[[bytes], object], data: bytes) -> None:
    try:
        read(data)
    except InvalidRequest as error:
        field = error.field
    else:
        field = "none: it was read"
    assert field


# --- one message per bound, each wrong in that one place ---------------------------------------


def step(**changes: Any) -> target_pb2.TargetServiceStepRequest:
    row: dict[str, Any] = {"sequence_id": "s", "base_len": 5, "pending": [1, 2], "decide": True}
    return target_pb2.TargetServiceStepRequest(rows=[target_pb2.VerifyRow(**(row | changes))])


def tree(tokens: list[int], parents: list[int]) -> common_pb2.TokenTree:
    return common_pb2.TokenTree(tokens=tokens, parents=parents)


def start(**changes: Any) -> target_pb2.TargetServiceStepRequest:
    return step(start=common_pb2.SequenceStart(prompt_len=1, sampling=common_pb2.SamplingParameters(**changes)))


def propose(**changes: Any) -> draft_pb2.DraftServiceProposeRequest:
    row: dict[str, Any] = {"sequence_id": "s", "base_len": 5, "new_tokens": [1, 2], "max_nodes": 4, "max_depth": 4}
    return draft_pb2.DraftServiceProposeRequest(rows=[draft_pb2.DraftRow(**(row | changes))])


def verdict(**changes: Any) -> target_pb2.TargetServiceStepResponse:
    row: dict[str, Any] = {"sequence_id": "s", "base_len": 5, "tokens": [1, 2], "drafted": 3}
    return target_pb2.TargetServiceStepResponse(verdicts=[target_pb2.Verdict(**(row | changes))])


def proposal(**changes: Any) -> draft_pb2.DraftServiceProposeResponse:
    row: dict[str, Any] = {"sequence_id": "s", "base_len": 5, "tree": tree([1], [-1])}
    return draft_pb2.DraftServiceProposeResponse(proposals=[draft_pb2.Proposal(**(row | changes))])


def info(**changes: Any) -> target_pb2.TargetServiceGetInfoResponse:
    fields: dict[str, Any] = {"vocabulary_size": 9, "max_context_len": 9, "block_size": 4, "tensor_parallel": 1}
    fields["groups"] = [target_pb2.KvGroup(tables=1)]
    return target_pb2.TargetServiceGetInfoResponse(**(fields | changes))


def group(**changes: Any) -> target_pb2.TargetServiceGetInfoResponse:
    return info(groups=[target_pb2.KvGroup(**({"tables": 1} | changes))])


def opening(**changes: Any) -> target_pb2.TargetServiceOpenRequest:
    row: dict[str, Any] = {"sequence_id": "s", "tokens": [1], "start": common_pb2.SequenceStart(prompt_len=1)}
    return target_pb2.TargetServiceOpenRequest(rows=[target_pb2.OpenRow(**(row | changes))])


LONG = "x" * 129
BIG = 2**31
DECODERS: dict[type, Callable[[Any], object]] = {
    target_pb2.TargetServiceOpenRequest: decode_open_rows,
    target_pb2.TargetServiceOpenResponse: decode_open_result,
    target_pb2.TargetServiceStepRequest: decode_step_batch,
    target_pb2.TargetServiceStepResponse: decode_step_result,
    target_pb2.TargetServiceGetInfoResponse: decode_target_info,
    draft_pb2.DraftServiceProposeRequest: decode_draft_rows,
    draft_pb2.DraftServiceProposeResponse: decode_proposals,
}
REFUSED = [
    (step(sequence_id=""), "rows[0].sequence_id", "between 1 and 128 bytes"),
    (step(sequence_id=LONG), "rows[0].sequence_id", "between 1 and 128 bytes"),
    (step(base_len=0), "rows[0].base_len", "between 1 and 1048576"),
    (step(base_len=2**20 + 1), "rows[0].base_len", "between 1 and 1048576"),
    (step(pending=[]), "rows[0].pending", "between 1 and 5 entries"),
    (step(pending=[1] * 6), "rows[0].pending", "between 1 and 5 entries"),
    (step(pending=[1, BIG]), "rows[0].pending[1]", "between 0 and 2147483647"),
    (step(tree=tree([1, 2], [-1])), "rows[0].tree.parents", "between 2 and 2 entries"),
    (step(tree=tree([1, 2], [-1, 1])), "rows[0].tree.parents[1]", "between -1 and 0"),
    (step(tree=tree([1, 2], [-1, -2])), "rows[0].tree.parents[1]", "between -1 and 0"),
    (step(tree=tree([1, 1], [-1, -1])), "rows[0].tree.tokens[1]", "unlike its siblings under node -1"),
    (step(tree=tree([1] * 257, list(range(-1, 256)))), "rows[0].tree.tokens", "between 0 and 256 entries"),
    (step(tree=tree([1] * 65, list(range(-1, 64)))), "rows[0].tree.parents", "at most 64 deep"),
    (step(tree=tree([BIG], [-1])), "rows[0].tree.tokens[0]", "between 0 and 2147483647"),
    (step(tree=tree([1], [-1]), decide=False), "rows[0].tree", "empty where nothing is decided"),
    (step(start=common_pb2.SequenceStart(prompt_len=0)), "rows[0].start.prompt_len", "between 1 and 1048576"),
    (start(temperature=-0.1), "rows[0].start.sampling.temperature", "between 0 and 2"),
    (start(temperature=math.nan), "rows[0].start.sampling.temperature", "between 0 and 2"),
    (start(temperature=math.inf), "rows[0].start.sampling.temperature", "between 0 and 2"),
    (start(top_k=2**20 + 1), "rows[0].start.sampling.top_k", "between 0 and 1048576"),
    (start(top_p=0.0), "rows[0].start.sampling.top_p", "above 0 and at most 1"),
    (start(top_p=1.1), "rows[0].start.sampling.top_p", "above 0 and at most 1"),
    (start(min_p=-0.1), "rows[0].start.sampling.min_p", "between 0 and 1"),
    (start(repetition_penalty=0.0), "rows[0].start.sampling.repetition_penalty", "above 0 and at most 2"),
    (start(presence_penalty=2.1), "rows[0].start.sampling.presence_penalty", "between -2 and 2"),
    (start(frequency_penalty=-2.1), "rows[0].start.sampling.frequency_penalty", "between -2 and 2"),
    (start(logprobs=257), "rows[0].start.sampling.logprobs", "between 0 and 256"),
    (
        start(logit_bias=[common_pb2.LogitBias(token_id=1, bias=101)]),
        "rows[0].start.sampling.logit_bias[0].bias",
        "between -100 and 100",
    ),
    (
        start(logit_bias=[common_pb2.LogitBias(token_id=1)] * 1025),
        "rows[0].start.sampling.logit_bias",
        "between 0 and 1024 entries",
    ),
    (
        target_pb2.TargetServiceStepRequest(rows=[step().rows[0], step().rows[0]]),
        "rows[1].sequence_id",
        "in one row only",
    ),
    (
        target_pb2.TargetServiceStepRequest(rows=[target_pb2.VerifyRow()] * 4097),
        "rows",
        "between 0 and 4096 entries",
    ),
    (opening(sequence_id=LONG), "rows[0].sequence_id", "between 1 and 128 bytes"),
    (opening(tokens=[]), "rows[0].tokens", "between 1 and 1048576 entries"),
    (opening(tokens=[1, BIG]), "rows[0].tokens[1]", "between 0 and 2147483647"),
    (opening(parent=LONG), "rows[0].parent", "between 1 and 128 bytes"),
    (opening(start=common_pb2.SequenceStart()), "rows[0].start.prompt_len", "between 1 and 1048576"),
    (
        opening(start=common_pb2.SequenceStart(prompt_len=1, cache_salt="x" * 257)),
        "rows[0].start.cache_salt",
        "at most 256 bytes",
    ),
    (
        target_pb2.TargetServiceOpenRequest(rows=[opening().rows[0], opening().rows[0]]),
        "rows[1].sequence_id",
        "in one row only",
    ),
    (target_pb2.TargetServiceOpenRequest(rows=[target_pb2.OpenRow()] * 4097), "rows", "between 0 and 4096 entries"),
    (target_pb2.TargetServiceOpenResponse(stored_lens=[2**20 + 1]), "stored_lens[0]", "between 0 and 1048576"),
    (propose(sequence_id=""), "rows[0].sequence_id", "between 1 and 128 bytes"),
    (propose(base_len=0), "rows[0].base_len", "between 1 and 1048576"),
    (propose(new_tokens=[1] * 6), "rows[0].new_tokens", "between 0 and 5 entries"),
    (propose(max_nodes=257), "rows[0].max_nodes", "between 0 and 256"),
    (propose(max_depth=65), "rows[0].max_depth", "between 0 and 64"),
    (propose(start=common_pb2.SequenceStart(prompt_len=1)), "rows[0].new_tokens", "between 5 and 5 entries"),
    (verdict(tokens=[1] * 5), "verdicts[0].tokens", "between 0 and 4 entries"),
    (verdict(drafted=257), "verdicts[0].drafted", "between 0 and 256"),
    (verdict(logprobs=[common_pb2.TokenLogprobs()]), "verdicts[0].logprobs", "between 2 and 2 entries"),
    (
        verdict(logprobs=[common_pb2.TokenLogprobs(logprob=0.5)] * 2),
        "verdicts[0].logprobs[0].logprob",
        "between -1e+30 and 0",
    ),
    (verdict(fault=common_pb2.RowFault()), "verdicts[0].fault.code", "one of [1, 2, 3]"),
    (verdict(fault=common_pb2.RowFault(code=9)), "verdicts[0].fault.code", "one of [1, 2, 3]"),
    (
        verdict(fault=common_pb2.RowFault(code=1, message="x" * 1025)),
        "verdicts[0].fault.message",
        "between 0 and 1024 entries",
    ),
    (
        target_pb2.TargetServiceStepResponse(kv=target_pb2.KvOccupancy(blocks_total=1, blocks_free=2)),
        "kv.blocks_free",
        "between 0 and 1",
    ),
    (target_pb2.TargetServiceStepResponse(step_seconds=math.nan), "step_seconds", "between 0 and 86400"),
    (proposal(base_len=0), "proposals[0].base_len", "between 1 and 1048576"),
    (proposal(tree=tree([1, 2], [0, -1])), "proposals[0].tree.parents[0]", "between -1 and -1"),
    (info(vocabulary_size=0), "vocabulary_size", "between 1 and 2147483647"),
    (info(block_size=0), "block_size", "between 1 and 1048576"),
    (info(groups=[]), "groups", "between 1 and 256 entries"),
    (group(tables=0), "groups[0].tables", "between 1 and 4096"),
    (group(window=2**20 + 1), "groups[0].window", "between 0 and 1048576"),
    (group(sinks=1), "groups[0].sinks", "between 0 and 0"),
    (info(model="x" * 257), "model", "at most 256 bytes"),
    (info(dtype="é" * 129), "dtype", "at most 256 bytes"),
    (info(epoch="x" * 257), "epoch", "at most 256 bytes"),
]


@pytest.mark.parametrize(("message", "field", "bound"), REFUSED, ids=[f"{row[1]} {i}" for i, row in enumerate(REFUSED)])
def test_an_out_of_bounds_message_is_refused_by_field_value_and_bound(message: Any, field: str, bound: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        DECODERS[type(message)](message)
    assert refused.value.field == field
    assert refused.value.bound == bound
    assert str(refused.value).startswith(f"{field}: ")


@pytest.mark.parametrize("message", [step(), start(), opening(), propose(), verdict(), proposal(), info()])
def test_the_same_messages_without_the_fault_are_taken(message: Any) -> None:
    DECODERS[type(message)](message)


def test_sequence_ids_are_bounded_in_number_and_length() -> None:
    assert decode_sequence_ids(["a", "b"]) == ("a", "b")
    with pytest.raises(InvalidRequest, match=r"sequence_ids\[1\]"):
        decode_sequence_ids(["a", ""])
    with pytest.raises(InvalidRequest, match="between 0 and 4096 entries"):
        decode_sequence_ids(["a"] * 4097)
