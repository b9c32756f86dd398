"""Matrices of the same inputs that a file has in different types stay as they are stored, side by side."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.stored_model import TEXT, check_logits, load, logits
from tests.support.models import stored_gguf, tiny
from workers.forward import linear, replace_linear
from workers.forward.linear import PackedKernel
from workers.forward.native import decoder_packing
from workers.forward.native.decoder import NativeDecoder
from workers.forward.weights.base import LinearKernel, Storage

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
QUANTS = {"v_proj": "Q6_K", "up_proj": "Q6_K", "down_proj": "Q6_K"}
"""Types beside Q4_K: those of Q4_K_M, and of a file whose gates and ups differ, too."""
PLAIN = {"k_proj": "BF16", "up_proj": "BF16", "down_proj": "BF16"}
"""Plain numbers beside Q4_K. Some processors multiply these in another type than quantized ones."""
ONLY_DOWN = {"down_proj": "BF16"}
ENDS = {"embed_tokens": "Q8_0", "lm_head": "Q8_0"}


def mixed(folder: Path, kinds: dict[str, str]) -> tuple[Path, int, PreTrainedModel]:
    """The directory of a model in these types, the bytes of the tensors in its file, and the reference."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tiny.llama(**sizes, head_dim=64, tie_word_embeddings=False)
    directory, reference = stored_gguf.convert(folder, "llama", config, kinds | ENDS, default="Q4_K")
    tensors = gguf.GGUFReader(folder / "model.gguf").tensors
    return directory, sum(int(tensor.n_bytes) for tensor in tensors), reference


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("kinds", [QUANTS, PLAIN, ONLY_DOWN], ids=["quants", "plain", "down"])
def test_logits_are_those_of_the_dequantized_weights(kinds: dict[str, str], native: str, tmp_path: Path) -> None:
    directory, _, reference = mixed(tmp_path, kinds)
    with torch.inference_mode():
        expected = reference(torch.tensor([TEXT])).logits[0]
    model = load(directory, str(KEPT), native=native)
    assert (model.native is not None) is (native == "auto")
    check_logits(model, expected)
    narrow = load(directory, str(KEPT), native=native, dtype="bfloat16")
    assert (narrow.native is not None) is (native == "auto")
    assert float((logits(narrow, TEXT) - expected).norm() / expected.norm()) < 0.05
    check_logits(narrow, logits(narrow, TEXT))  # no row changes a bit of another one


@pytest.mark.parametrize("kinds", [QUANTS, PLAIN], ids=["quants", "plain"])
def test_nothing_is_widened(kinds: dict[str, str], tmp_path: Path) -> None:
    directory, file_bytes, _ = mixed(tmp_path, kinds)
    native = load(directory, str(KEPT), dtype="bfloat16").native
    assert isinstance(native, NativeDecoder)
    assert [matrix.outputs for matrix in native.packed.layers[0].gate_up] == [512, 512]
    assert sum(part.nbytes for part in native.packed.memory) <= 1.05 * file_bytes
    before = set(linear._entries)
    model = load(directory, str(KEPT), dtype="bfloat16", native="off")
    kernels = [linear._entries[handle].kernel for handle in linear._entries.keys() - before]
    products = [kernel.packed.matrix.weight for kernel in kernels if isinstance(kernel, PackedKernel)]
    embedding: Any = model.module.get_input_embeddings()
    table = embedding.storage
    assert len(products) == len(kernels)
    assert sum(packed.nbytes for packed in products) + table.nbytes <= 1.05 * file_bytes


def test_gates_and_ups_in_two_matrices_have_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, *_ = mixed(tmp_path, {})
    joined = load(directory, str(KEPT), dtype="bfloat16")
    monkeypatch.setattr(decoder_packing, "stay_apart", lambda _: True)
    apart = load(directory, str(KEPT), dtype="bfloat16")
    for model, outputs in ((joined, [1024, 0]), (apart, [512, 512])):
        assert isinstance(model.native, NativeDecoder)
        assert [matrix.outputs for matrix in model.native.packed.layers[0].gate_up] == outputs
    assert torch.equal(logits(apart, TEXT), logits(joined, TEXT))


@pytest.mark.parametrize("kinds", [QUANTS, PLAIN], ids=["quants", "plain"])
def test_layers_get_kernels_of_what_is_stored(
    kinds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This does not depend on the device: on a GPU such layers have kernels of their own, too."""
    directory, file_bytes, _ = mixed(tmp_path, kinds)
    taken: list[Storage] = []

    def make(storage: Storage, bias: torch.Tensor | None, *_: object) -> LinearKernel:
        taken.append(storage)
        return storage.kernel(bias)

    monkeypatch.setattr(replace_linear, "make_linear_kernel", make)
    model = load(directory, str(KEPT), dtype="bfloat16", native="off")
    embedding: Any = model.module.get_input_embeddings()
    table = embedding.storage
    assert sum(storage.nbytes for storage in taken) + table.nbytes <= 1.05 * file_bytes
