"""Decoding: every value out of bounds is refused by field, value and bound, in whichever column of a step it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from cluster.core.errors import InvalidRequest
from cluster.wire.codec.common import decode_sequence_ids
from cluster.wire.codec.draft import decode_draft_rows, decode_proposals
from cluster.wire.codec.opening import decode_open_result, decode_open_rows
from cluster.wire.codec.step import decode_step_batch, decode_step_result
from cluster.wire.codec.target_info import decode_target_info
from pilotfish.v1 import common_pb2, draft_pb2, target_pb2
from tests.support.refusals import assert_refused


def step(**changes: Any) -> target_pb2.TargetServiceStepRequest:
    """A step of one row, with changed columns."""
    columns: dict[str, Any] = {"sequence_ids": ["s"], "base_lens": [5], "pending_lens": [2], "pending": [1, 2]}
    return target_pb2.TargetServiceStepRequest(**(columns | {"decides": [True]} | changes))


def detailed(**details: Any) -> target_pb2.TargetServiceStepRequest:
    return step(details=[target_pb2.VerifyRowDetails(**details)])


def drafted(tokens: list[int], parents: list[int], **changes: Any) -> target_pb2.TargetServiceStepRequest:
    return step(tree_sizes=[len(tokens)], tree_tokens=tokens, tree_parents=parents, **changes)


def start(**changes: Any) -> target_pb2.TargetServiceStepRequest:
    return detailed(start=common_pb2.SequenceStart(prompt_len=1, sampling=common_pb2.SamplingParameters(**changes)))


def verdict(**changes: Any) -> target_pb2.TargetServiceStepResponse:
    """The result of a step of one row."""
    columns: dict[str, Any] = {"sequence_ids": ["s"], "base_lens": [5], "token_counts": [2], "tokens": [1, 2]}
    return target_pb2.TargetServiceStepResponse(**(columns | {"drafted": [3]} | changes))


def explained(**details: Any) -> target_pb2.TargetServiceStepResponse:
    return verdict(details=[target_pb2.VerdictDetails(**details)])


def learned(**fields: Any) -> target_pb2.TargetServiceStepResponse:
    return target_pb2.TargetServiceStepResponse(learning=common_pb2.LearningStatus(**fields))


def drawn_from(tokens: list[int], probabilities: list[float]) -> common_pb2.DraftDistribution:
    return common_pb2.DraftDistribution(tokens=tokens, probabilities=probabilities)


def listed(*tokens: int, size: int = 999) -> common_pb2.ListedTokens:
    return common_pb2.ListedTokens(vocabulary_size=size, tokens=tokens)


def tree(tokens: list[int], parents: list[int]) -> common_pb2.TokenTree:
    return common_pb2.TokenTree(tokens=tokens, parents=parents)


def propose(**changes: Any) -> draft_pb2.DraftServiceProposeRequest:
    row: dict[str, Any] = {"sequence_id": "s", "base_len": 5, "new_tokens": [1, 2], "max_nodes": 4, "max_depth": 4}
    return draft_pb2.DraftServiceProposeRequest(rows=[draft_pb2.DraftRow(**(row | changes))])


def proposal(**changes: Any) -> draft_pb2.DraftServiceProposeResponse:
    row: dict[str, Any] = {"sequence_id": "s", "base_len": 5, "tree": tree([1], [-1])}
    return draft_pb2.DraftServiceProposeResponse(proposals=[common_pb2.Proposal(**(row | changes))])


def info(**changes: Any) -> target_pb2.TargetServiceGetInfoResponse:
    fields: dict[str, Any] = {"vocabulary_size": 9, "max_context_len": 9, "block_size": 4, "tensor_parallel": 1}
    fields["groups"] = [target_pb2.KvGroup(tables=1)]
    return target_pb2.TargetServiceGetInfoResponse(**(fields | changes))


def group(**changes: Any) -> target_pb2.TargetServiceGetInfoResponse:
    return info(groups=[target_pb2.KvGroup(**({"tables": 1} | changes))])


def opening(**changes: Any) -> target_pb2.TargetServiceOpenRequest:
    row: dict[str, Any] = {"sequence_id": "s", "tokens": [1], "start": common_pb2.SequenceStart(prompt_len=1)}
    return target_pb2.TargetServiceOpenRequest(rows=[target_pb2.OpenRow(**(row | changes))])


def evidence(**changes: Any) -> draft_pb2.DraftServiceProposeRequest:
    return propose(evidence=[common_pb2.Evidence(**({"base_len": 3} | changes))])


def hidden(**changes: Any) -> draft_pb2.DraftServiceProposeRequest:
    fields: dict[str, Any] = {"first": 0, "width": 2, "data": bytes(8)}
    return evidence(hidden=common_pb2.HiddenStates(**(fields | changes)))


LONG = "x" * 129
BIG = 2**31
TOKEN_BOUND = "between 0 and 2147483647"
DECODERS: dict[type, Callable[[Any], object]] = {
    target_pb2.TargetServiceStepRequest: decode_step_batch,
    target_pb2.TargetServiceStepResponse: decode_step_result,
    target_pb2.TargetServiceOpenRequest: decode_open_rows,
    target_pb2.TargetServiceOpenResponse: decode_open_result,
    target_pb2.TargetServiceGetInfoResponse: decode_target_info,
    draft_pb2.DraftServiceProposeRequest: decode_draft_rows,
    draft_pb2.DraftServiceProposeResponse: decode_proposals,
}
REFUSED_STEPS = [
    (step(sequence_ids=[""]), "sequence_ids[0]", "between 1 and 128 bytes"),
    (step(sequence_ids=[LONG]), "sequence_ids[0]", "between 1 and 128 bytes"),
    (step(sequence_ids=["é" * 65]), "sequence_ids[0]", "between 1 and 128 bytes"),
    (step(sequence_ids=["s"] * 4097), "sequence_ids", "between 0 and 4096 entries"),
    (step(sequence_ids=["s", "t"]), "base_lens", "between 2 and 2 entries"),
    (step(base_lens=[]), "base_lens", "between 1 and 1 entries"),
    (step(base_lens=[0]), "base_lens[0]", "between 1 and 1048576"),
    (step(base_lens=[2**20 + 1]), "base_lens[0]", "between 1 and 1048576"),
    (step(pending_lens=[2, 2]), "pending_lens", "between 1 and 1 entries"),
    (step(pending_lens=[0], pending=[]), "pending_lens[0]", "between 1 and 1048576"),
    (step(pending_lens=[6], pending=[1] * 6), "pending_lens[0]", "between 1 and 5"),
    (step(pending=[1]), "pending", "between 2 and 2 entries"),
    (step(pending=[1, BIG]), "pending[1]", TOKEN_BOUND),
    (step(decides=[]), "decides", "between 1 and 1 entries"),
    (step(tree_sizes=[1, 1]), "tree_sizes", "between 1 and 1 entries"),
    (step(tree_sizes=[2], tree_tokens=[1], tree_parents=[-1]), "tree_tokens", "between 2 and 2 entries"),
    (step(tree_tokens=[1], tree_parents=[-1]), "tree_tokens", "between 0 and 0 entries"),
    (drafted([1, 2], [-1]), "tree_parents", "between 2 and 2 entries"),
    (drafted([1, 2], [-1, 1]), "trees[0].parents[1]", "between -1 and 0"),
    (drafted([1, 2], [-1, -2]), "trees[0].parents[1]", "between -1 and 0"),
    (drafted([1, 1], [-1, -1]), "trees[0].tokens[1]", "unlike its siblings under node -1"),
    (drafted([1] * 257, list(range(-1, 256))), "tree_sizes[0]", "between 0 and 256"),
    (drafted([1] * 65, list(range(-1, 64))), "trees[0].parents", "at most 64 deep"),
    (drafted([BIG], [-1]), "tree_tokens[0]", TOKEN_BOUND),
    (drafted([1], [-1], decides=[False]), "tree_sizes[0]", "0 if the row does not decide"),
    (step(next_max_nodes=[257]), "next_max_nodes[0]", "between 0 and 256"),
    (step(next_max_nodes=[1, 1]), "next_max_nodes", "between 1 and 1 entries"),
    (step(next_max_depths=[65]), "next_max_depths[0]", "between 0 and 64"),
    (detailed(row=1), "details[0].row", "between 0 and 0"),
    (step(details=[target_pb2.VerifyRowDetails()] * 2), "details", "between 0 and 1 entries"),
    (
        target_pb2.TargetServiceStepRequest(
            sequence_ids=["s", "t"],
            base_lens=[1, 1],
            pending_lens=[1, 1],
            pending=[1, 1],
            decides=[True, True],
            details=[target_pb2.VerifyRowDetails(row=1), target_pb2.VerifyRowDetails(row=1)],
        ),
        "details[1].row",
        "between 2 and 1",
    ),
    (detailed(distributions=[drawn_from([1], [1.0])]), "details[0].distributions", "between 0 and 0 entries"),
    (detailed(start=common_pb2.SequenceStart(prompt_len=0)), "details[0].start.prompt_len", "between 1 and 1048576"),
    (
        detailed(start=common_pb2.SequenceStart(prompt_len=1, end_token_ids=[1] * 2049)),
        "details[0].start.end_token_ids",
        "between 0 and 2048 entries",
    ),
    (
        detailed(start=common_pb2.SequenceStart(prompt_len=1, min_tokens=2**20 + 1)),
        "details[0].start.min_tokens",
        "between 0 and 1048576",
    ),
    (start(temperature=-0.1), "details[0].start.sampling.temperature", "between 0 and 1e+06"),
    (start(top_p=0.0), "details[0].start.sampling.top_p", "above 0 and at most 1"),
    (start(logprobs=257), "details[0].start.sampling.logprobs", "between 0 and 256"),
    (
        start(logit_bias=[common_pb2.LogitBias(token_id=1, bias=101)]),
        "details[0].start.sampling.logit_bias[1]",
        "between -100 and 100",
    ),
    (start(logit_bias=[common_pb2.LogitBias(token_id=BIG)]), "details[0].start.sampling.logit_bias", TOKEN_BOUND),
    (
        start(logit_bias=[common_pb2.LogitBias(token_id=1)] * 1025),
        "details[0].start.sampling.logit_bias",
        "between 0 and 1024 entries",
    ),
    (
        target_pb2.TargetServiceStepRequest(
            sequence_ids=["s", "s"], base_lens=[1, 1], pending_lens=[1, 1], pending=[1, 1], decides=[True, True]
        ),
        "rows[1].sequence_id",
        "in one row only",
    ),
    (verdict(sequence_ids=[LONG]), "sequence_ids[0]", "between 1 and 128 bytes"),
    (verdict(sequence_ids=["s"] * 4097), "sequence_ids", "between 0 and 4096 entries"),
    (verdict(base_lens=[0]), "base_lens[0]", "between 1 and 1048576"),
    (verdict(base_lens=[]), "base_lens", "between 1 and 1 entries"),
    (verdict(token_counts=[]), "token_counts", "between 1 and 1 entries"),
    (verdict(token_counts=[5], tokens=[1] * 5), "token_counts[0]", "between 0 and 4"),
    (verdict(drafted=[], tokens=[1, 2]), "token_counts[0]", "between 0 and 1"),
    (verdict(tokens=[1] * 3), "tokens", "between 2 and 2 entries"),
    (verdict(tokens=[1, BIG]), "tokens[1]", TOKEN_BOUND),
    (verdict(drafted=[257]), "drafted[0]", "between 0 and 256"),
    (verdict(drafted=[1, 1]), "drafted", "between 1 and 1 entries"),
    (explained(row=1), "details[0].row", "between 0 and 0"),
    (verdict(details=[target_pb2.VerdictDetails()] * 2), "details", "between 0 and 1 entries"),
    (explained(logprobs=[common_pb2.TokenLogprobs()]), "details[0].logprobs", "between 2 and 2 entries"),
    (
        explained(logprobs=[common_pb2.TokenLogprobs(logprob=0.5)] * 2),
        "details[0].logprobs[0].logprob",
        "between -1e+30 and 0",
    ),
    (
        explained(prompt_logprobs=[common_pb2.TokenLogprobs()] * 6),
        "details[0].prompt_logprobs",
        "between 0 and 5 entries",
    ),
    (explained(forced_tokens=[1] * 65), "details[0].forced_tokens", "between 0 and 64 entries"),
    (explained(following=listed(size=0)), "details[0].following.vocabulary_size", "between 1 and 1048576"),
    (explained(following=listed(size=2**20 + 1)), "details[0].following.vocabulary_size", "between 1 and 1048576"),
    (explained(following=listed(*range(257))), "details[0].following.tokens", "between 0 and 256 entries"),
    (explained(following=listed(3, 999)), "details[0].following.tokens[1]", "between 0 and 998"),
    (explained(following=listed(3, 4, 4)), "details[0].following.tokens[2]", "above 4"),
    (explained(forced_tokens=[7, 9], following=listed(3, size=9)), "details[0].forced_tokens[1]", "between 0 and 8"),
    (explained(fault=common_pb2.RowFault()), "details[0].fault.code", "one of [1, 2, 3, 4]"),
    (explained(fault=common_pb2.RowFault(code=9)), "details[0].fault.code", "one of [1, 2, 3, 4]"),
    (
        explained(fault=common_pb2.RowFault(code=1, message="x" * 1025)),
        "details[0].fault.message",
        "between 0 and 1024 entries",
    ),
    (
        target_pb2.TargetServiceStepResponse(kv=target_pb2.KvOccupancy(blocks_total=1, blocks_free=2)),
        "kv.blocks_free",
        "between 0 and 1",
    ),
    (target_pb2.TargetServiceStepResponse(step_seconds=math.nan), "step_seconds", "between 0 and 86400"),
    (learned(version=BIG), "learning.version", TOKEN_BOUND),
    (learned(failed=BIG), "learning.failed", TOKEN_BOUND),
    (learned(texts=2**53 + 1), "learning.texts", "between 0 and 9007199254740992"),
    (learned(text_bytes=2**53 + 1), "learning.text_bytes", "between 0 and 9007199254740992"),
    (learned(tokens_per_step=math.inf), "learning.tokens_per_step", "between 0 and 257"),
    (learned(tokens_per_step_before=-1.0), "learning.tokens_per_step_before", "between 0 and 257"),
    (
        explained(evidence=common_pb2.Evidence()),
        "details[0].evidence.base_len",
        "between 1 and 1048576",
    ),
    (
        explained(proposal=common_pb2.Proposal(sequence_id="s")),
        "details[0].proposal.base_len",
        "between 1 and 1048576",
    ),
    (
        target_pb2.TargetServiceStepResponse(draft_seconds=-1),
        "draft_seconds",
        "between 0 and 86400",
    ),
]
REFUSED_CALLS = [
    (propose(forced_tokens=[1] * 65), "rows[0].forced_tokens", "between 0 and 64 entries"),
    (propose(following=listed(5, 5)), "rows[0].following.tokens[1]", "above 5"),
    (propose(forced_tokens=[9], following=listed(3, size=9)), "rows[0].forced_tokens[0]", "between 0 and 8"),
    (
        propose(base_len=2, start=common_pb2.SequenceStart(prompt_len=1, prediction=[1] * 65537)),
        "rows[0].start.prediction",
        "between 0 and 65536 entries",
    ),
    (
        propose(base_len=2, start=common_pb2.SequenceStart(prompt_len=1, source=[1] * 65537)),
        "rows[0].start.source",
        "between 0 and 65536 entries",
    ),
    (opening(sequence_id=LONG), "rows[0].sequence_id", "between 1 and 128 bytes"),
    (opening(tokens=[]), "rows[0].tokens", "between 1 and 1048576 entries"),
    (opening(tokens=[1, BIG]), "rows[0].tokens[1]", "between 0 and 2147483647"),
    (opening(parent=LONG), "rows[0].parent", "between 1 and 128 bytes"),
    (opening(start=common_pb2.SequenceStart()), "rows[0].start.prompt_len", "between 1 and 1048576"),
    (
        opening(start=common_pb2.SequenceStart(prompt_len=1, cache_salt="x" * 322)),
        "rows[0].start.cache_salt",
        "at most 321 bytes",
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
    (proposal(base_len=0), "proposals[0].base_len", "between 1 and 1048576"),
    (proposal(tree=tree([1, 2], [0, -1])), "proposals[0].tree.parents[0]", "between -1 and -1"),
    (proposal(distributions=[drawn_from([], [])]), "proposals[0].distributions[0].tokens", "between 1 and 256 entries"),
    (
        proposal(distributions=[drawn_from([1, 1], [0.5, 0.5])]),
        "proposals[0].distributions[0].tokens",
        "each token at most once",
    ),
    (
        proposal(distributions=[drawn_from([1, 2], [1.0])]),
        "proposals[0].distributions[0].probabilities",
        "between 2 and 2 entries",
    ),
    (
        proposal(distributions=[drawn_from([1], [1.5])]),
        "proposals[0].distributions[0].probabilities[0]",
        "between 0 and 1",
    ),
    (
        proposal(distributions=[drawn_from([1, 2], [0.5, 0.25])]),
        "proposals[0].distributions[0].probabilities",
        "a sum of 1 ± 0.001",
    ),
    (
        proposal(tree=tree([1, 2], [-1, 0]), origins=[1]),
        "proposals[0].origins",
        "between 2 and 2 entries",
    ),
    (proposal(tree=tree([1], [-1]), origins=[4]), "proposals[0].origins[0]", "between 1 and 3"),
    (proposal(tree=tree([1], [-1]), origins=[0]), "proposals[0].origins[0]", "between 1 and 3"),
    (evidence(base_len=6), "rows[0].evidence[0].base_len", "between 1 and 5"),
    (evidence(decisions=[1, 2]), "rows[0].evidence[0].decisions", "between 1 and 1 entries"),
    (evidence(decisions=[-2]), "rows[0].evidence[0].decisions[0]", "between -1 and 2147483647"),
    (evidence(top_count=65), "rows[0].evidence[0].top_count", "between 0 and 64"),
    (evidence(top_count=2, top_tokens=[1] * 3), "rows[0].evidence[0].top_tokens", "between 0 and 2 entries"),
    (evidence(top_count=2, top_tokens=[1]), "rows[0].evidence[0].top_tokens", "a multiple of top_count (2)"),
    (hidden(width=0), "rows[0].evidence[0].hidden.width", "between 1 and 1048576"),
    (hidden(data=bytes(7)), "rows[0].evidence[0].hidden.data", "a multiple of 4 bytes"),
    (hidden(first=4), "rows[0].evidence[0].hidden", "between 0 and 5"),
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
REFUSED = REFUSED_STEPS + REFUSED_CALLS


@pytest.mark.parametrize(("message", "field", "bound"), REFUSED, ids=[f"{row[1]} {i}" for i, row in enumerate(REFUSED)])
def test_an_out_of_bounds_message_is_refused_by_field_value_and_bound(message: Any, field: str, bound: str) -> None:
    assert_refused(DECODERS[type(message)], message, field, bound)


@pytest.mark.parametrize(
    "message",
    [step(), start(), drafted([1, 2], [-1, 0]), verdict(), explained(), opening(), propose(), proposal(), info()],
)
def test_the_same_messages_without_the_fault_are_accepted(message: Any) -> None:
    DECODERS[type(message)](message)


def test_sequence_ids_are_bounded_in_number_and_length() -> None:
    assert decode_sequence_ids(["a", "b"]) == ("a", "b")
    with pytest.raises(InvalidRequest, match=r"sequence_ids\[1\]"):
        decode_sequence_ids(["a", ""])
    with pytest.raises(InvalidRequest, match="between 0 and 4096 entries"):
        decode_sequence_ids(["a"] * 4097)
