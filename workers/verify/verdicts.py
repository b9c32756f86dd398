"""Parts of a verdict: why a row is refused, and the log-probabilities of the accepted path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch

from cluster.core.drafting import RowFault, RowFaultCode
from cluster.core.request import SamplingParameters, TokenLogprobs
from cluster.core.verification import Verdict, VerifyRow
from workers.forward.loaded_model import SourceParts
from workers.sampling.acceptance import Accepted
from workers.sampling.logprobs import launch_logprobs, token_logprobs
from workers.transfer import HostCopies
from workers.verify.decider import Decisions, LaunchedDecisions

UNDECIDABLE = "no token can be chosen: all logits of the model are NaN or -inf, or the request excludes all tokens"
"""The message for a row in which no token can be decided."""
_MOST_AHEAD = 64
"""Most decisions of a step whose log-probabilities are computed before it is known which of them are accepted. A GPU
reads their logits in float64 several times: 64 rows of a vocabulary of 128k are 64 MiB."""
KnownLogprobs = Mapping[int, Callable[[int], TokenLogprobs]]
"""Decision index → returns what is reported of the decided token, given that token."""


def row_problems(rows: Sequence[VerifyRow], vocabulary_size: int, max_context_len: int) -> Sequence[str | None]:
    """For each row the reason why it can never be served; `None` if it can.

    All rows are looked at together. One by one they are where some may not be served.
    """
    tokens = chain.from_iterable(tokens for row in rows for tokens in (row.pending, row.tree.tokens))
    are_served = max(tokens, default=0) < vocabulary_size and all(
        row.pending and row.base_len + len(row.tree.tokens) <= max_context_len and (row.decide or not row.tree.tokens)
        for row in rows
    )
    return [None if are_served else _row_problem(row, vocabulary_size, max_context_len) for row in rows]


def _row_problem(row: VerifyRow, vocabulary_size: int, max_context_len: int) -> str | None:
    """The reason why this row can never be served; `None` if it can."""
    if not row.pending:
        return "pending: it must hold at least one token"
    for name, tokens in (("pending", row.pending), ("tree.tokens", row.tree.tokens)):
        largest = max(tokens, default=0)
        if largest >= vocabulary_size:
            return f"{name}: token {largest} must be below the vocabulary size {vocabulary_size}"
    if row.base_len + row.tree.depth() > max_context_len:
        return (
            f"base_len: {row.base_len} + a tree of depth {row.tree.depth()} is beyond the context of "
            f"{max_context_len} tokens"
        )
    if row.tree and not row.decide:
        return "tree: it must be empty where nothing is decided"
    return None


def source_problem(source: tuple[int, ...], parts: SourceParts | None) -> str | None:
    """The reason why a model cannot read this source; `None` if it can."""
    if parts is None:
        return "source: it must be empty, because the model has no encoder" if source else None
    if not 1 <= len(source) <= parts.max_source_len:
        return f"source: {len(source)} tokens, but it must have between 1 and {parts.max_source_len}"
    if max(source) >= parts.vocabulary_size:
        return f"source: token {max(source)} must be below the encoder's vocabulary size {parts.vocabulary_size}"
    return None


def fault_verdict(row: VerifyRow, code: RowFaultCode, message: str, stored_len: int = 0) -> Verdict:
    """The verdict on a row that was not computed. `stored_len` is how many of its tokens the target holds."""
    return Verdict(row.sequence_id, row.base_len, fault=RowFault(code, message, stored_len))


def logprobs_ahead(
    launched: LaunchedDecisions, rows: Sequence[tuple[range, SamplingParameters]], copies: HostCopies
) -> KnownLogprobs:
    """Let a GPU compute the log-probabilities of all decided tokens, so that they arrive with the tokens.

    A row is the indices of its decisions, and its request's parameters. Empty on a CPU, and for many decisions.
    """
    wanted = [(index, sampling) for own, sampling in rows for index in own if index in launched.on_device]
    if not 0 < len(wanted) <= _MOST_AHEAD:
        return {}
    found = launch_logprobs(
        torch.stack([launched.logits[index] for index, _ in wanted]),
        torch.stack([launched.on_device[index] for index, _ in wanted]),
        [sampling.logprobs or 0 for _, sampling in wanted],
        [sampling.logprob_token_ids for _, sampling in wanted],
        copies,
    )
    return {index: partial(found.of, row) for row, (index, _) in enumerate(wanted)}


def path_logprobs(
    decisions: Decisions,
    paths: Sequence[tuple[range, Accepted, SamplingParameters]],
    ahead: KnownLogprobs | None = None,
) -> list[tuple[TokenLogprobs, ...]]:
    """For each path, the log-probabilities of its accepted tokens and of the alternatives that its request wants.

    A path is the indices of its row's decisions, the root's first, then one per node; what is accepted of the row; and
    the request's parameters. The log-probabilities are empty if the request wants none or no token is accepted, and on
    ranks that hold only their part of the logits. `ahead` are those of decided tokens. All tokens that a rule accepts
    in place of a decision, and all tokens that `ahead` lacks, together cost one wait for the device.
    """
    if not decisions.logits:
        return [()] * len(paths)
    taken = [_known_indices(decisions, *path) for path in paths]
    found: dict[tuple[int, int], TokenLogprobs] = {}
    missing: list[tuple[int, int, SamplingParameters]] = []
    for (_, accepted, sampling), indices in zip(paths, taken, strict=True):
        for index, token in zip(indices, accepted.tokens if indices else (), strict=True):
            if ahead and index in ahead and token == decisions.tokens[index]:
                found[index, token] = ahead[index](token)
            else:
                missing.append((index, token, sampling))
    if missing:
        computed = token_logprobs(
            torch.stack([decisions.logits[index] for index, _, _ in missing]),  # [tokens, vocabulary]
            [token for _, token, _ in missing],
            [sampling.logprobs or 0 for _, _, sampling in missing],
            [sampling.logprob_token_ids for _, _, sampling in missing],
        )
        found |= {(index, token): one for (index, token, _), one in zip(missing, computed, strict=True)}
    return [
        tuple(found[at] for at in zip(indices, accepted.tokens if indices else (), strict=True))
        for (_, accepted, _), indices in zip(paths, taken, strict=True)
    ]


def _known_indices(
    decisions: Decisions, indices: range, accepted: Accepted, sampling: SamplingParameters
) -> tuple[int, ...]:
    """Indices of the decisions of the accepted tokens, if all of them have logits, and the request wants any."""
    if sampling.logprobs is None or not accepted.tokens:
        return ()
    path = (indices[0], *(indices[node + 1] for node in accepted.nodes))
    return path if all(index in decisions.logits for index in path) else ()
