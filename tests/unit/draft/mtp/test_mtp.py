"""A target's own layer for multi-token prediction computes what modules of `transformers` compute with it.

For layers that are numbered after the decoder layers, `MtpModel` is another reader of the same files: it has its own
loader, projection, masks and cache. For other layouts its `MtpLayer` gets the tensors by names that the test states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer, MtpModel

from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import ModelLoadError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.models import mtp_targets, quantized, tiny
from tests.support.models.drafting_evidence import drafter_of, shown_states
from tests.support.models.mtp_targets import FAMILIES, LAYERS, OTHERS, names_of
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.eagle.head_pass import committed_piece
from workers.draft.mtp import MtpSettings
from workers.draft.mtp.mtp_pass import MtpPass, load_mtp_pass
from workers.model.weight_counts import count_mtp_layer

CPU = torch.device("cpu")
KNOWN, STEPS = 19, 3
TOKENS = [int(one) for one in torch.randint(3, 96, (KNOWN + STEPS + 1,), generator=torch.Generator().manual_seed(4))]
GREEDY = SamplingParameters(temperature=0.0)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class LayerOracle:
    """`MtpLayer` of `transformers` with a target's tensors, and the target's embedding and head."""

    def __init__(self, family: str, model: Any, weights: dict[str, Tensor]) -> None:
        decoder = model.get_decoder()
        config = deepcopy(model.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        config.mtp_hidden_states_first = family == "mimo"
        self.layer = MtpLayer(config, type(decoder.layers[-1]), type(decoder.norm), 0)
        self.layer.load_state_dict(self._state(family, weights))
        self.layer.eval()
        self.embed, self.rotary, self.shared_head = model.get_input_embeddings(), decoder.rotary_emb, model.lm_head
        self.norm = decoder.norm

    def _state(self, family: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        prefix, parts = names_of(family)
        found: dict[str, Tensor] = {}
        for stored, value in weights.items():
            if stored.startswith(prefix):
                name = stored.removeprefix(prefix)
                beginning = next(one for one in parts if name == one or name.startswith(f"{one}.") or not one)
                found[f"{parts[beginning]}.{name.removeprefix(f'{beginning}.')}"] = value
        for name, value in self.layer.state_dict().items():
            if name not in found:  # the experts, whose tensors are one for each in the files
                before, _, part = name.rpartition(".")
                kinds = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
                each = [[found.pop(f"{before}.{one}.{kind}.weight") for kind in kinds] for one in range(len(value))]
                found[name] = torch.stack([torch.cat(one) for one in each])
        return found

    def forward_layer(
        self, _: int, features: Tensor, places: Tensor, __: None, *, input_ids: Tensor, swapped: bool = False
    ) -> Tensor:
        count = features.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        embeddings, rotation = self.embed(input_ids), self.rotary(features, places)
        if swapped:
            embeddings, features = features, embeddings
        return self.layer(embeddings, features, rotation, mask, places, None)


@dataclass(frozen=True)
class Shown:
    """A target with such a layer, and what it computes for `TOKENS[:KNOWN]`."""

    directory: Path
    last: Tensor
    """[tokens, hidden size] The residual stream after the last layer."""
    final: Tensor
    """[tokens, hidden size] The same after the final norm."""
    oracle: MtpModel | LayerOracle
    layers: int
    """The number of the target's decoder layers."""

    def published(self, features: Tensor, following: Sequence[int]) -> Tensor:
        """The layer's outputs [tokens, hidden size] of one causal pass, by `transformers`."""
        places = torch.arange(len(following)).unsqueeze(0)
        with torch.no_grad():
            return self.oracle.forward_layer(
                0, features.unsqueeze(0), places, None, input_ids=torch.tensor([list(following)])
            )[0]

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [tokens, vocabulary] of the layer's outputs."""
        with torch.no_grad():
            return self.oracle.shared_head(outputs)


def show(family: str, directory: Path, **keys: Any) -> Shown:
    """`keys` are further ones of the target's configuration."""
    config = mtp_targets.config(family)
    config.update(keys)
    tiny.save(directory, config)
    mtp_targets.add_layer(directory, sureness=16.0)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]
    last: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
    with torch.no_grad():
        final = model.model(torch.tensor([TOKENS[:KNOWN]])).last_hidden_state[0]
    oracle: MtpModel | LayerOracle = (
        LayerOracle(family, model, load_file(directory / "model.safetensors"))
        if family in OTHERS
        else MtpModel.from_pretrained(model).eval()
    )
    return Shown(directory, last[0], final, oracle, model.config.num_hidden_layers)


SLOW = ("qwen3_5_text", "mimo")


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[pytest.mark.slow] if one in SLOW else []) for one in (*FAMILIES, *OTHERS)],
)
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return show(request.param, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return show("glm4_moe", tmp_path_factory.mktemp("numbered"))


def loaded(directory: Path, scratch: int = KNOWN) -> MtpPass:
    return load_mtp_pass(MtpSettings(weights="float32"), TargetSection(path=str(directory), device="cpu"), scratch)


def test_hidden_states_and_logits_are_those_of_transformers(shown: Shown) -> None:
    """The committed text comes in three pieces, then steps feed back their own outputs."""
    head = loaded(shown.directory)
    window = ContextWindow(head.context_shape, CPU)

    def run(features: Tensor, first: int) -> Tensor:
        end = first + len(features)
        piece = committed_piece(window, first, TOKENS[first + 1 : end + 1], 1 << 20)
        with torch.inference_mode():
            outputs = head.run(features, [replace(piece, wanted=range(len(features)))])
        window.mark(first, end)
        return outputs

    features = head.features(shown.last.unsqueeze(1))
    torch.testing.assert_close(features, shown.final, **CLOSE)
    mine = torch.cat([run(features[first:end], first) for first, end in ((0, 9), (9, 10), (10, KNOWN))])
    fed, following = shown.final, TOKENS[1 : KNOWN + 1]
    torch.testing.assert_close(mine, shown.published(fed, following), **CLOSE)
    for step in range(STEPS):
        fed = torch.cat([fed, mine[-1:]])
        following = TOKENS[1 : KNOWN + 2 + step]
        mine = run(mine[-1:], KNOWN + step)
        wanted = shown.published(fed, following)[-1:]
        torch.testing.assert_close(mine, wanted, **CLOSE)
        logits = shown.logits(wanted)
        torch.testing.assert_close(head.logits(mine), logits, rtol=1e-5, atol=1e-6 * float(logits.abs().max()))


def outputs(head: MtpPass, shown: Shown) -> Tensor:
    """The layer's outputs for the committed text, in one pass."""
    piece = committed_piece(ContextWindow(head.context_shape, CPU), 0, TOKENS[1 : KNOWN + 1], 1 << 20)
    with torch.inference_mode():
        return head.run(head.features(shown.last.unsqueeze(1)), [replace(piece, wanted=range(KNOWN))])


def test_the_configuration_may_say_that_the_hidden_state_comes_first(tmp_path: Path) -> None:
    shown = show("glm4_moe", tmp_path, mtp_hidden_states_first=True)

    mine = outputs(loaded(shown.directory), shown)

    torch.testing.assert_close(mine, shown.published(shown.final, TOKENS[1 : KNOWN + 1]), **CLOSE)


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("mimo", marks=pytest.mark.slow)])
def test_nothing_that_may_be_read_wrongly_without_a_word_gives_the_same(family: str, tmp_path: Path) -> None:
    """A token one place off, the projection's halves or the norms exchanged, a state before the final norm."""
    shown = show(family, tmp_path)
    oracle = shown.oracle
    assert isinstance(oracle, LayerOracle)
    mine = outputs(loaded(shown.directory), shown)
    following = TOKENS[1 : KNOWN + 1]

    def differs(features: Tensor = shown.final, tokens: Sequence[int] = following) -> bool:
        return float((shown.published(features, tokens) - mine).abs().max()) > 0.05

    assert not differs()
    assert differs(tokens=TOKENS[:KNOWN]) and differs(tokens=TOKENS[2 : KNOWN + 2])
    assert differs(features=shown.last) and differs(features=shown.final.roll(1, 0))
    layer, size = oracle.layer, shown.final.shape[1]
    layer.enorm, layer.hnorm = layer.hnorm, layer.enorm
    assert differs()
    layer.enorm, layer.hnorm = layer.hnorm, layer.enorm
    layer.eh_proj.weight.data = layer.eh_proj.weight.data.roll(size, 1)
    assert differs()


def proposals(
    directory: Path,
    last: Tensor,
    budget: DraftBudget,
    *,
    samplings: Sequence[SamplingParameters] = (GREEDY,),
    **method: Any,
) -> Sequence[Proposal]:
    """What the method drafts after `KNOWN + 1` tokens from the target's evidence, all rows in one call."""
    layers = AutoConfig.from_pretrained(directory).num_hidden_layers
    drafter, taps = drafter_of(directory, layers, "mtp", method)
    assert taps == (layers,)
    evidence = (shown_states(last),)
    rows = [
        DraftRow(SequenceId(str(index)), KNOWN + 1, tuple(TOKENS[: KNOWN + 1]), budget, SequenceStart(4, one), evidence)
        for index, one in enumerate(samplings)
    ]
    return drafter.propose(rows)


def test_a_chain_is_the_greedy_one_of_the_layer(shown: Shown) -> None:
    (found,) = proposals(shown.directory, shown.last, DraftBudget(3, 3), candidates=1, width=1)

    features = loaded(shown.directory).features(shown.last.bfloat16().float().unsqueeze(1))
    tokens = TOKENS[: KNOWN + 1]
    for _ in found.tree.tokens:
        output = shown.published(features, tokens[1:])[-1:]
        tokens, features = [*tokens, int(shown.logits(output).argmax())], torch.cat([features, output])
    assert found.fault is None and found.tree.is_chain and len(found.tree) >= 2
    assert list(found.tree.tokens) == tokens[KNOWN + 1 :]


def test_rows_do_not_change_each_others_trees(shown: Shown) -> None:
    samplings = (GREEDY, SamplingParameters(temperature=0.8, seed=5), SamplingParameters(temperature=1.2, seed=6))

    together = proposals(shown.directory, shown.last, DraftBudget(7, 4), samplings=samplings)

    alone = [proposals(shown.directory, shown.last, DraftBudget(7, 4), samplings=(one,))[0] for one in samplings]
    assert [one.tree for one in together] == [one.tree for one in alone]
    assert all(len(one.tree) == 7 and not one.tree.is_chain for one in together)


def _renamed(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    own = f"model.layers.{LAYERS}."
    return lambda weights: {
        name.replace(own, prefix) if name.startswith(own) else name: value for name, value in weights.items()
    }


def _without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: {name: value for name, value in weights.items() if f".{LAYERS}.{part}" not in name}


def _with(part: str, value: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: weights | {f"model.layers.{LAYERS}.{part}": value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _renamed("mtp."),
            r"its layer for multi-token prediction lacks mtp.fc.weight, mtp.norm.weight, .*",
        ),
        (_renamed("model.mtp_layers.0."), "lacks model.mtp_layers.0.final_layernorm.weight"),
        (_renamed("model.mtp.layers.0."), "have the layout of MiMo-V2, whose windows and sinks are not computed"),
        (_without(""), r"it has no layer for multi-token prediction, which .* store it as model.layers.2.\*; .* mtp"),
        (_without("enorm"), "its layer for multi-token prediction lacks model.layers.2.enorm.weight"),
        (_without("mlp.experts.3.up_proj"), r"multi-token prediction lacks \['mlp.experts.3.up_proj.weight'\]"),
        (_with("odd.weight", torch.zeros(1)), r"multi-token prediction has \['odd.weight'\] in excess"),
        (_with("hnorm.weight", torch.zeros(4)), r"model.layers.2.hnorm.weight must be \[48\], not \[4\]"),
        (_with("self_attn.o_proj.weight", torch.zeros(48, 4)), r"o_proj.weight: it must give \[48, "),
    ],
)
def test_refusals(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, numbered: Shown, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((numbered.directory / "config.json").read_text())
    save_file(change(load_file(numbered.directory / "model.safetensors")), tmp_path / "model.safetensors")

    with pytest.raises(ModelLoadError, match=message):
        loaded(tmp_path)


def written(directory: Path, like: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    """A checkpoint with the configuration of another, further keys, and other weights."""
    directory.mkdir(exist_ok=True)
    own = json.loads((like / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(own | config))
    save_file({name: value.contiguous() for name, value in weights.items()}, directory / "model.safetensors")
    return directory


STORED = {
    "fp8": (quantized.fp8(16, 32), {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}),
    "gptq": (quantized.gptq(8, 8), quantized.gptq_settings(8, group_size=8)),
    "awq": (quantized.awq(8), {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}),
}
"""How matrices are quantized, and what the configuration says of it. Blocks of FP8 may be smaller at the end."""
PLAIN = ("mlp.gate.weight", "shared_expert_gate.weight", "embed_tokens.weight", "shared_head.head.weight")
"""Ends of the names of matrices that checkpoints do not quantize."""


@pytest.mark.parametrize(
    ("family", "form"), [("deepseek_v3", "fp8"), ("qwen3_next", "fp8"), ("mimo", "gptq"), ("qwen3_next", "awq")]
)
def test_a_quantized_layer_is_dequantized(family: str, form: str, tmp_path: Path) -> None:
    """The matrix that chooses experts is plain."""
    quantize, settings = STORED[form]
    shown = show(family, tmp_path / "whole")
    prefix = f"model.layers.{LAYERS}." if family in FAMILIES else names_of(family)[0]
    small, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, value in load_file(shown.directory / "model.safetensors").items():
        is_plain = not name.startswith(prefix) or value.dim() == 1
        if is_plain or name.endswith(PLAIN):
            small[name] = meant[name] = value
            continue
        parts, meant[name] = quantize(value)
        small |= {f"{name.removesuffix('weight')}{part}": numbers for part, numbers in parts.items()}

    found = loaded(written(tmp_path / "small", shown.directory, small, quantization_config=settings))

    wanted = loaded(written(tmp_path / "meant", shown.directory, meant))
    assert len(small) > len(meant) + 5
    assert count_mtp_layer(tmp_path / "small") == count_mtp_layer(tmp_path / "meant")
    torch.testing.assert_close(outputs(found, shown), outputs(wanted, shown), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 5}, "quantization_config: bits is 5"),
        ({"quant_method": "exl3"}, "quantization_config.quant_method is 'exl3'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; it must be e4m3"),
    ],
)
def test_another_quantization_is_refused(config: dict[str, Any], message: str, numbered: Shown, tmp_path: Path) -> None:
    weights = load_file(numbered.directory / "model.safetensors")

    with pytest.raises(ModelLoadError, match=message):
        loaded(written(tmp_path, numbered.directory, weights, quantization_config=config))


def test_8_bit_floats_without_a_scale_are_refused(numbered: Shown, tmp_path: Path) -> None:
    name = f"model.layers.{LAYERS}.self_attn.q_proj.weight"
    weights = load_file(numbered.directory / "model.safetensors")
    weights[name] = weights[name].to(torch.float8_e4m3fn)

    with pytest.raises(ModelLoadError, match=rf"{name} is torch.float8_e4m3fn; it must be float32"):
        loaded(written(tmp_path, numbered.directory, weights, quantization_config={"quant_method": "fp8"}))
