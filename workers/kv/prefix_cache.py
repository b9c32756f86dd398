"""The prefix cache: full, committed blocks, found by a hash of all tokens up to their end.

A block's keys and values depend on every token before them. So its key is the hash of its tokens and of the key of
the block before it. The chain of keys begins with the tenant's salt, so that response times reveal nothing
about the prompts of other tenants.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from cluster.core.ids import BlockId

_DIGEST_BYTES = 32  # long enough that no client can find colliding prompts


def root_key(salt: str) -> bytes:
    """The key before the first block of every sequence with this salt."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"pilotfish kv").digest()


def next_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block with these tokens that follows the block (or the root) with the key `before`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()


def block_key(chained: bytes, table: int) -> bytes:
    """The key of one table's block. The tables of a sequence hold different layers of the same tokens."""
    return chained + table.to_bytes(2, "big")


class PrefixIndex:
    """Maps keys to blocks and orders the idle blocks, which no table holds, by last use.

    A block has at most one key, and a key at most one block.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, BlockId] = {}
        self._key_of: dict[BlockId, bytes] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Number of blocks that have a key and that no table holds."""
        return len(self._idle)

    def find(self, key: bytes) -> BlockId | None:
        """The block with this content, held or idle. The lookup does not count as a use."""
        return self._block_of.get(key)

    def add(self, key: bytes, block: BlockId) -> None:
        """Give a held block its key. If another block has the key already, nothing changes."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def mark_idle(self, block: BlockId) -> bool:
        """Mark a block that its last table released. Returns whether it has a key and stays, as most recently used."""
        if block not in self._key_of:
            return False
        self._idle[block] = None
        return True

    def mark_used(self, block: BlockId) -> None:
        """Mark an idle block as held by a table again."""
        del self._idle[block]

    def forget(self, block: BlockId) -> bytes | None:
        """Remove the block, whose content is about to change. Returns its key, if it had one."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        return key

    def evict(self) -> tuple[bytes, BlockId]:
        """Remove the least recently used idle block. Returns (key, block). Raises `KeyError` if none is idle."""
        block, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        return key, block
