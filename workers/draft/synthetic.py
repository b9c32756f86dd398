"""NOT LOSSLESS, for experiments: drafts without a model, with a chosen cost, accepted at chosen rates.

With this drafter, the target accepts drafted tokens at random instead of by its own decisions (see
`workers.sampling.rules.synthetic`). This measures the gain from drafts of a given quality and speed before such drafts
exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from cluster.core.config.base import Rate
from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from cluster.core.kv import KvLayout
from workers.draft.common.trees.calibration import Calibration
from workers.draft.common.trees.expander import DraftedToken, ExpansionRow
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.tree_drafter import TreeDrafter
from workers.draft.registry import register
from workers.kv.allocator import BlockAllocator
from workers.sampling.rules.synthetic import synthetic_token

_LONGEST = 1 << 30


class SyntheticSettings(ExpansionSettings):
    """NOT LOSSLESS: drafts whose acceptance rate and cost are settings."""

    reads_target_files: ClassVar[bool] = True
    renamed: ClassVar[dict[str, str]] = {"synthetic_acceptance": "acceptance", "synthetic_seconds": "seconds"}

    acceptance: Annotated[tuple[Rate, ...], Field(min_length=1, max_length=64)] = (0.8,)
    """Probability that a drafted token is accepted, by depth from 1; the last value holds for all deeper tokens."""
    seconds: Annotated[float, Field(ge=0, le=10)] = 0.001
    """Time of one forward pass of the drafter, in seconds."""


class SyntheticExpander:
    """Drafts one token per row, a function of the sequence's seed and the position. A pass takes `seconds`."""

    max_context_len = _LONGEST
    """Largest number of tokens after which the model can draft another."""

    def __init__(
        self,
        rates: Sequence[float],
        seconds: float,
        vocabulary_size: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rates = rates
        self._seconds = seconds
        self.vocabulary_size = vocabulary_size
        """All tokens are below this value."""
        self._sleep = sleep
        # There are no keys and values to store, so the tables are lists of tokens only.
        self.memory = BlockAllocator(1, KvLayout(1, groups=()), prefix_cache=False)
        """The memory that holds the tables."""

    def expand(self, rows: Sequence[ExpansionRow]) -> list[tuple[DraftedToken, ...]]:
        """Commit each row's tokens to its table, and draft the tokens that may follow. This is one forward pass."""
        self._sleep(self._seconds)
        found: list[tuple[DraftedToken, ...]] = []
        for row in rows:
            self.memory.commit(row.table, row.tokens)
            token = synthetic_token(row.start.sampling.seed, row.table.stored_len, self.vocabulary_size)
            rate = self._rates[min(row.depth, len(self._rates)) - 1]
            found.append(((token, rate),) if row.is_last else ())
        return found


def _target_settings(settings: SyntheticSettings) -> dict[str, Any]:
    """The settings that make the target accept drafted tokens at random."""
    return {"acceptance": "synthetic", "synthetic.rates": settings.acceptance}


@register("synthetic", SyntheticSettings, target_settings=_target_settings)
def create_synthetic(settings: SyntheticSettings, draft: DraftSection, target: TargetSection) -> TreeDrafter:
    """Create the method `synthetic`.

    Raises `ConfigurationError` when the target's configuration is not on this machine, and `ModelLoadError` when it
    cannot be read.
    """
    from workers.model.target_ends import read_config

    directory = Path(target.path)
    if not (directory / "config.json").is_file():
        raise ConfigurationError(f"target.path: {str(directory)!r} must hold the config.json of the target")
    vocabulary_size = read_config(directory).get_text_config().vocab_size
    expander = SyntheticExpander(settings.acceptance, settings.seconds, vocabulary_size)
    return TreeDrafter(expander, settings, draft, calibration=Calibration(trust=1.0))
