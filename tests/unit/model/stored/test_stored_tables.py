"""Embeddings stay as they are stored, and their rows have the bits of the de-quantized table."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.stored_model import TEXT, load, logits
from tests.support.models import stored_gguf, tiny
from tests.support.models.model_cases import gemma3
from tests.unit.model.stored.test_stored_gguf import converted
from workers.forward import replace_linear
from workers.forward.gpu_product import GpuProduct
from workers.forward.native.decoder import NativeDecoder
from workers.forward.weights.base import LinearKernel, Storage
from workers.forward.weights.modules import StoredEmbedding
from workers.forward.weights.plain import PlainStorage
from workers.model.loading import DTYPES
from workers.model.share import Share
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.loading import _embedding, load_stored
from workers.model.stored.parts import Region
from workers.model.stored.source import write_stored_in

EVERY = torch.arange(tiny.VOCABULARY)


def dense(file: Path, dtype: str) -> torch.Tensor:
    return GgufFile(file).matrix("model.embed_tokens.weight").dequantized().to(DTYPES[dtype])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_packed_table_computes_the_bits_of_a_plain_one(kind: str, dtype: str, tmp_path: Path) -> None:
    path, _ = converted(tmp_path, "llama", {"embed_tokens": kind, "lm_head": "Q8_0"})
    model = load(path, str(KEPT), dtype=dtype)
    assert isinstance(model.native, NativeDecoder)
    assert model.native.packed.embedding is None
    assert model.native.packed.table is not None
    found = logits(model, TEXT)
    table = dense(tmp_path / "model.gguf", dtype)
    model.native._decoder.embedding = table.data_ptr()
    assert torch.equal(logits(model, TEXT), found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scaled_table_stays_stored_and_the_packed_head_serves_as_it(dtype: str, tmp_path: Path) -> None:
    config = gemma3(hidden_size=96, intermediate_size=192, head_dim=32)
    directory, file = tiny.save(tmp_path / "model", config), tmp_path / "model.gguf"
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    stored_gguf.write(plain, file, "gemma3", {"embed_tokens": "Q8_0"})
    write_stored_in(directory, file)
    scaled = plain.get_input_embeddings()
    scaled.weight = nn.Parameter(dense(file, dtype))
    expected = scaled(EVERY)

    def make() -> PreTrainedModel:
        found: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        return found

    read: Any = load_stored(make, file, DTYPES[dtype], Share(0, 1)).get_input_embeddings()
    assert isinstance(read, StoredEmbedding)
    assert not read.is_shared
    assert torch.equal(read(EVERY), expected)
    served: Any = load(directory, str(KEPT), dtype=dtype).module.get_input_embeddings()
    assert isinstance(served, StoredEmbedding)
    assert served.is_shared is (shutil.which("cc") is not None)
    assert torch.equal(served(EVERY), expected)
    for wrong in (-1, tiny.VOCABULARY) if served.is_shared else ():
        with pytest.raises(IndexError):
            served(torch.tensor([wrong]))


@pytest.mark.parametrize("kind", ["Q6_K", "Q8_0", "Q4_1"])
def test_a_gpu_holds_a_tied_matrix_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear layers get the kernels of a GPU. Nothing is multiplied, so none is needed."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = tiny.llama(hidden_size=256, intermediate_size=256, tie_word_embeddings=True, **heads)
    path, _ = stored_gguf.convert(tmp_path, "llama", config, {"embed_tokens": kind})

    def make() -> PreTrainedModel:
        found: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        return found

    def on_gpu(storage: Storage, bias: torch.Tensor | None, *_: object) -> LinearKernel:
        return GpuProduct(storage.words(), bias)

    module = load_stored(make, tmp_path / "model.gguf", torch.bfloat16, Share(0, 1))
    embedding: Any = module.get_input_embeddings()
    table = weakref.ref(embedding.storage.scale)
    expected = embedding(EVERY)
    monkeypatch.setattr(replace_linear, "make_linear_kernel", on_gpu)
    replace_linear.replace_linear_layers(module)
    assert embedding.is_shared
    assert torch.equal(embedding(EVERY), expected)
    assert table() is None


class Shifted(nn.Embedding):
    """Does more than to scale its rows."""

    embed_scale = 2.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale + 1.0


def test_a_layer_that_does_more_keeps_a_table_of_its_own() -> None:
    table = PlainStorage(torch.randn(8, 4))
    assert _embedding(Shifted(8, 4, padding_idx=7), table, torch.float32) is None


def test_a_rank_without_outputs_reads_none(tmp_path: Path) -> None:
    converted(tmp_path, "llama")
    region = Region(slice(tiny.VOCABULARY, tiny.VOCABULARY), slice(0, 96))
    found = GgufFile(tmp_path / "model.gguf").matrix("lm_head.weight", None, region)
    assert (found.outputs, found.inputs) == (0, 96)
