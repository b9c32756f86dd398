"""How many KV blocks a sequence needs on the target, as the scheduler computes it.

Layers that store the same positions form a *group*. A group with full attention stores every position. A group with a
window stores the last `window` positions and the first `sinks`; its older blocks return to the pool while the
sequence grows. A block holds `block_size` positions of one of the group's `tables`. All blocks have the same size, so
every block can serve every group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.errors import ContextLengthExceeded, InvalidRequest, context_reason


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that store the same positions.

    Raises `InvalidRequest` for values out of bounds.
    """

    tables: int = 1
    """Number of block tables, which is the number of blocks per `block_size` positions."""
    window: int | None = None
    """Number of positions that a token attends to, itself included; at least 2. `None` means all positions."""
    sinks: int = 0
    """Number of first positions that every token attends to in addition to the window."""

    def __post_init__(self) -> None:
        if self.tables < 1:
            raise InvalidRequest("tables", self.tables, "at least 1")
        if self.window is not None and self.window < 2:  # with 1, a block could be freed before the next token reads it
            raise InvalidRequest("window", self.window, "at least 2")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise InvalidRequest("sinks", self.sinks, "at least 0, and 0 without a window")

    def first_needed(self, stored_len: int) -> int:
        """Return the first position that later tokens attend to after `stored_len` tokens, apart from sinks."""
        return 0 if self.window is None else max(0, stored_len - self.window + 1)

    def held(self, stored_len: int, end: int, block_size: int) -> int:
        """Return the number of blocks held with `stored_len` committed tokens and positions up to `end - 1`."""
        last = -(-end // block_size)
        first = self.first_needed(stored_len) // block_size
        sink_blocks = min(first, -(-self.sinks // block_size))
        return self.tables * (sink_blocks + last - first)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layer groups of a model. Lengths are in tokens."""

    block_size: int
    groups: tuple[KvGroup, ...] = (KvGroup(),)
    tables: int = field(init=False, repr=False, compare=False)
    """Number of blocks per `block_size` positions, over all groups."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", sum(group.tables for group in self.groups))

    def held(self, stored_len: int, end: int | None = None) -> int:
        """Return the number of blocks held with `stored_len` committed tokens and positions up to `end - 1`."""
        end = stored_len if end is None else end
        return sum(group.held(stored_len, end, self.block_size) for group in self.groups)

    def added(self, end: int, more: int) -> int:
        """Return the number of blocks that a sequence with positions up to `end - 1` takes for `more` positions."""
        return self.tables * (-(-(end + more) // self.block_size) - -(-end // self.block_size))

    def max_length(self, end: int, blocks_free: int) -> int:
        """Return the longest length of a sequence that has blocks for `end` tokens and gets `blocks_free` more."""
        return (-(-end // self.block_size) + blocks_free // self.tables) * self.block_size

    def peak(self, length: int, step_tokens: int) -> int:
        """Return an upper bound on the blocks held until `length` tokens, if a step writes at most `step_tokens`.

        The bound holds because a window moves by less than `step_tokens` between two commits.
        """
        total = 0
        for group in self.groups:
            blocks = -(-length // self.block_size)
            if group.window is not None:
                sliding = -(-(group.window + step_tokens) // self.block_size) + 1
                blocks = min(blocks, sliding + -(-group.sinks // self.block_size))
            total += group.tables * blocks
        return total

    def longest(self, blocks_total: int, step_tokens: int, most: int) -> int:
        """Return the longest sequence, up to `most` tokens, that fits into a pool of `blocks_total` blocks."""
        if self.peak(most, step_tokens) <= blocks_total:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle, step_tokens) <= blocks_total else (low, middle)
        return low


@dataclass(frozen=True, slots=True)
class KvOccupancy:
    """The occupancy of the target's paged KV pool, in blocks."""

    blocks_total: int
    blocks_free: int
    """Blocks that no sequence holds. They may hold prefix-cache entries, which are evicted when needed."""


def check_fits(prompt_len: int, max_tokens: int, max_context_len: int, pool_tokens: int) -> None:
    """Refuse a request that could never finish, even alone.

    Raises `InvalidRequest` with the bound.
    """
    if prompt_len < 1:
        raise InvalidRequest("prompt", f"{prompt_len} tokens", "at least one token")
    if max_tokens < 1:
        raise InvalidRequest("max_tokens", max_tokens, "at least 1")
    pool = f"the target's KV pool holds {pool_tokens} tokens, for the prompt and the answer together"
    for bound, reason in ((max_context_len, context_reason(max_context_len)), (pool_tokens, pool)):
        if prompt_len >= bound:
            raise ContextLengthExceeded.of_prompt("prompt", prompt_len, bound - 1, reason)
        if prompt_len + max_tokens > bound:
            raise InvalidRequest("max_tokens", max_tokens, f"at most {bound - prompt_len}: {reason}")
