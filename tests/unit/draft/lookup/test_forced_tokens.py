"""After tokens that a grammar forces, methods without a model draft what followed such a text earlier."""

from __future__ import annotations

import pytest

from cluster.core.drafting import DraftBudget, DraftRow, NextTokens, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from workers.draft.registry import create
from workers.serve.configuration import load_configuration

REPEATED = (5, 6, 7, 8, 9)
TEXT = (*REPEATED, *REPEATED, 20)
METHODS = ("lookahead", "ngram", "prediction", "recycling", "suffix")


def proposal(method: str, forced: tuple[int, ...], allowed: bytes, depth: int = 5) -> Proposal:
    """What a method drafts after the text, where a grammar forces some tokens and allows some after them."""
    configuration = load_configuration({}, {"draft.method": method, "draft.max_nodes": 16})
    start = SequenceStart(len(TEXT), SamplingParameters(temperature=0.0), prediction=REPEATED)
    row = DraftRow(
        SequenceId("a"), len(TEXT), TEXT, DraftBudget(16, depth), start, next_tokens=NextTokens(forced, allowed)
    )
    return create(configuration.draft, configuration.target).propose([row])[0]


@pytest.mark.parametrize("method", METHODS)
def test_the_draft_goes_on_after_forced_tokens(method: str) -> None:
    found = proposal(method, (5, 6), bytes([1]) * 32)
    assert found.tree.path_tokens(2) == (5, 6, 7)
    assert all(probability == 1.0 for probability in found.probabilities[:2])
    assert all(probability < 1.0 for probability in found.probabilities[2:])


@pytest.mark.parametrize("method", METHODS)
def test_what_is_excluded_after_forced_tokens_is_not_drafted(method: str) -> None:
    found = proposal(method, (5, 6), bytes(token != 7 for token in range(32)))
    assert found.tree.tokens[:2] == (5, 6)
    assert 7 not in found.tree.tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("forced", [(7, 5, 30), (30, 31, 30, 31, 30, 31)])
def test_a_draft_begins_with_forced_tokens_that_the_text_does_not_have(method: str, forced: tuple[int, ...]) -> None:
    found = proposal(method, forced, b"")
    length = min(5, len(forced))
    assert found.tree.tokens[:length] == forced[:length]
    assert found.tree.depth() <= 5
