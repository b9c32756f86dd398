"""A table of contexts says of each logit what the logits processors do to it."""

from __future__ import annotations

import ast
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core.request import SamplingParameters, ThinkingBudget
from cluster.core.tree import TokenTree
from workers.sampling import decision_table
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.context import DecisionContext, RowDecisions, StepContexts, tree_contexts
from workers.sampling.decision_table import NO_LIMIT, WORD, DecisionTable, table_of
from workers.sampling.warp import untruncated

VOCABULARY = 70
PLAIN = SamplingParameters(temperature=0.7)
TOKENS = [1, 2, 60, 2, 2, 69, 1]
CASES = {
    "temperature": PLAIN,
    "greedy": SamplingParameters(temperature=0.0),
    "repetition": replace(PLAIN, repetition_penalty=1.3),
    "least repetition": replace(PLAIN, repetition_penalty=1e-300),
    "sums": replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((2, 3.0), (5, -100.0))),
    "too short": replace(PLAIN, min_tokens=20, end_token_ids=(2, 33), logit_bias=((33, 1.0),)),
    "allowed": replace(PLAIN, allowed_token_ids=(0, 2, 40, 69), repetition_penalty=2.0),
    "thought": replace(PLAIN, thinking=ThinkingBudget(max_tokens=2, end=(41,)), allowed_token_ids=(3,)),
}


def warped(table: DecisionTable, logits: torch.Tensor) -> np.ndarray:
    """Logits as the table changes them, float32 `[rows, size]`."""
    size = logits.shape[1]
    found = logits.numpy().copy()
    for row, mask in enumerate(table.masks):
        if 0 <= mask < len(table.excluded):
            bits = np.unpackbits(table.excluded[mask].view(np.uint8), bitorder="little")[:size]
            found[row, bits == 1] = -math.inf
        entries = slice(table.ends[row], table.ends[row + 1])
        columns, factors, terms = table.columns[entries], table.factors[entries], table.terms[entries]
        own = logits.numpy()[row, columns]
        with np.errstate(divide="ignore", invalid="ignore"):
            changed = np.where(own > 0, own / factors, own * factors) + terms
        found[row, columns] = np.where(factors == 0, terms, changed)
    return found / np.where(table.temperatures == 0, np.float32(1), table.temperatures)[:, None]


@pytest.mark.parametrize("part", [(0, VOCABULARY), (0, 35), (35, 70)])
@pytest.mark.parametrize("has_grammar", [False, True])
def test_a_table_changes_logits_as_the_processors_do(part: tuple[int, int], has_grammar: bool) -> None:
    first, end = part
    mask = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(1)) < 0.5
    allowed = AllowedTokens(mask) if has_grammar else None
    contexts = [DecisionContext(sampling, TOKENS, 2, allowed) for sampling in CASES.values()]
    logits = torch.randn(len(contexts), VOCABULARY, generator=torch.Generator().manual_seed(2))[:, first:end]
    table = table_of(contexts, first, end - first)
    expected = untruncated(logits, contexts, first).numpy()
    np.testing.assert_array_equal(warped(table, logits), expected)


def test_rows_without_changes_have_no_mask_and_no_entries() -> None:
    contexts = [DecisionContext(sampling, TOKENS, 2) for sampling in (PLAIN, CASES["repetition"], PLAIN)]
    table = table_of(contexts, 0, VOCABULARY)
    assert table.masks.tolist() == [-1, 0, -1]
    assert table.ends.tolist() == [0, 0, 4, 4]
    assert table.rows.tolist() == [1] * 4
    assert (table.mask_count, table.most_entries, table.excluded.shape) == (1, 4, (0, -(-VOCABULARY // WORD)))


def test_a_step_without_changes_has_arrays_of_the_same_types() -> None:
    changed = replace(CASES["allowed"], top_k=3)
    plain, other = (table_of([DecisionContext(one, TOKENS, 2)] * 2, 0, VOCABULARY) for one in (PLAIN, changed))
    assert (plain.masks.tolist(), plain.ends.tolist(), plain.mask_count) == ([-1, -1], [0, 0, 0], 0)
    for name in {field.name for field in fields(DecisionTable)} - {"mask_count"}:
        found, expected = getattr(plain, name), getattr(other, name)
        assert (found.dtype, found.shape[1:]) == (expected.dtype, expected.shape[1:]), name
    assert not plain.most_entries
    assert not any(len(one) for one in (plain.excluded, plain.columns, plain.rows, plain.terms, plain.truncated))


def test_only_truncated_rows_have_bounds() -> None:
    samplings = [
        PLAIN,
        replace(PLAIN, top_k=500),
        replace(PLAIN, top_p=0.5),
        replace(PLAIN, min_p=0.1, temperature=0.0),
    ]
    table = table_of([DecisionContext(sampling, TOKENS, 2) for sampling in samplings], 0, VOCABULARY)
    assert table.truncated.tolist() == [1, 2]
    assert table.limits.tolist() == [NO_LIMIT, NO_LIMIT]
    assert table.shares.tolist() == [1.0, 0.5]
    assert table.gaps.tolist() == [-math.inf, -math.inf]


def test_rows_of_a_part_have_the_bounds_of_the_whole_vocabulary() -> None:
    contexts = [DecisionContext(replace(PLAIN, top_k=50, top_p=0.5), TOKENS, 2)]
    whole, part = table_of(contexts, 0, VOCABULARY), table_of(contexts, 30, 40, VOCABULARY)
    assert part.limits.tolist() == whole.limits.tolist() == [50]
    assert part.tails.tolist() == whole.tails.tolist()


def test_seeds_keep_their_64_bits() -> None:
    contexts = [DecisionContext(replace(PLAIN, seed=2**64 - 1), TOKENS, 2)]
    assert table_of(contexts, 0, VOCABULARY).seeds.view(np.uint64).tolist() == [2**64 - 1]


def test_kernels_get_every_array_of_the_table() -> None:
    """The kernels need the package `triton`, so their file is read and not imported."""
    file = Path(decision_table.__file__).parent / "winners.py"
    module = ast.parse(file.read_text("utf-8"))
    rows = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Rows")
    names = {ast.unparse(node.target) for node in rows.body if isinstance(node, ast.AnnAssign)}
    arrays = {field.name for field in fields(DecisionTable)} - {"rows", "mask_count"}
    assert names - {"column_tiles", "entry_tiles"} == arrays


def test_rows_of_a_step_have_the_table_of_their_contexts() -> None:
    """A step's contexts are made only where something changes single logits, and say the same as made one by one."""
    draw = torch.Generator().manual_seed(4)
    tree = TokenTree((5, 6, 7, 5, 1), (-1, -1, 0, 0, 3))
    masks = [AllowedTokens(torch.rand(VOCABULARY, generator=draw) < 0.5) for _ in range(5)]
    samplings = [*CASES.values(), replace(PLAIN, top_k=5, top_p=0.5), replace(PLAIN, min_p=0.1, seed=9)]
    rows = [RowDecisions(one, TOKENS[: 2 + at], 2, tree) for at, one in enumerate(samplings)]
    rows += [RowDecisions(PLAIN, TOKENS, 2), RowDecisions(PLAIN, TOKENS, 2, tree, (*masks, None))]
    contexts = StepContexts(rows)
    listed = [one for row in rows for one in tree_contexts(row.sampling, row.tokens, 2, row.tree, row.allowed)]
    assert [contexts[index] for index in range(len(contexts))] == list(contexts)
    assert len(contexts) == len(listed)
    for part in ((0, VOCABULARY), (35, 35)):
        found, expected = table_of(contexts, *part), table_of(listed, *part)
        for field in fields(DecisionTable):
            np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), field.name)
    assert set(found.truncated) > {found.truncated[0]}
