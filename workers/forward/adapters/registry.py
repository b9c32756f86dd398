"""The adapters of attention modules with code of their own, by model type."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from workers.forward.adapters import attn_method, bloom, falcon, mpt, offset_positions, xglm, zamba2

_ADAPTERS: dict[str, Callable[[PreTrainedModel], None]] = {
    "bloom": bloom.adapt,
    "codegen": attn_method.adapt,
    "falcon": falcon.adapt,
    "gpt_neo": attn_method.adapt,
    "gpt_neox_japanese": attn_method.adapt,
    "gptj": attn_method.adapt,
    "mpt": mpt.adapt,
    "openai-gpt": attn_method.adapt,
    "xglm": xglm.adapt,
    "zamba2": zamba2.adapt,
}
_WITHOUT_POSITIONS = {"bloom", "mpt"}
"""Model types whose only positions are those of ALiBi, which the paged attention counts itself."""


def adapt(model: PreTrainedModel) -> None:
    """Adapt a model of a family with attention code or positions of its own, once."""
    if not hasattr(model, "is_adapted"):
        _ADAPTERS.get(model.config.model_type, offset_positions.adapt)(model)
        model.is_adapted = True  # type: ignore[assignment]


def needs_positions(model: PreTrainedModel) -> bool:
    """Whether the model itself must be told the positions of a step's tokens."""
    return model.config.model_type not in _WITHOUT_POSITIONS


def dense_attentions(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the attention by which a dense pass computes what the model means, the most exact first."""
    adds_alibi_twice = getattr(model.config, "alibi", False) is True  # the eager code of Falcon: biases and mask
    return ("sdpa",) if adds_alibi_twice else ("eager", "sdpa")
