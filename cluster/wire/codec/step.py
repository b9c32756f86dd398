"""Conversion between protobuf and types, for the steps of the target.

Every round sends one request and one response, with up to thousands of rows. So their rows are columns of numbers,
which cost a fraction of a message per row. Only what few rows have is a message of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError

from cluster.core import bounds
from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.errors import InvalidRequest
from cluster.core.request import TokenLogprobs
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import StepBatch, StepResult, Verdict, VerifyRow
from cluster.wire.codec.common import (
    decode_fault,
    decode_logprobs,
    decode_sequence_ids,
    decode_start,
    encode_fault,
    encode_logprobs,
    encode_start,
    to_tree,
)
from cluster.wire.codec.learning import decode_learning, encode_learning
from cluster.wire.codec.proposal import (
    decode_distributions,
    decode_evidence,
    decode_next_tokens,
    decode_proposal,
    encode_distributions,
    encode_evidence,
    encode_listed,
    encode_proposal,
)
from cluster.wire.codec.target_info import decode_occupancy, encode_occupancy
from pilotfish.v1 import common_pb2
from pilotfish.v1 import target_pb2 as pb


class _OfRow(Protocol):
    row: int


Details = TypeVar("Details", bound=_OfRow)


def encode_step_batch(batch: StepBatch, client: str = "") -> pb.TargetServiceStepRequest:
    """Encode the rows of a step. `client` names the owner of the sequence ids."""
    rows = batch.rows
    trees = [row.tree for row in rows] if any(row.tree.tokens for row in rows) else []
    budgets = [row.next_budget for row in rows] if any(row.next_budget != NO_DRAFT for row in rows) else []
    return pb.TargetServiceStepRequest(
        sequence_ids=[row.sequence_id for row in rows],
        client=client,
        base_lens=[row.base_len for row in rows],
        pending_lens=[len(row.pending) for row in rows],
        pending=[token for row in rows for token in row.pending],
        decides=[row.decide for row in rows],
        tree_sizes=[len(tree.tokens) for tree in trees],
        tree_tokens=[token for tree in trees for token in tree.tokens],
        tree_parents=[parent for tree in trees for parent in tree.parents],
        next_max_nodes=[budget.max_nodes for budget in budgets],
        next_max_depths=[budget.max_depth for budget in budgets],
        details=[
            pb.VerifyRowDetails(
                row=index,
                start=None if row.start is None else encode_start(row.start),
                distributions=encode_distributions(row.distributions),
                wants_following=row.wants_following,
            )
            for index, row in enumerate(rows)
            if row.start is not None or row.distributions or row.wants_following
        ],
    )


def decode_step_batch(message: pb.TargetServiceStepRequest, prefix: str = "") -> StepBatch:
    """Decode the rows of a step, with the client's prefix before their ids. Raises `InvalidRequest`."""
    ids = decode_sequence_ids(message.sequence_ids, prefix=prefix)
    rows = len(ids)
    base_lens = _column("base_lens", message.base_lens, rows, 1, bounds.MAX_TOKENS)
    pending = _decode_pending(message, base_lens)
    bounds.count("decides", message.decides, rows, rows)
    decides = tuple(message.decides)
    trees = _decode_trees(message, decides)
    budgets = _decode_budgets(message, rows)
    columns = zip(ids, base_lens, pending, trees, decides, budgets, strict=True)
    found = [
        VerifyRow(sequence_id, base_len, tokens, tree, decide, None, (), budget)
        for sequence_id, base_len, tokens, tree, decide, budget in columns
    ]
    for field, entry in _details(message.details, rows):
        row = found[entry.row]
        found[entry.row] = VerifyRow(
            row.sequence_id,
            row.base_len,
            row.pending,
            row.tree,
            row.decide,
            start=decode_start(entry.start, f"{field}.start") if entry.HasField("start") else None,
            distributions=decode_distributions(entry.distributions, row.tree, f"{field}.distributions"),
            next_budget=row.next_budget,
            wants_following=entry.wants_following,
        )
    return StepBatch(tuple(found))


def step_batch_to_bytes(batch: StepBatch) -> bytes:
    """Serialize the rows of a step, for the other ranks of a target."""
    return encode_step_batch(batch).SerializeToString()


def step_batch_from_bytes(data: bytes) -> StepBatch:
    """Deserialize the rows of a step. Raises `InvalidRequest`."""
    try:
        return decode_step_batch(pb.TargetServiceStepRequest.FromString(data))
    except DecodeError as error:
        raise InvalidRequest("batch", f"{len(data)} bytes", "a TargetServiceStepRequest message") from error


def _decode_pending(message: pb.TargetServiceStepRequest, base_lens: Sequence[int]) -> list[tuple[int, ...]]:
    lens = _column("pending_lens", message.pending_lens, len(base_lens), 1, bounds.MAX_TOKENS)
    for index, (length, base_len) in enumerate(zip(lens, base_lens, strict=True)):
        if length > base_len:
            bounds.integer(f"pending_lens[{index}]", length, 1, base_len)
    total = sum(lens)
    return _split(bounds.tokens("pending", message.pending, total, total), lens)


def _decode_trees(message: pb.TargetServiceStepRequest, decides: Sequence[bool]) -> list[TokenTree]:
    rows = len(decides)
    sizes = _column("tree_sizes", message.tree_sizes, rows, 0, bounds.MAX_TREE_NODES, default=0)
    total = sum(sizes)
    tokens = bounds.tokens("tree_tokens", message.tree_tokens, total, total)
    bounds.count("tree_parents", message.tree_parents, total, total)
    if not total:
        return [EMPTY_TREE] * rows
    trees: list[TokenTree] = []
    columns = zip(_split(tokens, sizes), _split(tuple(message.tree_parents), sizes), decides, strict=True)
    for index, (row_tokens, parents, decide) in enumerate(columns):
        if row_tokens and not decide:
            raise InvalidRequest(f"tree_sizes[{index}]", len(row_tokens), "0 if the row does not decide")
        trees.append(to_tree(row_tokens, parents, f"trees[{index}]") if row_tokens else EMPTY_TREE)
    return trees


def _decode_budgets(message: pb.TargetServiceStepRequest, rows: int) -> list[DraftBudget]:
    nodes = _column("next_max_nodes", message.next_max_nodes, rows, 0, bounds.MAX_TREE_NODES, default=0)
    depths = _column("next_max_depths", message.next_max_depths, rows, 0, bounds.MAX_TREE_DEPTH, default=0)
    if not (message.next_max_nodes or message.next_max_depths):
        return [NO_DRAFT] * rows
    return list(map(DraftBudget, nodes, depths))


def encode_step_result(result: StepResult, prefix: str = "") -> pb.TargetServiceStepResponse:
    """Encode the result of a step, without the client's prefix before the sequence ids."""
    verdicts = result.verdicts
    has_drafts = any(verdict.drafted for verdict in verdicts)
    return pb.TargetServiceStepResponse(
        sequence_ids=[verdict.sequence_id.removeprefix(prefix) for verdict in verdicts],
        kv=encode_occupancy(result.kv),
        step_seconds=result.step_seconds,
        draft_seconds=result.draft_seconds,
        base_lens=[verdict.base_len for verdict in verdicts],
        token_counts=[len(verdict.tokens) for verdict in verdicts],
        tokens=[token for verdict in verdicts for token in verdict.tokens],
        drafted=[verdict.drafted for verdict in verdicts] if has_drafts else [],
        details=[
            _encode_details(index, verdict, prefix) for index, verdict in enumerate(verdicts) if _has_details(verdict)
        ],
        learning=None if result.learning is None else encode_learning(result.learning),
    )


def _has_details(verdict: Verdict) -> bool:
    return not (
        verdict.fault is None
        and verdict.evidence is None
        and verdict.proposal is None
        and not verdict.logprobs
        and not verdict.prompt_logprobs
        and not verdict.forced
        and verdict.following is None
    )


def _encode_details(row: int, verdict: Verdict, prefix: str) -> pb.VerdictDetails:
    return pb.VerdictDetails(
        row=row,
        logprobs=[encode_logprobs(entry) for entry in verdict.logprobs],
        prompt_logprobs=[encode_logprobs(entry) for entry in verdict.prompt_logprobs],
        fault=encode_fault(verdict.fault) if verdict.fault is not None else None,
        evidence=encode_evidence(verdict.evidence) if verdict.evidence is not None else None,
        proposal=encode_proposal(verdict.proposal, prefix) if verdict.proposal is not None else None,
        forced_tokens=verdict.forced,
        following=None if verdict.following is None else encode_listed(verdict.following),
    )


def decode_step_result(message: pb.TargetServiceStepResponse) -> StepResult:
    """Decode the result of a step. Raises `InvalidRequest`."""
    ids = decode_sequence_ids(message.sequence_ids)
    rows = len(ids)
    base_lens = _column("base_lens", message.base_lens, rows, 1, bounds.MAX_TOKENS)
    drafted = _column("drafted", message.drafted, rows, 0, bounds.MAX_TREE_NODES, default=0)
    tokens = _decode_decided(message, drafted)
    verdicts = list(map(Verdict, ids, base_lens, tokens, drafted))
    for field, entry in _details(message.details, rows):
        verdicts[entry.row] = _decode_details(verdicts[entry.row], entry, field)
    return StepResult(
        verdicts=tuple(verdicts),
        kv=decode_occupancy(message.kv),
        step_seconds=bounds.number("step_seconds", message.step_seconds, 0.0, bounds.MAX_STEP_SECONDS),
        draft_seconds=bounds.number("draft_seconds", message.draft_seconds, 0.0, bounds.MAX_STEP_SECONDS),
        learning=decode_learning(message.learning) if message.HasField("learning") else None,
    )


def _decode_decided(message: pb.TargetServiceStepResponse, drafted: Sequence[int]) -> list[tuple[int, ...]]:
    counts = _column("token_counts", message.token_counts, len(drafted), 0, bounds.MAX_TREE_NODES + 1)
    for index, (count, nodes) in enumerate(zip(counts, drafted, strict=True)):
        if count > nodes + 1:
            bounds.integer(f"token_counts[{index}]", count, 0, nodes + 1)
    total = sum(counts)
    return _split(bounds.tokens("tokens", message.tokens, total, total), counts)


def _decode_details(verdict: Verdict, entry: pb.VerdictDetails, field: str) -> Verdict:
    decided, known = len(verdict.tokens), decode_next_tokens(entry, field)
    return Verdict(
        verdict.sequence_id,
        verdict.base_len,
        verdict.tokens,
        verdict.drafted,
        logprobs=_decode_logprobs(entry.logprobs, f"{field}.logprobs", decided, decided),
        prompt_logprobs=_decode_logprobs(entry.prompt_logprobs, f"{field}.prompt_logprobs", 0, verdict.base_len),
        fault=decode_fault(entry.fault, f"{field}.fault") if entry.HasField("fault") else None,
        evidence=decode_evidence(entry.evidence, f"{field}.evidence") if entry.HasField("evidence") else None,
        proposal=decode_proposal(entry.proposal, f"{field}.proposal") if entry.HasField("proposal") else None,
        forced=known.forced,
        following=known.listed,
    )


def _decode_logprobs(
    entries: Sequence[common_pb2.TokenLogprobs], field: str, least: int, most: int
) -> tuple[TokenLogprobs, ...]:
    """Decode no entries, or between `least` and `most`. Raises `InvalidRequest`."""
    if not entries:
        return ()
    bounds.count(field, entries, least, most)
    return tuple(decode_logprobs(entry, f"{field}[{index}]") for index, entry in enumerate(entries))


def _column(
    field: str, values: Sequence[int], rows: int, least: int, most: int, *, default: int | None = None
) -> tuple[int, ...]:
    """Return one number in `least … most` per row. A column with a `default` may be left out."""
    if default is not None and not values:
        return (default,) * rows
    bounds.count(field, values, rows, rows)
    return bounds.integers(field, values, least, most)


def _split(values: tuple[int, ...], lens: Sequence[int]) -> list[tuple[int, ...]]:
    """Split the values of all rows, which are one row after the other. `lens` sums to their number."""
    parts: list[tuple[int, ...]] = []
    end = 0
    for length in lens:
        first, end = end, end + length
        parts.append(values[first:end])
    return parts


def _details(entries: Sequence[Details], rows: int) -> Iterator[tuple[str, Details]]:
    """Yield each entry with its field. Raises `InvalidRequest` unless they are of ascending rows."""
    bounds.count("details", entries, 0, rows)
    least = 0
    for index, entry in enumerate(entries):
        field = f"details[{index}]"
        least = bounds.integer(f"{field}.row", entry.row, least, rows - 1) + 1
        yield field, entry
