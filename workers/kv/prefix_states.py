"""States of recurrent layers at the ends of cached blocks: where a new sequence with the same prefix can begin.

The keys and values of a cached block serve any sequence with the same tokens before it. A recurrent layer needs its
state after that block's last token besides, and a state takes the memory of many tokens' keys and values. So only some
block ends have one: the last one inside each prompt, those up to which two prompts were found to be equal, and the last
one of each answer. They have the keys of their blocks, which begin with the tenant's salt, and the least recently used
one makes room for the next. Marconi (Pan et al. 2024) chooses the same ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from workers.kv.state_slots import StateSlots


@dataclass(slots=True, eq=False)
class _Entry:
    slot: int
    is_reused: bool = False
    """Whether a sequence has begun here."""


class PrefixStates:
    """At most `capacity` states, by the key of the block that they follow. See `workers.kv.prefix_cache` for keys."""

    def __init__(self, capacity: int, slots: StateSlots) -> None:
        self.capacity = capacity
        self._slots = slots
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._claimed = 0

    def __contains__(self, key: bytes) -> bool:
        """Whether a state follows the block with this key. Asking does not count as a use."""
        return key in self._entries

    def __len__(self) -> int:
        """States that are held, without those that are claimed."""
        return len(self._entries)

    def claim(self, count: int) -> bool:
        """Make room for states that a step is about to compute. Returns whether there is; if not, nothing changes.

        Each of them is returned by `unclaim`.
        """
        if self._claimed + count > self.capacity:
            return False
        self._claimed += count
        self._shrink(0)
        return True

    def unclaim(self, count: int) -> None:
        """Return room that was claimed."""
        self._claimed -= count

    def put(self, key: bytes, slot: int) -> None:
        """Keep a state, which nobody may change any more, unless all room is claimed."""
        if key in self._entries:  # its bits are the same
            self._entries.move_to_end(key)
        elif self._claimed < self.capacity:
            self._shrink(1)
            self._entries[key] = _Entry(self._slots.hold(slot))

    def use(self, key: bytes) -> int:
        """The slot of the state after the block, with which a sequence begins. Raises `KeyError` if there is none."""
        entry = self._entries[key]
        entry.is_reused = True
        self._entries.move_to_end(key)
        return entry.slot

    def forget(self, key: bytes) -> None:
        """Drop a state unless a sequence has begun there."""
        entry = self._entries.get(key)
        if entry is not None and not entry.is_reused:
            self._slots.let_go(self._entries.pop(key).slot)

    def _shrink(self, more: int) -> None:
        """Drop the least recently used states until `more` have room."""
        while len(self._entries) + self._claimed + more > self.capacity:
            self._slots.let_go(self._entries.popitem(last=False)[1].slot)
