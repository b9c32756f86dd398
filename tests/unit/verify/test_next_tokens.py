"""A drafting method on the target knows which tokens a grammar forces next, and which it allows after them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import ANY_TOKENS, DraftBudget, DraftRow, NextTokens, Proposal
from cluster.core.grammar import Grammar
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.verification import VerifyRow
from tests.support.engines.engine_rows import first_row, verify
from tests.support.models import tiny, tiny_tokenizer
from workers.draft.common.grammar_masks import allowed_at
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling.candidates import candidates
from workers.sampling.context import DecisionContext
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine

VOCABULARY, END = 320, 2
PROMPT = (5, 17, 33, 8, 60, 41)
BUDGET = DraftBudget(4, 4)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fish", "hello"]}, "swims": {"type": "boolean"}},
    "required": ["name", "swims"],
    "additionalProperties": False,
}


class Listener:
    """Drafts nothing, and keeps what it is told by the length of the text."""

    def __init__(self) -> None:
        self.told: dict[int, NextTokens] = {}

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        self.told |= {row.base_len: row.next_tokens for row in rows}
        return tuple(Proposal(row.sequence_id, row.base_len) for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Nothing is stored."""


def answer(directory: Path, sampling: SamplingParameters) -> tuple[list[int], dict[int, NextTokens]]:
    """The tokens of a text that is decoded with drafts asked for, and what the drafting method was told."""
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    listener = Listener()
    options = EngineOptions(directory=directory, method=listener)
    engine = TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=200), LocalDecider(), options)
    tokens = list(PROMPT)
    row = first_row("a", PROMPT, sampling)
    while True:
        verdict = verify(
            engine, VerifyRow(row.sequence_id, row.base_len, row.pending, start=row.start, next_budget=BUDGET)
        )
        assert verdict.fault is None, verdict.fault
        tokens.extend(verdict.tokens)
        if tokens[-1] == END or len(tokens) > 80:
            return tokens, listener.told
        row = VerifyRow(SequenceId("a"), len(tokens), (tokens[-1],))


def test_the_text_goes_on_as_the_drafting_method_was_told(tmp_path: Path) -> None:
    directory = tiny.save(tiny_tokenizer.byte_level(tmp_path), tiny.llama(vocab_size=VOCABULARY))
    sampling = SamplingParameters(temperature=0.0, end_token_ids=(END,), grammar=Grammar.of_schema(SCHEMA))
    tokens, told = answer(directory, sampling)
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
    _, told = answer(directory, SamplingParameters(temperature=0.0))
    assert set(told.values()) == {ANY_TOKENS}
    assert ANY_TOKENS.permits(0, 7) and allowed_at(ANY_TOKENS, 0) is None
