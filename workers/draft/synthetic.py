"""NOT LOSSLESS, for experiments: guesses without a model, at a given price, that the target takes at given rates.

The target beside this drafter accepts by chance, not by right (`workers.sampling.rules.synthetic`): so what a system
would gain from drafts of some quality and speed is measured before there are such drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from cluster.core.config import DraftSection, TargetSection
from cluster.core.errors import ConfigurationError
from cluster.core.kv import KvLayout
from cluster.core.section import Rate
from workers.draft.expansion.calibration import Calibration
from workers.draft.expansion.draft_tree import Guess
from workers.draft.expansion.drafter import GrowingDrafter
from workers.draft.expansion.expander import Place
from workers.draft.expansion.settings import ExpansionSettings
from workers.draft.registry import register
from workers.kv.allocator import BlockAllocator
from workers.sampling.rules.synthetic import synthetic_token

_LONGEST = 1 << 30


class SyntheticSettings(ExpansionSettings):
    """NOT LOSSLESS: drafts whose acceptance rate and cost are set instead of found."""

    renamed: ClassVar[dict[str, str]] = {"synthetic_acceptance": "acceptance", "synthetic_seconds": "seconds"}

    acceptance: Annotated[tuple[Rate, ...], Field(min_length=1, max_length=64)] = (0.8,)
    """Probability that a drafted token is accepted, by depth from 1; the last value holds for all deeper tokens."""
    seconds: Annotated[float, Field(ge=0, le=10)] = 0.001
    """Time of one forward pass of the drafter, in seconds."""


class SyntheticExpander:
    """One guess after each token, drawn from the sequence's seed and the position; a pass takes `seconds`."""

    def __init__(
        self,
        rates: Sequence[float],
        seconds: float,
        vocabulary_size: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rates = rates
        self._seconds = seconds
        self._vocabulary_size = vocabulary_size
        self._sleep = sleep
        # Without layers there is nothing to store in blocks: tables are lists of tokens.
        self._memory = BlockAllocator(1, KvLayout(1, groups=()), prefix_cache=False)

    @property
    def memory(self) -> BlockAllocator:
        """See `Expander`."""
        return self._memory

    @property
    def max_context_len(self) -> int:
        """See `Expander`."""
        return _LONGEST

    @property
    def vocabulary_size(self) -> int:
        """See `Expander`."""
        return self._vocabulary_size

    def expand(self, places: Sequence[Place]) -> list[tuple[Guess, ...]]:
        """See `Expander`."""
        self._sleep(self._seconds)
        found: list[tuple[Guess, ...]] = []
        for place in places:
            self._memory.commit(place.table, place.tokens)
            token = synthetic_token(place.start.sampling.seed, place.table.stored_len, self._vocabulary_size)
            rate = self._rates[min(place.depth, len(self._rates)) - 1]
            found.append(((token, rate),) if place.is_last else ())
        return found


def _target_settings(settings: SyntheticSettings) -> dict[str, Any]:
    """The target, not the drafter, accepts by chance."""
    return {"acceptance": "synthetic", "synthetic.rates": settings.acceptance}


@register("synthetic", SyntheticSettings, target_settings=_target_settings)
def create_synthetic(settings: SyntheticSettings, draft: DraftSection, target: TargetSection) -> GrowingDrafter:
    """Create the method `synthetic`.

    Raises `ConfigurationError` when the target's configuration is not on this machine.
    """
    from transformers import AutoConfig

    directory = Path(target.path)
    if not (directory / "config.json").is_file():
        raise ConfigurationError(f"target.path: {str(directory)!r} must hold the config.json of the target")
    vocabulary_size = AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config().vocab_size
    expander = SyntheticExpander(settings.acceptance, settings.seconds, vocabulary_size)
    return GrowingDrafter(expander, settings, draft, calibration=Calibration(trust=1.0))
