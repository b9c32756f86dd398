"""The experts of gpt-oss are served in MXFP4, as they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget
from cluster.core.errors import ConfigurationError, ModelLoadError
from tests.support.engines.colocated_decoding import decode_together
from tests.support.engines.engine_sequence import GREEDY, generate
from tests.support.engines.rank_group import configure_ranks, rank_group
from tests.support.engines.stored_model import TEXT, check_close, check_greedy, load, logits
from tests.support.models import quantized, tiny
from tests.unit.model.stored.test_sizes import held_bytes, tensors_of
from tests.unit.model.stored.test_stored_answers import (
    PROMPTS,
    RANKS,
    TOKENS,
    check_batched_and_drafted,
    check_texts_of_ranks,
    form,
    open_engine,
)
from workers.draft.registry import create
from workers.forward.attention import register
from workers.forward.experts import FastExperts
from workers.forward.native.packed_experts import PackedExperts
from workers.forward.weights.experts import StoredExperts
from workers.model import stored_choice
from workers.model.rank_bytes import rank_bytes
from workers.model.sharding import complete_plan
from workers.model.share import Share
from workers.model.stored.loading import load_stored
from workers.model.stored.quantized_checkpoint import stored_bytes
from workers.model.stored_choice import choose_stored
from workers.verify.build import build_engine

EXPERTS = "model.layers.1.mlp.experts"


def config(heads: int = 4, kv_heads: int = 2) -> GptOssConfig:
    return GptOssConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
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
def reference_and_path(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    return write(tmp_path_factory.mktemp("experts"), config())


def write(directory: Path, config: GptOssConfig) -> tuple[PreTrainedModel, Path]:
    """A model with weights that `transformers` unpacks from random blocks, and a checkpoint with these."""
    source = tiny.save(directory / "plain", config, sharpness=2.0)
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
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    path = directory / "model"
    path.mkdir()
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(settings))
    return reference, path


@pytest.fixture(scope="module")
def written(reference_and_path: tuple[PreTrainedModel, Path]) -> tuple[Path, torch.Tensor]:
    """The checkpoint, and the reference's logits of `TEXT`."""
    reference, path = reference_and_path
    with torch.inference_mode():
        return path, reference(torch.tensor([TEXT])).logits[0]


@pytest.mark.parametrize("native", ["auto", "off"])
def test_texts_are_what_the_dequantized_experts_decide(
    native: str, reference_and_path: tuple[PreTrainedModel, Path]
) -> None:
    reference, path = reference_and_path
    engine = open_engine(path, native)
    texts = [generate(engine, prompt, TOKENS) for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        check_greedy(reference, prompt, text)
    check_batched_and_drafted(engine, texts)


@pytest.mark.slow
def test_three_ranks_write_what_the_dequantized_experts_decide(tmp_path: Path) -> None:
    reference, path = write(tmp_path, config(heads=6, kv_heads=3))
    with rank_group(RANKS) as group:
        check_texts_of_ranks(form(group, path), reference)
        check_own_drafts(group.form(configure_ranks(path, RANKS, layers=2, quantization="stored")), reference)


def test_experts_draft_for_several_texts_and_change_none(reference_and_path: tuple[PreTrainedModel, Path]) -> None:
    reference, path = reference_and_path
    configuration = configure_ranks(path, 1, layers=2, quantization="stored")
    engine = build_engine(configuration.target, method=create(configuration.draft, configuration.target))
    try:
        check_own_drafts(engine, reference)
    finally:
        engine.close()


def check_own_drafts(engine: Any, reference: PreTrainedModel) -> None:
    """Check the texts of an engine whose own layers draft, all of them: what they draft is decided."""
    alone = [generate(engine, prompt, TOKENS) for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, alone, strict=True):
        check_greedy(reference, prompt, text)
    requests = {str(index): (prompt, GREEDY) for index, prompt in enumerate(PROMPTS)}
    decoded = decode_together(engine.step, requests, TOKENS, DraftBudget(4, 4)).values()
    assert [one.answer[:TOKENS] for one in decoded] == alone
    assert all(one.accepted >= TOKENS // 2 for one in decoded)


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


def test_experts_that_the_ranks_do_not_divide_are_refused(written: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(ConfigurationError, match=r"the inner numbers of .* = 96 are 3 blocks of 32"):
        held_experts(written[0], Share(0, 4))
    with pytest.raises(ConfigurationError, match=r"tensor_parallel = 3 does not divide 4 experts"):
        Share(0, 3, expert_parallel=True).experts(4)


@pytest.mark.parametrize(("ranks", "expert_parallel"), [(2, False), (2, True), (4, True)])
def test_ranks_have_the_whole_together(written: tuple[Path, torch.Tensor], ranks: int, expert_parallel: bool) -> None:
    """Two ranks that divide three blocks of 32 inner numbers have one and two of them."""
    whole = held_experts(written[0], Share(0, 1))
    parts = [held_experts(written[0], Share(rank, ranks, expert_parallel)) for rank in range(ranks)]
    draw = torch.Generator().manual_seed(2)
    x, weights = torch.randn(7, 64, generator=draw), torch.rand(7, 2, generator=draw)
    chosen = torch.randn(7, 4, generator=draw).topk(2).indices
    found = [one._plain.mix(x, chosen - one.part.first_expert, weights) for one in parts]
    torch.testing.assert_close(sum(found), whole(x, chosen, weights), rtol=1e-5, atol=1e-4)
    assert all(float(one.abs().sum()) > 0 for one in found)
    assert sum(map(size, parts)) == size(whole)


@pytest.mark.parametrize(("ranks", "expert_parallel"), [(1, False), (2, False), (2, True)])
def test_a_rank_takes_what_it_holds(written: tuple[Path, torch.Tensor], ranks: int, expert_parallel: bool) -> None:
    models = [held_model(written[0], Share(rank, ranks, expert_parallel)) for rank in range(ranks)]
    experts = [[part for part in one.modules() if isinstance(part, StoredExperts)] for one in models]
    sizes = [
        sum(one.nbytes for part in parts for expert in part.experts for one in tensors_of(expert)) for parts in experts
    ]
    most = max(size + held_bytes(one) for size, one in zip(sizes, models, strict=True))
    if ranks == 1:
        assert stored_bytes(written[0], "float32") == most
    else:
        assert rank_bytes(written[0], "float32", ranks, expert_parallel=expert_parallel) == most


def held_experts(path: Path, share: Share) -> StoredExperts:
    """The experts of one rank's first layer."""
    return next(part for part in held_model(path, share).modules() if isinstance(part, StoredExperts))


def held_model(path: Path, share: Share) -> PreTrainedModel:
    """One rank of the model."""
    register()
    config = AutoConfig.from_pretrained(path)
    complete_plan(config, share)

    def make() -> PreTrainedModel:
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return module

    model = load_stored(make, path, torch.float32, share)
    sinks = [value for name, value in model.named_parameters() if name.endswith("sinks")]
    assert [len(value) for value in sinks] == [4 // share.ranks] * 2
    return model


def size(experts: StoredExperts) -> int:
    """Bytes of the matrices, without what all outputs of one share."""
    matrices = [matrix for one in experts.experts for matrix in (one.first, one.second)]
    return sum(matrix.nbytes - matrix.nbytes_of(0) for matrix in matrices)


def test_experts_in_another_format_are_refused_with_what_reads_them(tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "plain", tiny.qwen3_moe(), sharpness=2.0)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    quantized.save(source, tmp_path / "model", quantized.gptq(4, 16), settings)
    message = (
        r"^draft\.model\.quantization: stored is refused for model\.layers\.0\.mlp\.experts: experts are "
        "kept as they are stored in MXFP4 alone"
    )
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path / "model", str(tmp_path / "code"))


def test_blocks_of_another_shape_are_named(written: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    tensors = load_file(written[0] / "model.safetensors")
    tensors[f"{EXPERTS}.down_proj_blocks"] = tensors[f"{EXPERTS}.down_proj_blocks"][:, :, :2].contiguous()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((written[0] / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=r"down_proj_blocks is \[4, 64, 2, 16\]; it must be \[4, 64, 3, 16\]"):
        load(path, str(tmp_path))


@pytest.mark.parametrize(
    ("values", "on_gpu", "is_kept"),
    [
        ({}, False, True),
        ({"dtype": "bfloat16", "tensor_parallel": 2, "enable_expert_parallel": True}, False, True),
        ({"dtype": "bfloat16"}, True, True),
        ({"dtype": "float16"}, True, False),
    ],
)
def test_experts_are_kept_by_default_where_the_device_multiplies_them(
    values: dict[str, object],
    on_gpu: bool,
    is_kept: bool,
    written: tuple[Path, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored_choice, "find_spec", lambda name: name)
    section = TargetSection.model_validate({"path": str(written[0])} | values)
    choice = choose_stored(section, written[0], on_gpu=on_gpu)
    assert choice.is_kept == is_kept
    assert is_kept or "not with float16" in choice.refusal
