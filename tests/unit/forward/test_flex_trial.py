"""A fused kernel is used only if it computes the same as the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from tests.support.models import tiny
from workers.forward.flex_attention import Flex, compiled_flex_attention, is_supported
from workers.forward.flex_trial import verified_flex_attention
from workers.forward.loaded_model import LoadedModel
from workers.kv.pool import KvPool
from workers.kv.spec import LayerShape
from workers.model.loading import load_model


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> Flex:
    """The kernel as `torch` defines it, over the whole pool."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return flex_attention


@pytest.fixture(scope="module")
def suited(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, KvPool]:
    directory = tiny.save(tmp_path_factory.mktemp("suited"), tiny.llama(head_dim=16))
    model = load_model(ModelSection(path=str(directory), device="cpu", native="off"))
    return model, KvPool(model.kv_spec, KvSection(block_size=16), blocks=8)


def test_a_kernel_that_computes_the_same_as_the_reference_is_used(
    suited: tuple[LoadedModel, KvPool], unfused: Flex
) -> None:
    assert verified_flex_attention(*suited, unfused) is unfused


def test_a_kernel_that_computes_something_else_is_not_used(
    suited: tuple[LoadedModel, KvPool], unfused: Flex, caplog: pytest.LogCaptureFixture
) -> None:
    def one_slot_short(*stored: torch.Tensor, block_mask: BlockMask, **options: object) -> torch.Tensor:
        def mask(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            return block_mask.mask_mod(row, head, query, slot) & (slot != 7 * 16 + 3)

        short = BlockMask.from_kv_blocks(
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            BLOCK_SIZE=block_mask.BLOCK_SIZE,
            mask_mod=mask,
            seq_lengths=block_mask.seq_lengths,
            compute_q_blocks=False,
        )
        return unfused(*stored, block_mask=short, **options)

    assert verified_flex_attention(*suited, one_slot_short) is None
    assert "differs from the reference" in caplog.text


def test_a_kernel_that_cannot_be_built_is_not_used(
    suited: tuple[LoadedModel, KvPool], caplog: pytest.LogCaptureFixture
) -> None:
    def unbuilt(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no compiler")

    assert verified_flex_attention(*suited, unbuilt) is None
    assert "no compiler" in caplog.text


def test_small_blocks_and_narrow_heads_are_not_supported() -> None:
    assert is_supported(LayerShape(2, 64), 16)
    assert not is_supported(LayerShape(2, 64), 8)
    assert not is_supported(LayerShape(2, 64), 24)
    assert not is_supported(LayerShape(2, 8), 16)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_the_fused_kernel_is_used_on_a_gpu(tmp_path: Path, dtype: str, block_size: int) -> None:
    directory = tiny.save(tmp_path, tiny.llama(head_dim=64))
    model = load_model(ModelSection(path=str(directory), device="cuda", dtype=dtype))
    assert (
        verified_flex_attention(model, KvPool(model.kv_spec, KvSection(block_size=block_size), blocks=50))
        is compiled_flex_attention()
    )
