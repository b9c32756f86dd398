"""What crosses to a drafter elsewhere: a feature of each token in place of the hidden states that it is made of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.target_section import TargetSection
from deploy.implied_settings import with_implied_settings
from tests.support.clusters.drafter_bytes import sent_bytes, shown_rows
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.models import drafting_modules, public_drafts, tiny
from tests.support.models.public_drafts import DFLASH, HIDDEN

LAYERS, STEPS = 8, 3
PROMPT = [3 + number % 60 for number in range(64)]
AROUND = 400
"""Most bytes of a call beside the states: the row, and the frames of HTTP/2 and of gRPC."""


def draft_settings(kind: str, target: Path, directory: Path) -> dict[str, Any]:
    if kind == "eagle":
        drafting_modules.save(target, directory, "eagle", (2, 1))
        return {"method": "eagle", "eagle": {"path": str(directory)}}
    return {"method": "block", "block": {"path": str(public_drafts.write(directory, DFLASH, public_drafts.block()))}}


@pytest.mark.parametrize(("kind", "taps"), [("eagle", 2), ("dflash", 3)])
async def test_one_feature_of_each_token_crosses_in_place_of_its_taps(kind: str, taps: int, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "target", tiny.llama(num_hidden_layers=LAYERS))
    draft = draft_settings(kind, directory, tmp_path / "draft")
    implied = with_implied_settings(tiny_cluster(directory, {**draft, "placement": "drafter"}))
    evidence = implied.target.evidence
    assert evidence.fusion is not None
    apart = implied.target.model_copy(update={"evidence": evidence.model_copy(update={"fusion": None})})

    async def measured(target: TargetSection, width: int) -> int:
        """The bytes of all rows, each of which is as large as its states of this width are."""
        rows = await asyncio.to_thread(shown_rows, target, PROMPT, STEPS)
        sizes = await sent_bytes(rows)
        for row, size in zip(rows, sizes, strict=True):
            hidden = row.evidence[0].hidden
            assert hidden is not None and hidden.width == width
            assert 2 * width * len(hidden) < size < 2 * width * len(hidden) + AROUND
        return sum(sizes)

    features, states = await measured(implied.target, HIDDEN), await measured(apart, taps * HIDDEN)

    positions = len(PROMPT) + STEPS
    assert abs(states - features - 2 * (taps - 1) * HIDDEN * positions) < AROUND
