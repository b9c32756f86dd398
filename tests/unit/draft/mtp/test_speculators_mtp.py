"""A layer for multi-token prediction in the format of `speculators` computes what the target's own layer computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ModelLoadError
from deploy.settings import load_settings
from tests.support.models import mtp_targets, tiny, tiny_tokenizer
from tests.unit.draft.contract.methods import VOCABULARY
from tests.unit.draft.contract.test_public_drafts import answers, answers_alone, configured
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.eagle.head_pass import committed_piece
from workers.draft.mtp import MtpSettings
from workers.draft.mtp.mtp_pass import load_mtp_pass
from workers.model.formats.registry import read_draft

KNOWN = 12
TOKENS = [int(one) for one in torch.randint(3, 96, (KNOWN + 1,), generator=torch.Generator().manual_seed(4))]
RENAMED = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}
"""The names of Qwen3-Next's layer, and those that the library gives them."""


def target_of(directory: Path, vocabulary: int = tiny.VOCABULARY) -> Path:
    tiny.save(directory, mtp_targets.config("qwen3_next", vocabulary))
    mtp_targets.add_layer(directory, sureness=4.0)
    return directory


def converted(target: Path, directory: Path, **config: Any) -> Path:
    """The target's own layer as the library stores it, where the matrices of all experts are one tensor."""
    found = {}
    for name, value in load_file(target / "model.safetensors").items():
        start = next((one for one in RENAMED if name.startswith(one)), None)
        if start is not None:
            found[RENAMED[start] + name.removeprefix(start)] = value
    stacked: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name in [one for one in found if ".experts." in one]:
        before, _, rest = name.partition(".experts.")
        expert, kind, _ = rest.split(".")
        stacked.setdefault(before, {}).setdefault(int(expert), {})[kind] = found.pop(name)
    for before, experts in stacked.items():
        joined = [torch.cat([one["gate_proj"], one["up_proj"]]) for _, one in sorted(experts.items())]
        found[f"{before}.experts.gate_up_proj"] = torch.stack(joined)
        found[f"{before}.experts.down_proj"] = torch.stack([one["down_proj"] for _, one in sorted(experts.items())])
    found["verifier_lm_head.weight"] = torch.full((2, 2), float("nan"))  # the library's converter stores one
    directory.mkdir()
    save_file(found, directory / "model.safetensors")
    body = json.loads((target / "config.json").read_text())
    whole = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": body}
    whole["speculators_config"] = {"algorithm": "mtp", "verifier": {"name_or_path": "org/target"}}
    (directory / "config.json").write_text(json.dumps(whole | config))
    return directory


def outputs(target: Path, path: str, features: Tensor) -> tuple[Tensor, Tensor]:
    head = load_mtp_pass(
        MtpSettings(weights="float32", path=path), TargetSection(path=str(target), device="cpu"), KNOWN
    )
    window = ContextWindow(head.context_shape, torch.device("cpu"))
    piece = committed_piece(window, 0, TOKENS[1:], 1 << 20)
    with torch.inference_mode():
        found = head.run(head.features(features), [piece])
        return found, head.logits(found)


def test_the_layer_computes_what_the_targets_own_layer_computes(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target")
    draft = converted(target, tmp_path / "draft")
    taps = torch.randn(KNOWN, 1, 64, generator=torch.Generator().manual_seed(2))
    for mine, own in zip(outputs(target, str(draft), taps), outputs(target, "", taps), strict=True):
        assert torch.equal(mine, own)


def test_the_library_computes_the_same(tmp_path: Path) -> None:
    """`make_mtp.py` wrote the layer and the library's logits of steps that feed back their own outputs."""
    written = Path(__file__).parent / "speculators"
    expected = load_file(written / "expected.safetensors")
    vocabulary, size = 24, expected["features"].shape[1]
    target = tiny.save(tmp_path, tiny.qwen3(vocab_size=vocabulary, hidden_size=size, tie_word_embeddings=False))
    weights = load_file(target / "model.safetensors")
    numbers = torch.arange(vocabulary * size).view(vocabulary, size)
    weights |= {"model.embed_tokens.weight": numbers.sin(), "lm_head.weight": numbers.cos()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    settings = MtpSettings(weights="float32", path=str(written / "draft"))
    head = load_mtp_pass(settings, TargetSection(path=str(target), device="cpu"), KNOWN)
    count, fed = len(expected["step_0"]), expected["features"]
    for step in range(3):
        following = expected["tokens"][step + 1 : step + 1 + count].tolist()
        piece = committed_piece(ContextWindow(head.context_shape, torch.device("cpu")), 0, following, 1 << 20)
        with torch.inference_mode():
            fed = head.run(fed[:count], [replace(piece, wanted=range(count))])
            torch.testing.assert_close(head.logits(fed), expected[f"step_{step}"], rtol=1e-5, atol=1e-5)


def test_the_format_chooses_the_method(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target")
    draft = converted(target, tmp_path / "draft")
    card = read_draft(draft)
    assert (card.kind, card.target, card.hidden_size, card.taps) == ("mtp", "org/target", 64, (-1,))
    chosen = load_settings("cpu", [f"target.path={target}", f"draft.path={draft}"], {}).configuration.draft
    assert (chosen.selected("method"), chosen.modules["mtp"].path) == (("mtp",), str(draft))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers in config.json: 2 is refused; it must be 1"),
        ({"num_centroids": 64}, {}, "num_centroids in config.json: 64 is refused"),
        ({"draft_vocab_size": 64}, {}, "draft_vocab_size in config.json: 64 is refused; it must be 96"),
        ({"norm_before_fc": True}, {}, "norm_before_fc in config.json: True is refused"),
        ({"mtp_hidden_states_first": True}, {}, "mtp_hidden_states_first in config.json: True is refused; it may"),
        ({}, {"lm_head.weight": torch.zeros(2)}, r"have \['lm_head.weight'\] in excess, beside mtp_layers.0.\*"),
        ({}, {"mtp_layers.0.odd.weight": torch.zeros(2)}, r"has \['odd.weight'\] in excess"),
        ({}, {"mtp_layers.0.input_proj.weight": torch.zeros(2)}, r"input_proj.weight must be \[64, 128\], not \[2\]"),
        (
            {"transformer_layer_config": {"model_type": "fish", "hidden_size": 64, "vocab_size": 96}},
            {},
            "'fish' is ref",
        ),
    ],
)
def test_refusals(config: Mapping[str, Any], tensors: Mapping[str, Tensor], message: str, tmp_path: Path) -> None:
    target = target_of(tmp_path / "target")
    draft = converted(target, tmp_path / "draft", **config)
    save_file(load_file(draft / "model.safetensors") | dict(tensors), draft / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        outputs(target, str(draft), torch.zeros(KNOWN, 1, 64))


def with_body(target: Path, directory: Path, key: str, value: object) -> Path:
    """The target's layer with a key in the configuration of its decoder layer."""
    body = json.loads((target / "config.json").read_text()) | {key: value}
    return converted(target, directory, transformer_layer_config=body)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mtp_hidden_states_first", True),
        ("attn_output_gate", False),
        ("residual_multiplier", 0.5),
        ("use_qk_norm", False),
    ],
)
def test_a_key_that_the_family_does_not_read(key: str, value: object, tmp_path: Path) -> None:
    target = target_of(tmp_path / "target")
    draft = with_body(target, tmp_path / "draft", key, value)
    with pytest.raises(ModelLoadError, match=rf"transformer_layer_config.{key} in config.json: {value} is refused"):
        outputs(target, str(draft), torch.zeros(KNOWN, 1, 64))


@pytest.mark.parametrize(
    ("key", "value"),
    [("mtp_hidden_states_first", False), ("attn_output_gate", True), ("full_attention_interval", 4)],
)
def test_a_key_without_an_effect(key: str, value: object, tmp_path: Path) -> None:
    target = target_of(tmp_path / "target")
    draft = with_body(target, tmp_path / "draft", key, value)
    taps = torch.randn(KNOWN, 1, 64, generator=torch.Generator().manual_seed(2))
    for mine, own in zip(outputs(target, str(draft), taps), outputs(target, "", taps), strict=True):
        assert torch.equal(mine, own)


@pytest.mark.slow
async def test_the_layer_changes_no_token(tmp_path: Path) -> None:
    target = target_of(tiny_tokenizer.byte_level(tmp_path / "target"), VOCABULARY)
    draft = converted(target, tmp_path / "draft")
    plain = await answers_alone(target)
    settings = [f"draft.path={draft}", "draft.placement=drafter", "target.kv.sequences=64"]
    drafted = await answers(configured(target, *settings))
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(one.drafted > 0 for one in drafted)
