"""The sources of encoder-decoder models: their cross-attention keys and values, in blocks of the pool.

A source has a block table of its own. Position `i` of layer `l` holds the key and the value that decoder layer `l`
reads for token `i` of the source; they have the shape of the layer's own keys and values, so every block can serve
both. All sequences with the same source and salt share one table: beams, samples, and other requests. When the last of
them ends, the blocks stay in the prefix cache until their space is needed, and move to the host and disk tiers as all
others do.

An encoder reads its source as a whole, so a part of a source is of no use to another one: the first key of the chain is
a hash of salt and source. A source is padded to full blocks, since only full ones have a key.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from workers.kv.block_table import BlockTable
from workers.kv.pool import KvPool

_PADDING = 0


def source_salt(salt: str, source: Sequence[int], kind: str) -> str:
    """A salt for what depends on a whole source. `kind` tells the source's own blocks from those of its sequences."""
    digest = blake2b(salt.encode(), digest_size=32, person=f"source {kind}".encode()[:16])
    digest.update(b"\0" + array("q", source).tobytes())
    return digest.hexdigest()


@dataclass(slots=True, eq=False)
class StoredSource:
    """One source, and where its keys and values are stored."""

    tokens: tuple[int, ...]
    key: str
    table: BlockTable
    is_encoded: bool
    """Whether the blocks hold the keys and values; before, an encoder must read the source."""
    holders: int = 1
    """Number of sequences that read it."""
    hidden: torch.Tensor | None = None
    """The encoder's output, bfloat16 `[tokens, hidden]`. `None` if the store does not keep it, or has not seen it."""

    def __len__(self) -> int:
        return len(self.tokens)


class SourceStore:
    """The sources that the sequences of one pool read."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._stored: dict[str, StoredSource] = {}
        self.keeps_hidden = False
        """Whether the encoder's output is kept as long as a sequence reads the source."""

    def __len__(self) -> int:
        return len(self._stored)

    def acquire(self, tokens: Sequence[int], salt: str = "") -> StoredSource:
        """The source for one more sequence, with its blocks. Raises `KvPoolExhausted` and changes nothing."""
        key = source_salt(salt, tokens, "blocks")
        stored = self._stored.get(key)
        if stored is not None:
            stored.holders += 1
            return stored
        padded = self._padded(tokens)
        table = self._pool.open((*padded, _PADDING), key)  # the pool leaves the last token to be computed
        is_encoded = table.stored_len == len(padded)
        if not is_encoded:
            self._pool.release(table)
            table = self._pool.new_table(key)
            self._pool.reserve(table, len(padded))
        stored = self._stored[key] = StoredSource(tuple(tokens), key, table, is_encoded)
        return stored

    def share(self, tokens: Sequence[int], salt: str = "") -> StoredSource | None:
        """The source for one more sequence, if another one reads it already. Takes no blocks."""
        stored = self._stored.get(source_salt(salt, tokens, "blocks")) if tokens else None
        if stored is not None:
            stored.holders += 1
        return stored

    def stored(self, tokens: Sequence[int], salt: str = "") -> StoredSource | None:
        """The source, if a sequence reads it."""
        return self._stored.get(source_salt(salt, tokens, "blocks"))

    def mark_encoded(self, source: StoredSource, hidden: torch.Tensor | None = None) -> None:
        """Record that the blocks hold the keys and values of the source, and the encoder's output."""
        source.hidden = hidden if self.keeps_hidden else None
        self._pool.commit(source.table, self._padded(source.tokens))
        source.is_encoded = True

    def release(self, source: StoredSource) -> None:
        """Record that one sequence less reads the source. The last one frees its blocks."""
        source.holders -= 1
        if source.holders == 0:
            del self._stored[source.key]
            self._pool.release(source.table)

    def _padded(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return (*tokens, *[_PADDING] * (-len(tokens) % self._pool.block_size))
