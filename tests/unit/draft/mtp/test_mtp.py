"""A target's own layer for multi-token prediction computes what `MtpModel` of `transformers` computes with it.

`MtpModel` is another reader of the same files: it has its own loader, projection, masks and cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import ModelLoadError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.models import mtp_targets, tiny
from tests.support.models.drafting_evidence import drafter_of, shown_states
from tests.support.models.mtp_targets import FAMILIES, LAYERS
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.eagle.eagle_pass import committed_piece
from workers.draft.mtp import MtpSettings
from workers.draft.mtp.mtp_pass import MtpPass, load_mtp_pass

CPU = torch.device("cpu")
KNOWN, STEPS = 19, 3
TOKENS = [int(one) for one in torch.randint(3, 96, (KNOWN + STEPS + 1,), generator=torch.Generator().manual_seed(4))]
GREEDY = SamplingParameters(temperature=0.0)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@dataclass(frozen=True)
class Shown:
    """A target with such a layer, and what it computes for `TOKENS[:KNOWN]`."""

    directory: Path
    last: Tensor
    """[tokens, hidden size] The residual stream after the last layer."""
    final: Tensor
    """[tokens, hidden size] The same after the final norm."""
    oracle: MtpModel

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


@pytest.fixture(scope="module", params=FAMILIES)
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    directory = tiny.save(tmp_path_factory.mktemp("target"), mtp_targets.config(request.param))
    mtp_targets.add_layer(directory, sureness=16.0)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]
    last: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
    with torch.no_grad():
        final = model.model(torch.tensor([TOKENS[:KNOWN]])).last_hidden_state[0]
    return Shown(directory, last[0], final, MtpModel.from_pretrained(model).eval())


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
        torch.testing.assert_close(head.logits(mine), shown.logits(wanted), **CLOSE)


def proposals(
    directory: Path,
    last: Tensor,
    budget: DraftBudget,
    *,
    samplings: Sequence[SamplingParameters] = (GREEDY,),
    **method: Any,
) -> Sequence[Proposal]:
    """What the method drafts after `KNOWN + 1` tokens from the target's evidence, all rows in one call."""
    drafter, taps = drafter_of(directory, LAYERS, "mtp", method)
    assert taps == (LAYERS,)
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
            r"its layers for multi-token prediction have the layout of Qwen3-Next and Qwen3.5; .* reads",
        ),
        (_renamed("model.mtp_layers.0."), "have the layout of MiMo-7B"),
        (_renamed("model.mtp.layers.0."), "have the layout of MiMo-V2"),
        (_without(""), r"it has no layer for multi-token prediction, which .* store as model.layers.2.\*"),
        (_without("enorm"), "its layer for multi-token prediction lacks model.layers.2.enorm.weight"),
        (_without("mlp.experts.3.up_proj"), r"multi-token prediction lacks \['mlp.experts.3.up_proj.weight'\]"),
        (_with("odd.weight", torch.zeros(1)), r"multi-token prediction has \['odd.weight'\] in excess"),
        (_with("hnorm.weight", torch.zeros(4)), r"model.layers.2.hnorm.weight must be \[48\], not \[4\]"),
        (_with("self_attn.o_proj.weight", torch.zeros(48, 4)), r"o_proj.weight: it must give \[48, "),
    ],
)
def test_refusals(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, shown: Shown, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((shown.directory / "config.json").read_text())
    save_file(change(load_file(shown.directory / "model.safetensors")), tmp_path / "model.safetensors")

    with pytest.raises(ModelLoadError, match=message):
        loaded(tmp_path)


def test_a_quantized_checkpoint_is_refused(shown: Shown, tmp_path: Path) -> None:
    config = json.loads((shown.directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    save_file(load_file(shown.directory / "model.safetensors"), tmp_path / "model.safetensors")

    with pytest.raises(ModelLoadError, match=r"quantization_config in config.json: .* is not supported"):
        loaded(tmp_path)
