"""How much memory a sequence takes on the target: what the scheduler may know of the paged pool.

Layers that keep the same positions form a *group*. A group of full attention keeps every position;
one with a window keeps the last `window` positions (and the first `sinks`), and its older blocks go
back to the pool as the sequence grows. A block holds `block_size` positions of one of the group's
`tables`: all blocks of the pool are of one size, so any of them can serve any group.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that keep the same positions.

    Raises `InvalidRequest` for counts that are out of bounds.
    """

    tables: int = 1
    """Block tables that grow and shrink together: blocks per `block_size` positions."""
    window: int | None = None
    """A token sees this many positions, itself included: at least 2; `None` is all of them."""
    sinks: int = 0
    """First positions that stay visible beside the window."""

    def __post_init__(self) -> None:
        if self.tables < 1:
            raise InvalidRequest("tables", self.tables, "at least 1")
        if self.window is not None and self.window < 2:  # else the token before could go before the next is written
            raise InvalidRequest("window", self.window, "at least 2")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise InvalidRequest("sinks", self.sinks, "at least 0, and 0 without a window")

    def first_needed(self, stored_len: int) -> int:
        """First position that is still seen once `stored_len` tokens are committed (sinks aside)."""
        return 0 if self.window is None else max(0, stored_len - self.window + 1)

    def held(self, stored_len: int, end: int, block_size: int) -> int:
        """Blocks held while `stored_len` tokens are committed and positions up to `end - 1` have room."""
        last = -(-end // block_size)
        first = self.first_needed(stored_len) // block_size
        kept_sinks = min(first, -(-self.sinks // block_size))
        return self.tables * (kept_sinks + last - first)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All groups of a model. Lengths in tokens."""

    block_size: int
    groups: tuple[KvGroup, ...] = (KvGroup(),)

    @property
    def tables(self) -> int:
        """Blocks that `block_size` further positions take."""
        return sum(group.tables for group in self.groups)

    def held(self, stored_len: int, end: int | None = None) -> int:
        """Blocks of a sequence with `stored_len` committed tokens and room for positions up to `end - 1`."""
        end = stored_len if end is None else end
        return sum(group.held(stored_len, end, self.block_size) for group in self.groups)

    def room(self, end: int, blocks_free: int) -> int:
        """The longest length that a sequence with room for `end` tokens can grow to with `blocks_free` more blocks."""
        return (-(-end // self.block_size) + blocks_free // self.tables) * self.block_size

    def peak(self, length: int, step_tokens: int) -> int:
        """Most blocks held on the way to `length` tokens, when no step writes more than `step_tokens` of them.

        A bound from above: between two commits a window slides by less than a step.
        """
        total = 0
        for group in self.groups:
            everything = -(-length // self.block_size)
            if group.window is not None:
                sliding = -(-(group.window + step_tokens) // self.block_size) + 1
                everything = min(everything, sliding + -(-group.sinks // self.block_size))
            total += group.tables * everything
        return total

    def longest(self, blocks_total: int, step_tokens: int, most: int) -> int:
        """The longest sequence, up to `most` tokens, that a pool of `blocks_total` blocks can carry to its end."""
        if self.peak(most, step_tokens) <= blocks_total:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle, step_tokens) <= blocks_total else (low, middle)
        return low


@dataclass(frozen=True, slots=True)
class KvOccupancy:
    """The target's paged pool, in blocks."""

    blocks_total: int
    blocks_free: int
    """Blocks that no sequence holds; what the prefix cache keeps in them gives way."""
