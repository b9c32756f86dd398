"""Random proposals and evidence within their bounds."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftDistribution, Evidence, HiddenStates, Proposal, RowFault, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree

origins = st.sampled_from((DraftOrigin.REQUEST, DraftOrigin.EARLIER, DraftOrigin.TRAINED))
tokens = st.integers(0, 2**31 - 1)
names = st.text(min_size=1, max_size=30).map(SequenceId)
trees = st.lists(st.lists(tokens, min_size=1, max_size=6), max_size=5).map(
    lambda candidates: TokenTree.from_candidates(candidates, 24)
)


def all_fields(kind: type[Any], /, **values: Any) -> dict[str, Any]:
    """`values`, which have one for each field of a dataclass, so that a field without a trial is found.

    Fields that are not compared are not sent. Raises `ValueError` for a field without a value.
    """
    missing = {one.name for one in fields(kind) if one.compare} - values.keys()
    if missing:
        raise ValueError(f"{kind.__name__}: no value for {', '.join(sorted(missing))}")
    return values


faults = st.builds(
    RowFault,
    **all_fields(
        RowFault,
        code=st.sampled_from(RowFaultCode),
        message=st.text(max_size=40),
        stored_len=st.integers(0, 2**20),
    ),
)


@st.composite
def distributions(draw: st.DrawFn) -> DraftDistribution:
    """Draw a distribution over a power of two of tokens, so that its probabilities are exact in float32."""
    count = 2 ** draw(st.integers(0, 3))
    drawn = draw(st.lists(tokens, min_size=count, max_size=count, unique=True))
    return DraftDistribution(**all_fields(DraftDistribution, tokens=tuple(drawn), probabilities=(1 / count,) * count))


@st.composite
def hidden_states(draw: st.DrawFn, end: int) -> HiddenStates:
    """Draw the hidden states of positions before `end`."""
    count, width = draw(st.integers(0, min(end, 3))), draw(st.integers(1, 4))
    data = draw(st.binary(min_size=2 * count * width, max_size=2 * count * width))
    first = draw(st.integers(0, end - count))
    return HiddenStates(**all_fields(HiddenStates, first=first, width=width, data=data))


@st.composite
def evidences(draw: st.DrawFn, base_len: int) -> Evidence:
    """Draw what a step at `base_len` tokens showed."""
    tree = draw(trees)
    decisions = draw(st.lists(st.integers(-1, 2**31 - 1), min_size=len(tree) + 1, max_size=len(tree) + 1))
    width = draw(st.integers(1, 4))
    top = st.lists(tokens, min_size=width, max_size=width).map(tuple)
    return Evidence(
        **all_fields(
            Evidence,
            base_len=base_len,
            tree=tree,
            decisions=tuple(decisions) if draw(st.booleans()) else (),
            top=tuple(draw(st.lists(top, max_size=tree.depth() + 1))),
            hidden=draw(st.none() | hidden_states(base_len)),
        )
    )


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    tree = draw(trees)
    likelihoods = tuple(1 / 2**depth for depth in tree.depths())  # floats of 32 bits hold these exactly
    return Proposal(
        **all_fields(
            Proposal,
            sequence_id=draw(names),
            base_len=draw(st.integers(1, 2**20)),
            tree=tree,
            fault=draw(st.none() | faults),
            probabilities=likelihoods if draw(st.booleans()) else (),
            distributions=tuple(draw(distributions()) for _ in tree.tokens) if draw(st.booleans()) else (),
            is_prunable=draw(st.booleans()),
            ready=draw(st.integers(0, len(tree))),
            origins=tuple(draw(origins) for _ in tree.tokens) if draw(st.booleans()) else (),
        )
    )
