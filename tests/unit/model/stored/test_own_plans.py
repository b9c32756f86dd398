"""Stored weights of families that Pilotfish itself divides: ranks hold what they hold of the de-quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.support.engines.engine_sequence import drafts_near, generate
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_group import RankGroup, rank_group
from tests.support.engines.stored_model import check_greedy
from tests.support.models import quantized, tiny
from tests.zoo.configs import tiny_config
from workers.forward.attention import register
from workers.forward.weights.modules import StoredLinear
from workers.model.sharding import complete_plan, divide
from workers.model.share import Share
from workers.model.stored.loading import load_stored
from workers.serve.configuration import load_configuration

CPU = torch.device("cpu")
GROUP = 8
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
PROJECTIONS = ("proj", "query_key_value", "dense", "h_to_4h", "4h_to_h", "Wqkv", "c_attn", "c_fc", "fc1", "fc2")
PROJECTIONS += ("fc_in", "fc_out")
"""Ends of the names of layers that are quantized."""
FAMILIES = ("bloom", "codegen", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "opt", "persimmon")
FAMILIES += ("biogpt", "phi3", "xglm")
SIX = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2}
OF_FOUR_RANKS = {
    "phi3": SIX | {"num_key_value_heads": 2, "intermediate_size": 64},
    "gpt_bigcode": SIX | {"n_inner": 64},
}
"""Three or six query heads read a KV head that two or four ranks share: some of these have one, and some two."""
OF_THREE_RANKS = {"bloom": SIX, "mpt": SIX, "opt": SIX | {"ffn_dim": 96, "word_embed_proj_dim": 48}, "biogpt": SIX}


def config_of(family: str, *, is_tied: bool = False, **changes: Any) -> PreTrainedConfig:
    found = tiny_config(family)
    for name, value in (changes | {"tie_word_embeddings": is_tied}).items():
        setattr(found, name, value)
    return found


def written(directory: Path, config: PreTrainedConfig) -> tuple[Path, PreTrainedModel]:
    """A model's directory with weights in GPTQ, and the model with the de-quantized ones in float32."""
    source = tiny.shift(tiny.save(directory / "plain", config))
    plain = quantized.save(source, directory / "model", quantized.gptq(4, GROUP), GPTQ, PROJECTIONS)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    reference.load_state_dict(plain, strict=False)
    return directory / "model", reference


def read(path: Path, share: Share) -> PreTrainedModel:
    register()
    config = AutoConfig.from_pretrained(path)
    complete_plan(config, share)
    return load_stored(
        lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32), path, torch.float32, share
    )


def counts(module: nn.Module) -> dict[str, int]:
    """The numbers by which attention divides its inputs into heads."""
    words = ("head", "dim", "size", "group")
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int) and any(word in name for word in words)
    }


@pytest.mark.parametrize(("family", "is_tied"), [*product(FAMILIES, [False]), ("opt", True), ("bloom", True)])
def test_a_rank_holds_what_it_holds_of_the_dequantized_weights(family: str, is_tied: bool, tmp_path: Path) -> None:
    check_ranks(tmp_path, config_of(family, is_tied=is_tied), 2)


@pytest.mark.parametrize("family", OF_FOUR_RANKS)
def test_so_does_a_rank_that_has_more_heads_of_a_shared_kv_head_than_another(family: str, tmp_path: Path) -> None:
    check_ranks(tmp_path, config_of(family, **OF_FOUR_RANKS[family]), 4)


def check_ranks(directory: Path, config: PreTrainedConfig, ranks: int) -> None:
    path, reference = written(directory, config)
    for rank in range(ranks):
        own, share = deepcopy(reference), Share(rank, ranks)
        divide(own, share, "none", CPU)
        wanted = dict(own.named_modules())
        found = read(path, share)
        layers = {name: part for name, part in found.named_modules() if isinstance(part, StoredLinear)}
        assert sum(part.sums_ranks for part in layers.values()) == 2 * own.config.num_hidden_layers
        for name, layer in layers.items():
            other: Any = wanted[name]
            weight = other.storage.dequantized() if isinstance(other, StoredLinear) else other.weight
            assert torch.equal(layer.storage.dequantized(), weight), name
            assert (layer.bias is None) is (other.bias is None), name
            assert layer.bias is None or torch.equal(layer.bias, other.bias), name
            assert layer.sums_ranks is isinstance(other, StoredLinear), name
        for name, part in found.named_modules():
            if not isinstance(part, StoredLinear):
                assert counts(part) == counts(wanted[name]), name


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with rank_group(3) as group:
        yield group


@pytest.mark.slow
@pytest.mark.parametrize("family", OF_THREE_RANKS)
def test_three_ranks_write_what_the_dequantized_weights_decide(family: str, group: RankGroup, tmp_path: Path) -> None:
    path, reference = written(tmp_path, config_of(family, **OF_THREE_RANKS[family]))
    target: dict[str, Any] = {"path": str(path), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    target |= {"quantization": "stored", "tensor_parallel": 3, "kv": {"pool_bytes": 1 << 20, "block_size": 4}}
    engine = group.form(load_configuration({"target": target}))
    for prompt in ((5, 17, 33, 8, 60, 41, 41, 9), (70, 3, 12), tuple(range(20, 50))):
        text = generate(engine, prompt, 24)
        check_greedy(reference, prompt, text)
        assert generate(engine, prompt, 24, propose=drafts_near([*prompt, *text])) == text
