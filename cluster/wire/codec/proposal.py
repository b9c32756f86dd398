"""Conversion between protobuf and types, for what both target and drafters have: proposals, evidence, listed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cluster.core import bounds
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftDistribution, Evidence, HiddenStates, ListedTokens, NextTokens, Proposal
from cluster.core.errors import InvalidRequest
from cluster.core.tree import ROOT, TokenTree
from cluster.wire.codec.common import decode_fault, decode_id, decode_tree, encode_fault, encode_tree
from cluster.wire.origin_counts import encode_origins
from pilotfish.v1 import common_pb2 as pb
from pilotfish.v1 import draft_pb2, target_pb2

_SUM_TOLERANCE = 1e-3


def encode_proposal(proposal: Proposal, prefix: str = "") -> pb.Proposal:
    """Encode a proposal, without the client's prefix before the sequence id."""
    return pb.Proposal(
        sequence_id=proposal.sequence_id.removeprefix(prefix),
        base_len=proposal.base_len,
        tree=encode_tree(proposal.tree),
        fault=encode_fault(proposal.fault) if proposal.fault is not None else None,
        probabilities=proposal.probabilities,
        ready=proposal.ready,
        distributions=encode_distributions(proposal.distributions),
        whole=not proposal.is_prunable,
        origins=encode_origins(proposal.origins),
    )


def decode_proposal(message: pb.Proposal, field: str) -> Proposal:
    """Decode a proposal. Raises `InvalidRequest`."""
    tree = decode_tree(message.tree, f"{field}.tree")
    return Proposal(
        sequence_id=decode_id(f"{field}.sequence_id", message.sequence_id),
        base_len=bounds.integer(f"{field}.base_len", message.base_len, 1, bounds.MAX_TOKENS),
        tree=tree,
        fault=decode_fault(message.fault, f"{field}.fault") if message.HasField("fault") else None,
        probabilities=_decode_probabilities(message.probabilities, tree, f"{field}.probabilities"),
        ready=bounds.integer(f"{field}.ready", message.ready, 0, len(tree)),
        distributions=decode_distributions(message.distributions, tree, f"{field}.distributions"),
        is_prunable=not message.whole,
        origins=_decode_origins(message.origins, tree, f"{field}.origins"),
    )


def encode_distributions(distributions: Sequence[DraftDistribution]) -> list[pb.DraftDistribution]:
    """Encode the distributions that the tokens of a tree were drawn from."""
    return [pb.DraftDistribution(tokens=one.tokens, probabilities=one.probabilities) for one in distributions]


def decode_distributions(
    values: Sequence[pb.DraftDistribution], tree: TokenTree, field: str
) -> tuple[DraftDistribution, ...]:
    """Decode no distributions, or one per node of `tree`. Raises `InvalidRequest`."""
    if not values:
        return ()
    bounds.count(field, values, len(tree), len(tree))
    return tuple(_decode_distribution(value, f"{field}[{index}]") for index, value in enumerate(values))


def encode_evidence(evidence: Evidence) -> pb.Evidence:
    """Encode evidence."""
    hidden = evidence.hidden
    return pb.Evidence(
        base_len=evidence.base_len,
        tree=encode_tree(evidence.tree),
        decisions=evidence.decisions,
        top_tokens=[token for tokens in evidence.top for token in tokens],
        top_count=len(evidence.top[0]) if evidence.top else 0,
        hidden=None
        if hidden is None
        else pb.HiddenStates(first=hidden.first, width=hidden.width, data=bytes(hidden.data)),
    )


def decode_evidence(message: pb.Evidence, field: str) -> Evidence:
    """Decode evidence. Raises `InvalidRequest`."""
    tree = decode_tree(message.tree, f"{field}.tree")
    if message.decisions:
        bounds.count(f"{field}.decisions", message.decisions, len(tree) + 1, len(tree) + 1)
        for index, token in enumerate(message.decisions):
            bounds.integer(f"{field}.decisions[{index}]", token, -1, bounds.MAX_TOKEN_ID)
    return Evidence(
        base_len=bounds.integer(f"{field}.base_len", message.base_len, 1, bounds.MAX_TOKENS),
        tree=tree,
        decisions=tuple(message.decisions),
        top=_decode_top(message, tree.depth() + 1, field),
        hidden=_decode_hidden(message.hidden, f"{field}.hidden") if message.HasField("hidden") else None,
    )


def decode_evidences(values: Sequence[pb.Evidence], field: str, base_len: int) -> tuple[Evidence, ...]:
    """Decode the evidence of one row with `base_len` committed tokens, in ascending order. Raises `InvalidRequest`."""
    bounds.count(field, values, 0, bounds.MAX_EVIDENCE)
    found: list[Evidence] = []
    for index, value in enumerate(values):
        evidence = decode_evidence(value, f"{field}[{index}]")
        least = found[-1].base_len if found else 1
        bounds.integer(f"{field}[{index}].base_len", evidence.base_len, least, base_len)
        if evidence.hidden is not None:
            bounds.integer(f"{field}[{index}].hidden", evidence.hidden.end, 0, base_len)
        found.append(evidence)
    return tuple(found)


def encode_listed(listed: ListedTokens) -> pb.ListedTokens:
    """Encode listed tokens."""
    return pb.ListedTokens(vocabulary_size=listed.vocabulary_size, tokens=listed.tokens, are_allowed=listed.are_allowed)


def decode_next_tokens(message: target_pb2.VerdictDetails | draft_pb2.DraftRow, field: str) -> NextTokens:
    """Decode the tokens that a grammar forces, and what it allows after them. Raises `InvalidRequest`."""
    listed = _decode_listed(message.following, f"{field}.following") if message.HasField("following") else None
    size = bounds.MAX_TOKEN_ID + 1 if listed is None else listed.vocabulary_size
    forced = bounds.tokens(f"{field}.forced_tokens", message.forced_tokens, 0, bounds.MAX_TREE_DEPTH, size)
    return NextTokens(forced, listed=listed)


def _decode_listed(message: pb.ListedTokens, field: str) -> ListedTokens:
    size = bounds.integer(f"{field}.vocabulary_size", message.vocabulary_size, 1, bounds.MAX_LISTED_VOCABULARY)
    tokens = bounds.tokens(f"{field}.tokens", message.tokens, 0, bounds.MAX_LISTED_TOKENS, size)
    for index, (before, token) in enumerate(pairwise(tokens), start=1):
        if token <= before:
            raise InvalidRequest(f"{field}.tokens[{index}]", token, f"above {before}")
    return ListedTokens(size, tokens, message.are_allowed)


def _decode_probabilities(values: Sequence[float], tree: TokenTree, field: str) -> tuple[float, ...]:
    """Decode no probabilities, or one per node, at most its parent's, so that the most probable nodes form a tree."""
    if not values:
        return ()
    bounds.count(field, values, len(tree), len(tree))
    for node, parent in enumerate(tree.parents):
        bounds.number(f"{field}[{node}]", values[node], 0.0, 1.0 if parent == ROOT else values[parent])
    return tuple(values)


def _decode_origins(values: Sequence[int], tree: TokenTree, field: str) -> tuple[DraftOrigin, ...]:
    """Decode no origins, or one per node. Only the coordinator knows which tokens a grammar forces."""
    if not values:
        return ()
    bounds.count(field, values, len(tree), len(tree))
    for node, value in enumerate(values):
        bounds.integer(f"{field}[{node}]", value, DraftOrigin.REQUEST, DraftOrigin.TRAINED)
    return tuple(map(DraftOrigin, values))


def _decode_distribution(message: pb.DraftDistribution, field: str) -> DraftDistribution:
    tokens = bounds.tokens(f"{field}.tokens", message.tokens, 1, bounds.MAX_DISTRIBUTION_TOKENS)
    if len(set(tokens)) < len(tokens):
        raise InvalidRequest(f"{field}.tokens", "a repeated token", "each token at most once")
    bounds.count(f"{field}.probabilities", message.probabilities, len(tokens), len(tokens))
    for index, value in enumerate(message.probabilities):
        bounds.number(f"{field}.probabilities[{index}]", value, 0.0, 1.0)
    total = sum(message.probabilities)
    if not abs(total - 1) <= _SUM_TOLERANCE:
        raise InvalidRequest(f"{field}.probabilities", f"a sum of {total:g}", f"a sum of 1 ± {_SUM_TOLERANCE}")
    return DraftDistribution(tokens, tuple(message.probabilities))


def _decode_top(message: pb.Evidence, most_positions: int, field: str) -> tuple[tuple[int, ...], ...]:
    width = bounds.integer(f"{field}.top_count", message.top_count, 0, bounds.MAX_TOP)
    tokens = bounds.tokens(f"{field}.top_tokens", message.top_tokens, 0, width * most_positions)
    if width and len(tokens) % width:
        raise InvalidRequest(f"{field}.top_tokens", f"{len(tokens)} entries", f"a multiple of top_count ({width})")
    return tuple(tokens[first : first + width] for first in range(0, len(tokens), width)) if width else ()


def _decode_hidden(message: pb.HiddenStates, field: str) -> HiddenStates:
    width = bounds.integer(f"{field}.width", message.width, 1, bounds.MAX_TAP_WIDTH)
    if len(message.data) % (2 * width):
        raise InvalidRequest(f"{field}.data", f"{len(message.data)} bytes", f"a multiple of {2 * width} bytes")
    return HiddenStates(bounds.integer(f"{field}.first", message.first, 0, bounds.MAX_TOKENS), width, message.data)
