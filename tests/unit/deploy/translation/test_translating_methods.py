"""Drafts for encoder-decoder targets: modules that know the target, others that never do, and refused ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.models import context_free, drafting_modules, tiny
from tests.support.translation.answering import MOST, translate_all
from tests.support.translation.tiny_marian import marian_tokenizer
from workers.draft.registry import create
from workers.model.draft_shapes import HeadsShape

pytestmark = pytest.mark.slow

TAPS = (2,)
SHAPE = HeadsShape(depths=3, mix_rank=16, selector_rank=8)


@pytest.fixture(scope="module", params=sorted(tiny.ENCODER_DECODER_FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = marian_tokenizer(tmp_path_factory.mktemp(request.param))
    return tiny.save(tokenizer, tiny.ENCODER_DECODER_FAMILIES[request.param]())


def configure(directory: Path, method: str, settings: dict[str, Any], **drafting: Any) -> Configuration:
    drafting = {"method": method, "controller": "off", "max_nodes": 10, "max_depth": 5, method: settings} | drafting
    return tiny_cluster(directory, drafting | {"timeout_seconds": 30.0})


@pytest.mark.parametrize("method", ["block", "eagle"])
def test_a_module_for_decoder_only_targets_is_refused_with_the_name_of_its_setting(
    directory: Path, tmp_path: Path, method: str
) -> None:
    configuration = tiny_cluster(directory, {"method": method, method: {"path": str(tmp_path)}})
    with pytest.raises(ConfigurationError, match=f"draft.method: {method} is refused for the encoder-decoder target"):
        create(configuration.draft, configuration.target)


@pytest.fixture(scope="module", params=sorted(tiny.ENCODER_DECODER_FAMILIES))
def same_everywhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose distribution depends on nothing, so that heads are always right, or never."""
    return context_free.save_sourced_target(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def expected(same_everywhere: Path) -> list[tuple[int, ...]]:
    answers = asyncio.run(translate_all(configure(same_everywhere, "none", {}))).answers
    assert len({token for answer in answers for token in answer}) > 5
    return answers


@pytest.mark.parametrize("placement", ["target", "drafter"])
@pytest.mark.parametrize("method", ["heads", "blockwise"])
async def test_heads_that_know_the_distribution_are_accepted(
    same_everywhere: Path, expected: list[tuple[int, ...]], tmp_path: Path, method: str, placement: str
) -> None:
    """Sampled rows agree only if every depth is ranked with the noise of its own position."""
    heads = context_free.save_untrained(same_everywhere, tmp_path / "heads", "heads", TAPS, SHAPE)
    settings = {"path": str(heads), "weights": "float32"}
    found = await translate_all(configure(same_everywhere, method, settings, placement=placement))
    assert found.answers == expected
    assert found.accepted > 0.6 * len(expected) * MOST


@pytest.mark.parametrize("method", ["heads", "blockwise"])
async def test_heads_that_are_never_right_change_no_token(
    same_everywhere: Path, expected: list[tuple[int, ...]], tmp_path: Path, method: str
) -> None:
    written = {token for answer in expected for token in answer}
    never = [token for token in range(tiny.VOCABULARY) if token not in written]
    drafting_modules.save(same_everywhere, tmp_path / "heads", "heads", TAPS, never, shape=SHAPE, int8=True)
    found = await translate_all(configure(same_everywhere, method, {"path": str(tmp_path / "heads")}))
    assert found.answers == expected
    assert found.drafted > 0 == found.accepted
