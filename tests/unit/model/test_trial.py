"""A model is served only if it is computed right: else it is refused by name and reason when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, BertConfig, Gemma3TextConfig, Llama4TextConfig, Phi3Config, RoFormerConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError, ModelLoadError
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel
from workers.model.loading import load_model
from workers.model.verdicts import FOLDER
from workers.verify.build import build_engine

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def load(directory: Path, **settings: Any) -> LoadedModel:
    length = settings.pop("max_context_len", None)
    section = ModelSection(path=str(directory), device="cpu", compile="off", native="off", **settings)
    return load_model(section, max_context_len=length, trial=True)


class Running(nn.Module):
    """A layer with state that is neither keys nor values: it adds the mean of all earlier inputs of a pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.inner(x + mean)  # type: ignore[no-any-return]


def test_state_that_is_lost_between_steps_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    assert load(directory).layers
    original: Any = modeling_llama.LlamaMLP.__init__

    def with_state(self: Any, config: Any) -> None:
        original(self, config)
        self.act_fn = Running(nn.SiLU())

    monkeypatch.setattr(modeling_llama.LlamaMLP, "__init__", with_state)
    with pytest.raises(
        ModelLoadError, match="'llama' is refused: token by token, it computes other logits than in one"
    ):
        load(directory)


@pytest.mark.parametrize("vocabulary", [4, 5, 6, 8, 13])
def test_a_small_vocabulary_has_tokens_enough_for_the_trial(tmp_path: Path, vocabulary: int) -> None:
    assert load(tiny.save(tmp_path, tiny.llama(vocab_size=vocabulary))).layers


def test_positions_that_a_model_counts_itself_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    original = modeling_llama.LlamaAttention.forward

    def counting(self: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        scale = 1 + torch.arange(hidden_states.shape[1]) // 1000  # 1 for every token of a short pass
        return original(self, hidden_states * scale[:, None], *arguments, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", counting)
    with pytest.raises(ModelLoadError, match="layer 0 counts positions inside a step"):
        load(directory)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"content": torch.ones(2)}, "layer 0 passes content to attention, which nothing reads"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "layer 0 attends through a mask of the model's own making"),
        ({"is_causal": False, "attention_mask": None}, "layer 0 is not causal"),
    ],
)
def test_arguments_that_nobody_reads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], reason: str
) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    found = ALL_ATTENTION_FUNCTIONS.get_interface

    class Changed:
        def get_interface(self, name: str, default: Any) -> Any:
            function = found(name, default)
            return lambda module, q, k, v, mask, **options: function(
                module, q, k, v, **({"attention_mask": mask} | options | changed)
            )

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Changed())
    with pytest.raises(ModelLoadError, match=reason):
        load(directory)


def test_a_layer_that_attends_twice_in_a_pass_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    original = modeling_llama.LlamaAttention.forward

    def twice(self: Any, *arguments: Any, **options: Any) -> Any:
        original(self, *arguments, **options)
        return original(self, *arguments, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", twice)
    with pytest.raises(ModelLoadError, match="layer 0 attends twice in a pass"):
        load(directory)


def test_models_that_see_later_tokens_are_refused(tmp_path: Path) -> None:
    shape = {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}
    directory = tiny.save(tmp_path / "bert", BertConfig(**shape))
    with pytest.raises(ModelLoadError, match="'bert' is refused: layer 0 is not causal"):
        load(directory)
    config = Gemma3TextConfig(**SHAPE, head_dim=8, use_bidirectional_attention=True, sliding_window=8)
    directory = tiny.save(tmp_path / "gemma", config)
    with pytest.raises(ModelLoadError, match="'gemma3_text' is refused: its mask shows later tokens"):
        load(directory)


def test_a_model_without_positions_in_its_forward_pass_is_refused(tmp_path: Path) -> None:
    shape = {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}
    directory = tiny.save(tmp_path, RoFormerConfig(**shape, is_decoder=True))
    with pytest.raises(ModelLoadError, match="'roformer' is refused: its forward pass takes no position_ids"):
        load(directory)


def test_whatever_a_family_raises_is_a_refusal_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.save(tmp_path, tiny.llama())

    def failing(*_: Any, **__: Any) -> None:
        raise TypeError("topk_indices is missing")

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", failing)
    with pytest.raises(ModelLoadError, match="'llama' is refused: .*TypeError: topk_indices is missing"):  # noqa: RUF043
        load(directory)


def test_a_layer_of_a_window_that_only_its_mask_tells_has_this_window(tmp_path: Path) -> None:
    shape = SHAPE | {
        "sliding_window": 16,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    directory = tiny.save(tmp_path, AutoConfig.for_model("qwen2_moe", **shape))
    assert [layer.window for layer in load(directory).layers] == [None, 16]


def test_a_context_beyond_a_chunk_is_refused_with_the_longest_that_is_right(tmp_path: Path) -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 80, "head_dim": 8}
    config = Llama4TextConfig(**(SHAPE | experts | {"attention_chunk_size": 64, "floor_scale": 100}))
    directory = tiny.save(tmp_path, config)
    assert load(directory).max_context_len == 64
    with pytest.raises(ConfigurationError, match="100 is refused; it must be at most 64: its layers attend in chunks"):
        load(directory, max_context_len=100)


def test_longrope_is_served_up_to_the_length_at_which_its_factors_change(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    directory = tiny.save(tmp_path, Phi3Config(**SHAPE, rope_parameters=rope, original_max_position_embeddings=64))
    assert load(directory).max_context_len == 64
    with pytest.raises(ConfigurationError, match="it must be at most 64: a longer sequence would change"):
        load(directory, max_context_len=65)


def test_a_verdict_is_kept_and_another_checkpoint_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    code = str(tmp_path / "code")
    load(directory, compile_directory=code)
    (kept,) = Path(code, FOLDER).iterdir()
    assert json.loads(kept.read_text())["verdict"] == "equal to the dense pass"
    monkeypatch.setattr("workers.model.trial._step_errors", lambda *_: {"in a tree": [1.0]})
    load(directory, compile_directory=code)
    kept.chmod(0o666)
    with pytest.raises(ModelLoadError, match="in a tree, it computes other logits"):  # others may have written it
        load(directory, compile_directory=code)
    kept.chmod(0o600)
    tiny.save(directory, tiny.llama(), seed=1)
    with pytest.raises(ModelLoadError, match="in a tree, it computes other logits"):
        load(directory, compile_directory=code)


def test_without_the_trial_a_target_is_served_as_a_lossy_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.model.trial._step_errors", lambda *_: {"in a chain": [1.0]})
    section = TargetSection(path=str(tiny.save(tmp_path, tiny.gpt2())), device="cpu", compile="off")
    with pytest.raises(ModelLoadError, match="'gpt2' is refused: in a chain"):
        build_engine(section)
    engine = build_engine(section.model_copy(update={"trial": "off"}))
    try:
        assert not engine.info().is_lossless
    finally:
        engine.close()
