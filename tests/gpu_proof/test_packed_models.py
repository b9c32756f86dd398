"""Models with stored weights whose linear layers are multiplied by the product of GPUs: their logits are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.errors import ConfigurationError
from tests.gpu_proof.device import IS_INTERPRETED, needs_kernels
from tests.support.engines.stored_model import TEXT, check_close, load, logits
from tests.support.models import quantized, tiny
from tests.unit.model.stored.test_stored_checkpoints import FAMILIES, write
from workers.forward import replace_linear
from workers.forward.gpu_product import gpu_product
from workers.forward.weights.base import LinearKernel, Storage

pytestmark = [*needs_kernels(), pytest.mark.skipif(not IS_INTERPRETED, reason="the models are on the CPU")]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers on the CPU get the kernels that they have on a GPU."""

    def make(storage: Storage, bias: torch.Tensor | None, _: str | None, dtype: torch.dtype) -> LinearKernel:
        return gpu_product(storage, bias, dtype) if storage.is_widened else storage.kernel(bias)

    monkeypatch.setattr(replace_linear, "make_linear_kernel", make)


@pytest.mark.parametrize("name", ["gptq in activation order", "fp8 in blocks", "bitsandbytes nf4"])
def test_the_logits_of_a_stored_model_are_those_of_the_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tiny.save(tmp_path / "plain", FAMILIES["qwen2"]), tmp_path / "model", name)
    found = logits(load(tmp_path / "model", str(tmp_path), native="off"), TEXT[:8])
    monkeypatch.undo()
    check_close(found, logits(load(tmp_path / "model", str(tmp_path), native="off"), TEXT[:8]))


def test_weights_that_gpus_have_no_product_for_are_refused_by_name(tmp_path: Path) -> None:
    settings = quantized.AWQ | {"group_size": 24}
    quantized.save(tiny.save(tmp_path / "plain", FAMILIES["llama"]), tmp_path / "model", quantized.awq(24), settings)
    message = r"stored is refused on CUDA: model\.layers\.0\.self_attn\.q_proj: groups of 24 .* it must be none, which"
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path / "model", str(tmp_path), native="off")
