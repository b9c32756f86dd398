"""A target fuses taps as the draft would: the same features, from the draft's own weights and norms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.core.config.target_section import EvidenceSection, TargetSection
from cluster.core.errors import ConfigurationError, ModelLoadError
from tests.support.models import drafting_modules, public_drafts, tiny
from tests.support.models.public_drafts import DFLASH, HIDDEN, LLAMA, Tensors
from workers.draft.block.masked_pass import MaskedBlockPass
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.eagle.eagle_pass import EaglePass
from workers.draft.eagle.feature_pass import FeaturePass
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.files import load_drafter
from workers.model.drafting.fusion import load_fusion
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import read_draft
from workers.model.fused_taps import fused_width

CPU = torch.device("cpu")
LAYERS = 8
AUTHORS = LLAMA | {"draft_vocab_size": len(public_drafts.DRAFTED)}
EACH = ("fc_norm.0", "fc_norm.1", "fc_norm.2")
PUBLIC: dict[str, tuple[dict[str, Any], Tensors]] = {
    "eagle3": (AUTHORS, public_drafts.eagle3()),
    "norms": (AUTHORS | {"fc_norm": True}, public_drafts.eagle3(norms=EACH)),
    "joint norm": (
        AUTHORS | {"norm_before_fc": True},
        public_drafts.eagle3() | {"input_norm.weight": public_drafts.Draw(8).norm(3 * HIDDEN)},
    ),
    "dflash": (DFLASH, public_drafts.block()),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=LAYERS))


def draft_of(kind: str, target: Path, directory: Path) -> Path:
    """A draft of a public kind, or of a kind of `pilotfish distill`."""
    if kind in PUBLIC:
        return public_drafts.write(directory, *PUBLIC[kind])
    drafting_modules.save(target, directory, kind, (2, 1), int8=True)
    return directory


def features_of_draft(draft: Path, target: Path) -> Callable[[Tensor], Tensor]:
    """What the draft itself makes of taps, in float32."""
    loaded = load_drafter(draft, target, torch.float32, CPU)
    if isinstance(loaded.module, EagleHead):
        return EaglePass(loaded.module, loaded.ends, "float32", 8).features
    assert isinstance(loaded.module, PublicModule)
    if loaded.card.kind == "block":
        return MaskedBlockPass(loaded.module, loaded.ends, "float32")._fuse
    return FeaturePass(loaded.module, loaded.ends, "float32", 8).features


@pytest.mark.parametrize("kind", ["eagle", *PUBLIC])
def test_features_are_those_of_the_draft(kind: str, target: Path, tmp_path: Path) -> None:
    draft = draft_of(kind, target, tmp_path)
    card = read_draft(draft)
    taps = torch.randn(5, len(card.taps), card.hidden_size, generator=torch.Generator().manual_seed(1))

    features = load_fusion(draft, card.taps, CPU)(taps)

    torch.testing.assert_close(features, features_of_draft(draft, target)(taps), rtol=1e-5, atol=1e-5)
    assert features.shape == (5, fused_width(card))
    assert not torch.allclose(features, load_fusion(draft, card.taps, CPU)(taps.flip(1)))  # the order matters


@pytest.mark.parametrize("kind", ["block", "heads"])
def test_a_draft_that_reads_the_taps_themselves_has_no_fusion(kind: str, target: Path, tmp_path: Path) -> None:
    draft = draft_of(kind, target, tmp_path)
    assert fused_width(read_draft(draft)) is None
    with pytest.raises(ConfigurationError, match=r"target\.evidence\.fusion: .* must hold a draft that fuses its taps"):
        load_fusion(draft, (1, 2), CPU)
    section = TargetSection(evidence=EvidenceSection(taps=(1, 2), is_sent=True, fusion=str(draft)))
    with pytest.raises(ConfigurationError, match=r"target\.evidence\.fusion: .* the drafter reads taps"):
        TapReader((1, 2), section, HIDDEN)


def test_another_number_of_taps_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="taps"):
        load_fusion(draft_of("eagle", target, tmp_path), (1, 2, 3), CPU)
