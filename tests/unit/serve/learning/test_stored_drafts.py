"""What is stored of learned weights is a draft in the format of the draft's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import public_drafts
from tests.support.models.draft_references import Eagle3
from tests.unit.serve.learning.served import Served
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.eagle.feature_pass import FeaturePass
from workers.draft.eagle.head_pass import committed_piece
from workers.model.draft_card import VOCABULARY, WEIGHTS
from workers.model.drafting.files import load_drafter
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import read_draft


@pytest.mark.parametrize("kind", ["heads", "eagle", "block", "dspark"])
def test_a_stored_version_has_the_format_of_the_draft_and_is_read_again(tmp_path: Path, kind: str) -> None:
    """Own formats have a reduced vocabulary here, and the public one an output head of its own."""
    served = Served(tmp_path, kind, vocabulary=range(0, 96, 2))
    draft, version = tmp_path / kind, tmp_path / "version"
    if kind == "dspark":
        save_file(load_file(draft / WEIGHTS) | {"lm_head.weight": torch.ones(96, 48)}, draft / WEIGHTS)
    weights = {name: value.bfloat16().float() * 2 for name, value in served.weights.of("").items()}
    version.mkdir()
    served.weights.save(version, weights)
    found = served.weights.read(version)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    written = sum(file.stat().st_size for file in version.iterdir())
    assert written <= served.weights.saved_bytes <= written + 256 * (len(load_file(version / WEIGHTS)) + 1)
    assert read_draft(version) == read_draft(draft)
    others = load_file(draft / WEIGHTS).keys() - weights.keys()
    assert others == {"lm_head.weight" if kind == "dspark" else VOCABULARY}
    assert all(torch.equal(load_file(version / WEIGHTS)[name], load_file(draft / WEIGHTS)[name]) for name in others)


@pytest.mark.parametrize(
    ("first", "file"), [("midlayer.", "pytorch_model.bin"), ("layers.0.", WEIGHTS)], ids=["authors", "speculators"]
)
def test_a_stored_version_of_an_eagle3_head_has_the_names_of_its_format(tmp_path: Path, first: str, file: str) -> None:
    """The published pass over the stored tensors is the one that is served, and what is not learned is copied."""
    served = Served(tmp_path, "eagle3")
    draft, version = tmp_path / "eagle3", tmp_path / "version"
    tensors = public_drafts.eagle3(first)
    if file == WEIGHTS:
        (draft / "pytorch_model.bin").unlink()
        config = public_drafts.speculators_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        public_drafts.write(draft, config, tensors)
        served.restart()
    weights = {name: (value * 1.5).bfloat16().float() for name, value in served.weights.of("").items()}
    version.mkdir()
    served.weights.save(version, weights)

    found, stored = served.weights.read(version), load_file(version / WEIGHTS)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert {name: value.shape for name, value in stored.items()} == {name: one.shape for name, one in tensors.items()}
    assert all(torch.equal(stored[name], tensors[name]) for name in ("lm_head.weight", "d2t", "t2d"))
    assert read_draft(version) == read_draft(draft)
    assert sum(file.stat().st_size for file in version.iterdir()) <= served.weights.saved_bytes
    loaded = load_drafter(version, tmp_path / "target", torch.float32, torch.device("cpu"), "eagle")
    assert isinstance(loaded.module, PublicModule)
    head = FeaturePass(loaded.module, loaded.ends, "float32", scratch=8)
    reference = Eagle3(
        {name: value.float() for name, value in stored.items()},
        loaded.ends.embedding,
        first,
        norm_before_residual=file == WEIGHTS,
    )
    states = [torch.randn(6, 48, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    tokens = [3, 5, 8, 13, 21, 34]
    piece = committed_piece(ContextWindow(head.context_shape, torch.device("cpu")), 0, tokens, 1 << 20)
    outputs = head.run(head.features(torch.stack(states, dim=1)), [replace(piece, wanted=range(6))])
    wanted = reference.logits(reference.outputs(reference.features(states), tokens))
    torch.testing.assert_close(head.logits(outputs), wanted, rtol=1e-5, atol=1e-5)


def test_a_version_cannot_be_stored_without_the_files_of_the_draft(tmp_path: Path) -> None:
    served = Served(tmp_path)
    (tmp_path / "heads" / WEIGHTS).unlink()
    (tmp_path / "version").mkdir()
    with pytest.raises(ValueError, match="heads': it has no weights"):
        served.weights.save(tmp_path / "version", served.weights.of(""))
