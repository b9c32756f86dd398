"""A model whose weights stay as they are stored is never in memory twice while it is loaded."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path

import pytest
import torch

from tests.bench.processes.load_process import measure, most_loading_bytes
from tests.bench.random_model import Shape
from tests.bench.sections.target.memory import QUICK_LOADED, loading_section
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.stored_model import load
from workers.forward.native import decoder_packing
from workers.forward.native.packed_linear import PackedMatrix
from workers.forward.weights.base import KernelLayout, Storage
from workers.forward.weights.groups import GroupStorage
from workers.forward.weights.modules import StoredLinear
from workers.kv.huge_pages import Arena

SMALL = Shape(96, 192, 3, 3, 3, 128, head=32)
SECONDS = 200.0


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_matrix_is_freed_as_soon_as_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SMALL.write_gguf(tmp_path)
    held: list[int] = []
    values: list[weakref.ref[torch.Tensor]] = []
    pack = decoder_packing._Packer.pack

    def follow(packer: decoder_packing._Packer, model: torch.nn.Module) -> object:
        storages = (layer.storage for layer in model.modules() if isinstance(layer, StoredLinear))
        values.extend(weakref.ref(storage.values) for storage in storages if isinstance(storage, GroupStorage))
        return pack(packer, model)

    class Followed(PackedMatrix):
        def __init__(
            self, storage: Storage, bias: torch.Tensor | None, layout: KernelLayout, arena: Arena | None = None
        ) -> None:
            super().__init__(storage, bias, layout, arena)
            held.append(sum(reference() is not None for reference in values))

    monkeypatch.setattr(decoder_packing._Packer, "pack", follow)
    monkeypatch.setattr(decoder_packing, "PackedMatrix", Followed)
    assert load(tmp_path, str(KEPT)).native is not None
    assert len(values) == 7 * SMALL.layers + 1
    assert not any(reference() is not None for reference in values)
    in_layer = (4, 4, 1, 1)  # once its projections, output, gate and up, and down are packed
    layers = [7 * left + 1 + own for left in range(SMALL.layers - 1, -1, -1) for own in in_layer]
    assert held == [7 * SMALL.layers + 1, *layers, 1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_loading_takes_little_more_than_the_share_of_the_file(ranks: int, tmp_path: Path) -> None:
    QUICK_LOADED.write_gguf(tmp_path)
    whole = (tmp_path / "model.gguf").stat().st_size
    assert QUICK_LOADED.gguf_bytes(1) == pytest.approx(whole, rel=0.001)
    for found in measure(loading_section(tmp_path, ranks, KEPT), SECONDS):
        assert found.peak_bytes <= most_loading_bytes(QUICK_LOADED.gguf_bytes(ranks)), found
