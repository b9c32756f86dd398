"""The tokens that may be chosen at a position: what bits say and what flags say is the same."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from workers.sampling.allowed_tokens import AllowedTokens

SIZES = (1, 7, 8, 9, 63, 64, 320, 1001)


def some_flags(size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.4


@pytest.mark.parametrize("size", SIZES)
def test_bits_flags_and_single_tokens_agree(size: int) -> None:
    flags = some_flags(size)
    of_flags = AllowedTokens(flags)
    of_bits = AllowedTokens.of_grammar(np.packbits(flags.numpy(), bitorder="little"), size, is_complete=True)
    for allowed in (of_flags, of_bits):
        assert allowed.mask.dtype is torch.bool and torch.equal(allowed.mask, flags)
        assert [allowed.permits(token) for token in range(size)] == flags.tolist()
        assert np.unpackbits(allowed.bits, bitorder="little").tolist() == flags.tolist() + [0] * (-size % 8)
    assert (of_flags.by_grammar, of_flags.is_complete) == (None, False)
    assert (of_bits.by_grammar, of_bits.is_complete) == (of_bits, True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("missing", [0, 1, 40])
def test_a_grammar_of_another_vocabulary_allows_no_token_beyond_either(size: int, missing: int) -> None:
    known = max(1, size - missing)
    bits = np.full(-(-known // 8), 255, dtype=np.uint8)
    fewer = AllowedTokens.of_grammar(bits, size, is_complete=False)
    assert fewer.mask.tolist() == [True] * min(size, 8 * len(bits)) + [False] * (size - 8 * len(bits))
    more = AllowedTokens.of_grammar(np.full(200, 255, dtype=np.uint8), size, is_complete=False)
    assert more.mask.tolist() == [True] * size
    assert int(np.unpackbits(more.bits).sum()) == size


@pytest.mark.parametrize(("offset", "size"), [(0, 320), (0, 50), (64, 100), (61, 100), (3, 317), (312, 8)])
def test_the_bits_of_a_part_are_those_of_its_tokens(offset: int, size: int) -> None:
    flags = some_flags(320)
    bits = AllowedTokens(flags).bits_of(offset, size)
    expected = flags[offset : offset + size].tolist() + [0] * (-size % 8)
    assert np.unpackbits(bits, bitorder="little").tolist() == expected


def test_what_a_grammar_allowed_is_freed_without_the_garbage_collector() -> None:
    """A step makes one for each node. With large vocabularies, the bits and flags of each take 150 kB."""
    gc.disable()
    try:
        allowed = AllowedTokens.of_grammar(np.full(40, 255, dtype=np.uint8), 320, is_complete=False)
        assert allowed.mask.all() and allowed.by_grammar is allowed
        rest = AllowedTokens(some_flags(320), by_grammar=allowed.by_grammar)
        known = weakref.ref(allowed)
        del allowed
        assert rest.by_grammar is known() is not None
        del rest
        assert known() is None
    finally:
        gc.enable()
