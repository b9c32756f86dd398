"""What the formats of drafts refuse, by name: unknown arithmetic, other sizes, ambiguous layers, unsafe files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.errors import ModelLoadError
from tests.support.models import public_drafts, tiny
from tests.support.models.public_drafts import (
    DFLASH,
    DFLASH2,
    DRAFTED,
    DSPARK,
    HIDDEN,
    LLAMA,
    Tensors,
    speculators_block,
    speculators_config,
    write,
)
from workers.model.drafting.files import load_drafter
from workers.model.formats.registry import read_draft

EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(DRAFTED)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act in config.json: 'gelu' is refused; it must be 'silu'"),
        ({"mlp_bias": True}, "mlp_bias in config.json: True is refused; it must be False"),
        ({"model_type": "deepseek_v3"}, "model_type in config.json: 'deepseek_v3' is refused; it must be llama"),
        ({"sliding_window": 512}, "sliding_window in config.json: 512 is refused; it is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types in config.json: .* all layers must be full_attention"),
        ({"layer_types": 3}, "layer_types in config.json: 3 is refused; all layers must be full_attention"),
        ({"layer_types": [{}]}, "layer_types in config.json: .* all layers must be full_attention"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling in config.json: .* its rope_type must be default"),
        ({"rope_interleaved": True}, "rope_interleaved in config.json: True is refused; it must be False"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling in config.json: .* its rope_type must be"),
        ({"rope_scaling": {"rope_type": "llama3", "odd": 1}}, "rope_scaling .* rope_type llama3 does not know odd"),
        ({"rope_theta": -1.0}, "rope_theta in config.json: -1.0 is refused; it must be a number above 0"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc .* it must be false where fc_norm is true"),
        ({"logit_scale": 0.5}, "logit_scale in config.json: 0.5 is refused; it may change"),
        ({"logit_scale": True}, "logit_scale in config.json: True is refused; it may change"),
        ({"add_cross_attention": True}, "add_cross_attention in config.json: True is refused; it may change"),
        ({"residual_multiplier": 0.2}, "residual_multiplier in config.json: 0.2 is refused; it may change"),
        ({"quantization_config": {"bits": 4}}, "quantization_config in config.json: .* it is not supported"),
        ({"sample_from_anchor": False}, "sample_from_anchor in config.json: False is refused; it may change"),
        ({"norm_output": "yes"}, "norm_output in config.json: 'yes' is refused; it must be true or false"),
        ({"hidden_size": "48"}, "hidden_size in config.json: '48' is refused; it must be a whole number"),
        (
            {"num_hidden_layers": 100_000},
            "num_hidden_layers in config.json: 100000 is refused; it must be at most 1024",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads in config.json: 3 is refused; it must divide"),
        ({"draft_vocab_size": 97}, "draft_vocab_size in config.json: 97 is refused; it must be at most vocab_size, 96"),
        ({"num_attention_heads": 2}, r"k_proj.weight must be \[48, 96\] by config.json, not \[24, 96\]"),
        ({"attention_bias": True}, r"its weights lack \['midlayer.self_attn.k_proj.bias'"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "eagle_config.use_aux_hidden_state in config.json: False is refused; it must be True",
        ),
        (
            {"eagle_config": {"parallel_draft_step": 2, "parallel_draft_heads_num_layers": 1}},
            "eagle_config.parallel_draft_step in config.json: 2 is refused; it must be 1",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}},
            r"eagle_config.eagle_aux_hidden_state_layer_ids .* set draft.eagle.taps to \[1, 4, 6\] if .* \(vLLM\), "
            r"or to \[2, 5, 7\] if .* \(SGLang\)",
        ),
        (
            {"eagle_config": {"layer_ids": [1, 3, 5]}},
            r"eagle_config.layer_ids .* vLLM alone reads it: .* to \[1, 3, 5\] if .* or to \[2, 4, 6\] if",
        ),
        (
            {"target_layer_ids": [1, 3, 5], "eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            r"target_layer_ids .* must name the hidden states of eagle_aux_hidden_state_layer_ids: \[1, 3, 5\]",
        ),
        (
            {"target_layer_ids": [1, 3, 7], "num_target_layers": 8},
            "target_layer_ids .* must be below the target's last one, 7: trainers disagree",
        ),
        ({"aux_hidden_state_layer_ids": [2, 4, 6]}, "aux_hidden_state_layer_ids .* is refused; it may change"),
        ({"eagle_aux_hidden_state_layer_ids": [6, 3, 1]}, "it must be a list of ascending layer numbers"),
    ],
)
def test_settings_that_change_the_arithmetic(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, EAGLE3 | changes, public_drafts.eagle3())

    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation_autoset": True},
        {"add_cross_attention": False},
        {"logit_scale": 1.0},
        {"logit_scale": 1, "residual_multiplier": 1.0, "logits_scaling": 1.0, "embedding_multiplier": 1.0},
    ],
)
def test_settings_without_an_effect(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, EAGLE3 | changes, public_drafts.eagle3())

    assert read_draft(tmp_path).kind == "eagle"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": False}, r"its weights lack 'nothing' and have \['fc.bias'\] in excess"),
        ({"bias": 1}, "bias in config.json: 1 is refused; it must be true or false"),
        ({"attention_bias": True}, r"its weights lack \['layers.0.self_attn.k_proj.bias'"),
        ({"qkv_bias": True}, r"its weights lack \['layers.0.self_attn.k_proj.bias', 'layers.0.self_attn.q_proj.bias'"),
        ({"qkv_bias": "yes"}, "qkv_bias in config.json: 'yes' is refused; it must be true or false"),
        ({"scale_embedding": True}, "scale_embedding in config.json: True is refused; it may change"),
        ({"num_hidden_layers": 2}, r"its weights lack \['layers.1.input_layernorm.weight'"),
    ],
)
def test_settings_of_eagle_1(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, LLAMA | changes, public_drafts.eagle1())

    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id in config.json: None is refused; it must be a whole number"),
        ({"mask_token_id": 96}, "mask_token_id in config.json: 96 is refused; it must be below vocab_size, 96"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2]},
            r"fc.weight must be \[48, 96\] by config.json",
        ),
        ({"speculators_model_type": "eagle3", "mask_token_id": None}, "and for no other type"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}},
            "speculators_config.proposal_methods.0.speculative_tokens in config.json: 0 is refused",
        ),
    ],
)
def test_settings_of_p_eagle(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = speculators_config(speculators_model_type="peagle", mask_token_id=95)
    write(tmp_path, config | changes, public_drafts.peagle(layers=1))

    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)


def test_the_taps_of_the_settings_take_the_place_of_ambiguous_layers(tmp_path: Path) -> None:
    write(tmp_path, EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}}, public_drafts.eagle3())

    assert read_draft(tmp_path, (2, 5, 7)).taps == (2, 5, 7)


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True}},
        {"eagle_aux_hidden_state_layer_ids": []},
    ],
)
def test_an_empty_list_of_layers_stands_for_the_common_ones(changes: dict[str, Any], tmp_path: Path) -> None:
    """NVIDIA's library writes one where nobody chose layers."""
    write(tmp_path, EAGLE3 | changes, public_drafts.eagle3())

    assert read_draft(tmp_path).taps == (2, "middle", -4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "xpress"}, "speculators_model_type in config.json: 'xpress' is refused"),
        ({"speculators_model_type": "peagle"}, "the weights must have mask_hidden for peagle"),
        ({"mask_token_id": 3}, "mask_token_id in config.json: 3 is refused; it may change what the draft computes"),
        ({"norm_before_residual": None}, "norm_before_residual .* must be true or false: engines differ"),
        ({"transformer_layer_config": LLAMA | {"mlp_bias": True}}, "transformer_layer_config.mlp_bias in config.json"),
        ({"transformer_layer_config": [1]}, "transformer_layer_config in config.json: .* it must be an object"),
        ({"target_hidden_size": 64}, r"fc.weight must be \[48, 192\] by config.json|lack"),
    ],
)
def test_settings_of_speculators(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, speculators_config(**changes), public_drafts.eagle3("layers.0."))

    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projector_type": "domino"}, "dflash_config.projector_type in config.json: 'domino' is refused; it must be"),
        ({"causal": True}, "causal in config.json: True is refused; it must be False"),
        ({"use_swa": True}, "use_swa in config.json: True is refused; it must be False"),
        ({"attention_sink_bias": True}, "dflash_config.attention_sink_bias in config.json: True is refused; it may"),
        ({"final_logit_softcapping": -3}, "final_logit_softcapping in config.json: -3 is refused; it must be a number"),
        ({"conv_kernel_size": 2}, "conv_group_size in config.json: None is refused; it must be a whole number"),
        ({"layer_ids": [2, 4]}, r"layer_ids .* draft.block.taps to \[2, 4\] if .* \(vLLM\), or to \[3, 5\] if their"),
        (
            {"target_layer_ids": [1, 3, 7]},
            "target_layer_ids .* must be below the target's last one, 7: trainers disagree",
        ),
        ({"target_layer_ids": [5, 3]}, "target_layer_ids .* it must be a list of ascending layer numbers"),
        (
            {"dspark_target_layer_ids": [1, 3, 4]},
            r"dspark_target_layer_ids .* must name the hidden states of target_layer_ids: \[2, 4, 6\]",
        ),
        ({"aux_hidden_state_layer_ids": [2, 4, 6]}, "dflash_config.aux_hidden_state_layer_ids .* is refused; it may"),
        ({"target_layer_ids": [1, 3]}, r"fc.weight must be \[48, 96\] by config.json, not \[48, 144\]"),
        ({"mask_token_id": 96}, "mask_token_id in config.json: 96 is refused; it must be below vocab_size, 96"),
        ({"mask_token_id": None}, "mask_token_id in config.json: None is refused; it must be a whole number"),
        ({"block_size": 1}, "block_size in config.json: 1 is refused; it must be a whole number of at least 2"),
        ({"block_size": 4096}, "block_size in config.json: 4096 is refused; it must be at most 256"),
        ({"markov_rank": 8}, r"its weights lack \['markov_head.markov_w1.weight', 'markov_head.markov_w2.weight'\]"),
    ],
)
def test_settings_of_dflash(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, DFLASH | {"dflash_config": DFLASH["dflash_config"] | changes}, public_drafts.block())

    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector_rank": None}, "dflash_config.selector_rank in config.json: .* it must be set"),
        ({"conv_group_size": 7}, "conv_group_size in config.json: 7 is refused; it must divide hidden_size, 48"),
        ({"conv_kernel_size": 5}, "conv_kernel_size in config.json: 5 is refused; it must be at most block_size, 4"),
        ({"selector_top_k": 97}, "selector_top_k in config.json: 97 is refused; it must be at most vocab_size, 96"),
        (
            {"markov_rank": 8},
            "selector_rank in config.json: 8 is refused; it must be unset where there is a Markov head",
        ),
        ({"selector_rank": 16}, r"candidate_selector.predecessor_codebook must be \[96, 16\] by config.json"),
    ],
)
def test_settings_of_dflash2(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, DFLASH2 | {"dflash_config": DFLASH2["dflash_config"] | changes}, public_drafts.second())

    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures in config.json: .* it must name a DSpark model where"),
        (
            {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "attention_k_eq_v": True},
            r"architectures in config.json: \['Gemma4DSparkModel'\] is refused; layers of Gemma 4 are not computed .*: "
            "the layers must be Qwen3's",
        ),
        ({"markov_head_type": "lstm"}, "markov_head_type in config.json: 'lstm' is refused; it must be 'vanilla' or"),
        ({"markov_rank": None}, "markov_rank in config.json: None is refused; it must be set"),
        ({"markov_rank": 0}, "confidence_head_with_markov .* it must be false where markov_rank is 0"),
        ({"markov_rank": 16}, r"markov_head.markov_w1.weight must be \[96, 16\] by config.json, not \[96, 8\]"),
        ({"enable_confidence_head": False}, r"have \['confidence_head.proj.bias', .* in excess"),
        ({"confidence_head_with_markov": False}, r"confidence_head.proj.weight must be \[1, 48\] by config.json"),
        ({"target_layer_ids": None}, "target_layer_ids in config.json: None is refused; it must be set"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types .* all layers must be full_attention"),
        ({"is_causal": True}, "is_causal in config.json: True is refused; it must be False"),
        ({"sample_from_anchor": "no"}, "sample_from_anchor in config.json: 'no' is refused; it must be true or false"),
        (
            {"sample_from_anchor": True, "dspark_bonus_anchor": True},
            "dspark_bonus_anchor in config.json: True is refused; it must be False where sample_from_anchor is True",
        ),
    ],
)
def test_settings_of_dspark(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, DSPARK | changes, public_drafts.spark())

    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speculators_model_type": "xpress"},
            "'xpress' is refused; it must be one of eagle3, peagle, dflash, dflash2",
        ),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids in config.json: None is refused; it must"),
        ({"target_layer_ids": [1, 3, 5]}, r"target_layer_ids in config.json: \[1, 3, 5\] is refused; it may change"),
        ({"target_hidden_size": 64}, "target_hidden_size in config.json: 64 is refused; it must be 48"),
        (
            {"sample_from_anchor": False, "markov_head_type": "rnn"},
            "markov_head_type .* it must be vanilla or gated where the last token's slot predicts nothing",
        ),
        ({"draft_vocab_size": 97}, "draft_vocab_size in config.json: 97 is refused; it must be at most vocab_size, 96"),
        ({"draft_vocab_size": 40}, r"its weights lack \['d2t', 'lm_head.weight'\]"),
        ({"markov_rank": None}, r"markov_w1.weight must be \[96, 256\]"),
    ],
)
def test_settings_of_blocks_of_speculators(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, speculators_block("dspark", **changes), public_drafts.spark())

    with pytest.raises(ModelLoadError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (torch.zeros(HIDDEN + 1), "mask_embedding.pt must hold one vector of 48 elements"),
        ({"mask_token_id": 95}, "mask_embedding.pt must hold one vector of 48 elements"),
        ({"embedding": torch.zeros(HIDDEN), "mask_token_id": 3}, "mask_embedding.pt is of the token 3; .* is 95"),
        (object, "mask_embedding.pt cannot be read as plain tensors"),
    ],
)
def test_a_mask_embedding_of_another_form(stored: Any, message: str, target: Path, tmp_path: Path) -> None:
    write(tmp_path, DFLASH, public_drafts.block())
    torch.save(stored, tmp_path / "mask_embedding.pt")

    with pytest.raises(ModelLoadError, match=message):
        load_drafter(tmp_path, target, torch.float32, torch.device("cpu"))


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _with(**added: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name.replace("__", "."): value for name, value in added.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with(mask_hidden=torch.zeros(1, 1, 3 * HIDDEN)), "mask_token_id in config.json: None is refused; it must be"),
        (_with(midlayer__self_attn__sinks=torch.zeros(4)), r"have \['midlayer.self_attn.sinks'\] in excess"),
        (_without("d2t"), r"its weights lack \['d2t'\]"),
        (_without("lm_head.weight"), r"its weights lack \['lm_head.weight'\]"),
        (_with(fc__weight=torch.zeros(HIDDEN, 2 * HIDDEN)), r"fc.weight must be \[48, 144\] by config.json"),
        (_with(d2t=torch.tensor(DRAFTED)), "d2t must hold the offset of each row's token from the row's number"),
        (_with(d2t=torch.zeros(len(DRAFTED))), "d2t must be integers, not torch.float32"),
        (_with(t2d=torch.ones(96, dtype=torch.bool)), "t2d must name the tokens of d2t; they differ"),
    ],
)
def test_tensors(change: Callable[[Tensors], Tensors], message: str, target: Path, tmp_path: Path) -> None:
    write(tmp_path, EAGLE3, change(public_drafts.eagle3()))

    with pytest.raises(ModelLoadError, match=message):
        load_drafter(tmp_path, target, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("config", "tensors", "name"),
    [
        (EAGLE3, public_drafts.eagle3, "fc.weight"),
        (EAGLE3, public_drafts.eagle3, "lm_head.weight"),
        (LLAMA, public_drafts.eagle1, "layers.0.mlp.up_proj.weight"),
        (DFLASH, public_drafts.block, "hidden_norm.weight"),
        ({}, public_drafts.medusa, "1.0.linear.weight"),
        (public_drafts.HYDRA, public_drafts.hydra, "hydra_lm_head.0.weight"),
    ],
)
def test_numbers_that_nothing_scales(
    config: dict[str, Any], tensors: Callable[[], Tensors], name: str, dtype: torch.dtype, target: Path, tmp_path: Path
) -> None:
    stored = tensors()
    write(tmp_path, config, stored | {name: stored[name].to(dtype)})

    with pytest.raises(ModelLoadError, match=rf"{name} is {dtype}; it must be float32, bfloat16 or float16"):
        load_drafter(tmp_path, target, torch.float32, torch.device("cpu"))
