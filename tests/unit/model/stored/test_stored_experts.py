"""The experts of gpt-oss are served in MXFP4, as they are stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cluster.core.errors import ConfigurationError, ModelLoadError
from tests.support.engines.stored_model import TEXT, check_close, load, logits
from tests.support.models import tiny
from tests.unit.model.stored.test_stored_checkpoints import held
from workers.forward.experts import FastExperts
from workers.forward.native.packed_experts import PackedExperts
from workers.model.sharding import Share

EXPERTS = "model.layers.1.mlp.experts"


def config() -> GptOssConfig:
    return GptOssConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint with random blocks, and the logits of `TEXT` by weights that `transformers` unpacks from them."""
    directory = tmp_path_factory.mktemp("experts")
    source = tiny.save(directory / "plain", config(), sharpness=2.0)
    tensors = load_file(source / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(120, 125, (experts, outputs, inputs // 32), generator=draw, dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    reference.load_state_dict(tensors, strict=False)
    with torch.inference_mode():
        expected = reference(torch.tensor([TEXT])).logits[0]
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    path = directory / "model"
    path.mkdir()
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(settings))
    return path, expected


def test_logits_are_those_of_the_dequantized_experts(written: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    path, expected = written
    model = load(path, str(tmp_path))
    check_close(logits(model, TEXT), expected)
    experts = [part for part in model.module.modules() if isinstance(part, FastExperts)]
    assert len(experts) == 2
    for one in experts:
        assert isinstance(one.kernel, PackedExperts)
        assert one.kernel.nbytes == 4 * (192 * 64 + 64 * 96) * 9 // 16  # 4 bits, and 16 for each 32


def test_a_row_of_experts_does_not_depend_on_its_neighbours(written: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    model = load(written[0], str(tmp_path))
    experts = next(part for part in model.module.modules() if isinstance(part, FastExperts))
    draw = torch.Generator().manual_seed(1)
    x, chosen = torch.randn(9, 64, generator=draw), torch.randint(0, 4, (9, 1), generator=draw)
    chosen, weights = torch.cat([chosen, (chosen + 1) % 4], dim=1), torch.rand(9, 2, generator=draw)
    whole = experts(x, chosen, weights)
    for row in range(9):
        assert torch.equal(experts(x[row : row + 1], chosen[row : row + 1], weights[row : row + 1])[0], whole[row])


def test_several_ranks_are_refused(written: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(ConfigurationError, match=r"tensor_parallel: 2 is refused: .*experts are not divided"):
        held(written[0], Share(0, 2))


def test_blocks_of_another_shape_are_named(written: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    tensors = load_file(written[0] / "model.safetensors")
    tensors[f"{EXPERTS}.down_proj_blocks"] = tensors[f"{EXPERTS}.down_proj_blocks"][:, :, :2].contiguous()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((written[0] / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=r"down_proj_blocks is \[4, 64, 2, 16\]; it must be \[4, 64, 3, 16\]"):
        load(path, str(tmp_path))
