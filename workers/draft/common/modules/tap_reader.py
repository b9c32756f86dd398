"""Reads the hidden states in evidence: the columns of one method's taps, and which positions are known."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import Evidence, Tap
from cluster.core.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor


class TapReader:
    """Selects a method's own taps from the hidden states of all taps that the target takes."""

    def __init__(
        self, taps: Sequence[Tap], target: TargetSection, hidden_size: int, fused_width: int | None = None
    ) -> None:
        """`taps` are in the order that the method wants, as it named them in its `EvidenceNeeds`.

        `fused_width` is the width of the feature that a target with `target.evidence.fusion` sends in their place;
        `None` for a method that reads the taps themselves. Raises `ConfigurationError` for a tap that the target does
        not take, and for a fusion that the method does not expect.
        """
        taken, fusion = target.evidence.taps, target.evidence.fusion
        self.is_fused = fusion is not None
        """Whether the target sends features, `[tokens, 1, feature size]`."""
        if fusion is not None:
            if fused_width is None:
                raise ConfigurationError(f"target.evidence.fusion: {fusion!r} is refused; the drafter reads taps")
            self._columns, self._taken, self._hidden_size = [0], 1, fused_width
            return
        missing = [tap for tap in taps if tap not in taken]
        if missing:
            raise ConfigurationError(f"target.evidence.taps: {list(taken)} lacks {missing}, which the drafter reads")
        self._columns = [taken.index(tap) for tap in taps]
        self._taken = len(taken)
        self._hidden_size = hidden_size

    def of_all_taps(self) -> TapReader:
        """A reader of everything that the target sends of a position, in the target's order."""
        found = copy(self)
        found._columns = list(range(self._taken))
        return found

    @property
    def position_bytes(self) -> int:
        """Bytes of what `read` returns of one position."""
        return 2 * len(self._columns) * self._hidden_size

    def read(self, evidence: Evidence, oldest: int = 0, most: int | None = None) -> tuple[int, Tensor] | None:
        """Position of the first row, and bfloat16 `[tokens, taps, hidden size]`, a copy; `None` without hidden states.

        Only positions from `oldest` on are read, and at most `most`. Raises `ValueError` for hidden states of another
        width than the target's taps have.
        """
        import torch

        hidden = evidence.hidden
        if hidden is None or not len(hidden):
            return None
        if hidden.width != self._taken * self._hidden_size:
            raise ValueError(
                f"hidden states: {hidden.width} values per position must be {self._taken} taps of {self._hidden_size}"
            )
        first = max(0, oldest - hidden.first)
        count = len(hidden) - first if most is None else min(most, len(hidden) - first)
        if count < 1:
            return None
        part = hidden.data[2 * hidden.width * first : 2 * hidden.width * (first + count)]
        data = bytearray(part) if isinstance(part, bytes) else part
        values = torch.frombuffer(data, dtype=torch.bfloat16).view(count, self._taken, self._hidden_size)
        return hidden.first + first, values.index_select(1, torch.tensor(self._columns))
