"""The tokens that may be chosen at one position, as bits and as flags."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cluster.core.drafting import NextTokens

TokenBits = npt.NDArray[np.uint8]


class AllowedTokens:
    """The tokens that a grammar allows at one position, without those that complete a bad text.

    Grammars find bits, and kernels read bits. Flags of every token are made of them only where they are asked for.
    """

    def __init__(self, mask: torch.Tensor, is_complete: bool = False, by_grammar: AllowedTokens | None = None) -> None:
        """`mask` is bool [vocabulary], on the CPU."""
        self.is_complete = is_complete
        """Whether the answer matches the grammar and nothing can follow, so that only tokens that end it are
        allowed."""
        self._by_grammar = by_grammar
        self._is_of_grammar = False
        self._size = len(mask)
        self._mask: torch.Tensor | None = mask
        self._bits: TokenBits | None = None

    @classmethod
    def of_grammar(cls, bits: TokenBits, size: int, is_complete: bool) -> AllowedTokens:
        """What a grammar allows of tokens `0 … size - 1`: bit `i % 8` of byte `i // 8` is token `i`.

        Tokens without a bit are not allowed, and bits without a token are left out.
        """
        found = cls.__new__(cls)
        found.is_complete, found._by_grammar, found._is_of_grammar = is_complete, None, True
        found._size, found._mask = size, None
        whole = np.zeros(-(-size // 8), dtype=np.uint8)
        whole[: len(bits)] = bits[: len(whole)]
        found._bits = first_bits(whole, size)
        return found

    @property
    def by_grammar(self) -> AllowedTokens | None:
        """What the grammar alone allows; `None` without a grammar."""
        # No reference to itself: each would be kept, with its bits and flags, until the garbage collector runs.
        return self if self._is_of_grammar else self._by_grammar

    @property
    def mask(self) -> torch.Tensor:
        """bool [vocabulary], on the CPU."""
        if self._mask is None:
            flags = np.unpackbits(self.bits, count=self._size, bitorder="little")
            self._mask = torch.from_numpy(flags.view(np.bool_))
        return self._mask

    @property
    def bits(self) -> TokenBits:
        """uint8 [vocabulary / 8, rounded up]: bit `i % 8` of byte `i // 8` is token `i`; bits without a token are 0."""
        if self._bits is None:
            self._bits = np.packbits(self.mask.numpy(), bitorder="little")
        return self._bits

    def bits_of(self, offset: int, size: int) -> TokenBits:
        """The bits of `size` tokens from `offset` on, as `bits`."""
        if offset % 8:
            return np.packbits(self.mask[offset : offset + size].numpy(), bitorder="little")
        return first_bits(self.bits[offset // 8 : -(-(offset + size) // 8)], size)

    def permits(self, token: int) -> bool:
        """Whether the token of the vocabulary is allowed."""
        return bool(self.bits[token >> 3] >> (token & 7) & 1)


def allowed_at(known: NextTokens, depth: int) -> AllowedTokens | None:
    """What a sequence's grammar allows at a depth of a draft, from 0; `None` where nothing is known."""
    if depth > len(known.forced) or not (allowed := known.mask()):
        return None
    if depth == len(known.forced):
        return AllowedTokens(torch.frombuffer(bytearray(allowed), dtype=torch.bool))
    mask = torch.zeros(len(allowed), dtype=torch.bool)
    mask[known.forced[depth]] = True
    return AllowedTokens(mask)


def first_bits(bits: TokenBits, size: int) -> TokenBits:
    """The bits, of which those after the first `size` are 0, eight in a byte."""
    if size % 8:
        bits = bits.copy()
        bits[-1] &= (1 << size % 8) - 1
    return bits
