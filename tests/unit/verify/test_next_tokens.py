"""Drafting methods, on the target and elsewhere, know which tokens a grammar forces, and which it allows after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import ANY_TOKENS, DraftBudget, DraftRow, ListedTokens, NextTokens, Proposal
from cluster.core.grammar import Grammar
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.verification import VerifyRow
from tests.support.engines.engine_rows import first_row, verify
from tests.support.models import tiny, tiny_tokenizer
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling.allowed_tokens import allowed_at
from workers.sampling.candidates import candidates
from workers.sampling.context import DecisionContext
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine
from workers.verify.grammars import listed_tokens

VOCABULARY, END = 320, 2
PROMPT = (5, 17, 33, 8, 60, 41)
BUDGET = DraftBudget(4, 4)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fish", "hello"]}, "swims": {"type": "boolean"}},
    "required": ["name", "swims"],
    "additionalProperties": False,
}


Told = dict[int, NextTokens]
"""What is told of next tokens, by the length of the text before them."""


class Listener:
    """Drafts nothing, and keeps what it is told by the length of the text."""

    def __init__(self) -> None:
        self.told: Told = {}

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        self.told |= {row.base_len: row.next_tokens for row in rows}
        return tuple(Proposal(row.sequence_id, row.base_len) for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Nothing is stored."""


def answer(
    directory: Path, sampling: SamplingParameters, *, wants_following: bool = True
) -> tuple[list[int], Told, Told]:
    """The tokens of a text that is decoded with drafts asked for, and what was told by the length of the text.

    First what the drafting method on the target was told, then what drafters elsewhere are.
    """
    listed: Told = {}
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    listener = Listener()
    options = EngineOptions(directory=directory, method=listener)
    engine = TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=200), LocalDecider(), options)
    tokens = list(PROMPT)
    row = first_row("a", PROMPT, sampling)
    while True:
        asked = replace(row, next_budget=BUDGET, wants_following=wants_following)
        verdict = verify(engine, asked)
        assert verdict.fault is None, verdict.fault
        assert verify(engine, asked).following == verdict.following  # a repeated row is answered as before
        tokens.extend(verdict.tokens)
        if verdict.following is not None:
            listed[len(tokens)] = NextTokens(verdict.forced, listed=verdict.following)
        if tokens[-1] == END or len(tokens) > 80:
            return tokens, listener.told, listed
        row = VerifyRow(SequenceId("a"), len(tokens), (tokens[-1],))


def test_the_text_goes_on_as_the_drafting_method_was_told(tmp_path: Path) -> None:
    directory = tiny.save(tiny_tokenizer.byte_level(tmp_path), tiny.llama(vocab_size=VOCABULARY))
    sampling = SamplingParameters(temperature=0.0, end_token_ids=(END,), grammar=Grammar.of_schema(SCHEMA))
    tokens, told, listed = answer(directory, sampling)
    assert tokens[-1] == END
    assert sorted(told) == list(range(len(PROMPT) + 1, len(tokens)))
    for length, known in told.items():
        following = tokens[length : length + len(known.forced) + 1]
        for depth, token in enumerate(following):
            mask = allowed_at(known, depth)
            assert known.permits(depth, token)
            assert mask is not None and mask.mask[token]
        assert len(known.allowed) == VOCABULARY
        excluded = known.allowed.index(0)
        assert not known.permits(len(known.forced), excluded)
        assert allowed_at(known, len(known.forced) + 1) is None
    assert any(known.forced for known in told.values())
    assert any(not known.forced and sum(known.allowed) > 1 for known in told.values())
    assert listed.keys() == told.keys()  # nothing is told after the end
    for length, known in listed.items():
        assert (known.forced, known.mask()) == (told[length].forced, told[length].allowed)
        assert all(known.permits(len(known.forced), token) == one for token, one in enumerate(known.mask()))
    assert not answer(directory, sampling, wants_following=False)[2]


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([3, 5], ListedTokens(600, (3, 5), are_allowed=True)),
        ([token for token in range(600) if token not in (4, 599)], ListedTokens(600, (4, 599), are_allowed=False)),
        (range(256), ListedTokens(600, tuple(range(256)), are_allowed=True)),
        (range(300), ListedTokens(600, (), are_allowed=False)),
    ],
    ids=["few", "all but few", "as many as a list has", "too many for either list"],
)
def test_a_mask_becomes_the_shorter_list(allowed: Sequence[int], expected: ListedTokens) -> None:
    mask = torch.zeros(600, dtype=torch.bool)
    mask[list(allowed)] = True
    found = listed_tokens(mask)
    assert found == expected
    assert found.mask() == (mask.numpy().tobytes() if found.tokens else bytes([1]) * 600)
    assert not found.permits(600)


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([1, 4, 9, 11])])
def test_a_drafting_module_may_have_tokens_that_the_target_has_not(vocabulary: torch.Tensor | None) -> None:
    """Models of one family pad their vocabularies differently. A grammar allows none of the padding."""
    known = NextTokens((), bytes([1, 0] * 4))
    assert known.permits(0, 4) and not known.permits(0, 3) and not known.permits(0, 9)
    size = 12 if vocabulary is None else len(vocabulary)
    contexts = [DecisionContext(SamplingParameters(temperature=0.0), (5, 6), 1, allowed_at(known, 0))]
    (found,) = candidates(torch.ones(1, size), contexts, size, vocabulary)
    assert [one.token for one in found] == ([0, 2, 4, 6] if vocabulary is None else [4])


def test_without_a_grammar_nothing_is_known(tmp_path: Path) -> None:
    directory = tiny.save(tiny_tokenizer.byte_level(tmp_path), tiny.llama(vocab_size=VOCABULARY))
    _, told, listed = answer(directory, SamplingParameters(temperature=0.0))
    assert set(told.values()) == {ANY_TOKENS} and not listed
    assert ANY_TOKENS.permits(0, 7) and allowed_at(ANY_TOKENS, 0) is None
