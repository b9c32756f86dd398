"""Which block holds which content: full, committed blocks under the hash of all tokens up to their end.

A block's keys and values depend on every token before them, so its key is a chain: the hash of the block's
tokens and the key of the block before it. The chain begins with the tenant's salt, so that no tenant can tell
by the time an answer takes what another one has asked.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from cluster.core.ids import BlockId

_DIGEST_BYTES = 32  # chosen prompts must not collide, whoever chooses them


def root_key(salt: str) -> bytes:
    """Where the chains of all sequences with this salt begin."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"pilotfish kv").digest()


def next_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block with these tokens that follows the block, or the root, with key `before`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()


def block_key(chained: bytes, table: int) -> bytes:
    """The key of one table's block: the tables of a sequence hold different layers of the same tokens."""
    return chained + table.to_bytes(2, "big")


class PrefixIndex:
    """Keys and the blocks that hold their content; those that no table holds wait here to be used again.

    Integers and keys only. A block has at most one key and a key at most one block.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, BlockId] = {}
        self._key_of: dict[BlockId, bytes] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Blocks with a key that no table holds."""
        return len(self._idle)

    def find(self, key: bytes) -> BlockId | None:
        """The block with this content, held or idle. Looking does not make it recently used."""
        return self._block_of.get(key)

    def add(self, key: bytes, block: BlockId) -> None:
        """Note the content of a held block. Of two blocks with the same content the first one keeps the key."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def mark_idle(self, block: BlockId) -> bool:
        """No table holds the block any more: keep it if it has a key, as the one most recently used."""
        if block not in self._key_of:
            return False
        self._idle[block] = None
        return True

    def mark_used(self, block: BlockId) -> None:
        """An idle block is held again."""
        del self._idle[block]

    def forget(self, block: BlockId) -> bytes | None:
        """The block's content is about to change. Returns its key, if it had one."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        return key

    def evict(self) -> tuple[bytes, BlockId]:
        """Give up the idle block that was used least recently. Raises `KeyError` where there is none."""
        block, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        return key, block
