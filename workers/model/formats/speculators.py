"""The format of the library `speculators` (Red Hat): a `speculators_model_type` and a nested configuration of layers.

https://github.com/vllm-project/speculators defines it. `write_eagle3` and `write_dspark` write drafts in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.core.drafting import Tap
from cluster.core.errors import shorten
from workers.model.draft_card import LAST_TAP, WEIGHTS, WRITER, WRITTEN_BY, DraftDescription
from workers.model.formats.block_layout import BLOCK_KEYS, SELECTOR_KEYS, block_card
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.decoder_config import DECODER_KEYS
from workers.model.formats.draft_vocabulary import ENDS, MAPS, read_with_ends
from workers.model.formats.eagle3_layout import EAGLE3_KEYS, MASK_KEYS, Eagle3Layout, tap_norm_of
from workers.model.formats.registry import DraftWeights, register
from workers.model.public_shapes import MASK_HIDDEN, DecoderShape, FeatureShape, MaskedBlockShape
from workers.model.weight_files import CONFIG

if TYPE_CHECKING:
    from torch import Tensor

_TYPE, _BODY = "speculators_model_type", "transformer_layer_config"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_BLOCK_LAYERS = "aux_hidden_state_layer_ids"
_KNOWN = EAGLE3_KEYS | {_LAYERS, "embed_requires_grad"}
_KNOWN_OF_BLOCKS = BLOCK_KEYS | {_BLOCK_LAYERS, "sliding_window_non_causal"}
_LAYOUT = Eagle3Layout("layers.0.")
_EAGLE3, _PARALLEL = _HEADS_OF_FEATURES = ("eagle3", "peagle")
_DSPARK = "dspark"
_DFLASH2 = "dflash2"
_MTP, _MTP_LAYER = "mtp", "mtp_layers.0."
_UNUSED = "verifier_lm_head.weight"
"""A matrix that the library may store beside such a layer, and that no pass reads."""
_BLOCKS = {"dflash": False, _DFLASH2: False, _DSPARK: True}
"""The types of block drafters, and whether a slot predicts the token after it where `sample_from_anchor` is unset."""
_HEADS: dict[str, Any] = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
"""What the library takes for DSpark's unset keys."""
_SECOND: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
"""What it takes for DFlash2's."""


class SpeculatorsFormat:
    """Checkpoints with a `speculators_model_type`."""

    name = "speculators"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the configuration names a type of this library."""
        return _TYPE in checkpoint.config

    def kind(self, checkpoint: Checkpoint) -> str:
        kind = _type(checkpoint)
        return "eagle" if kind in _HEADS_OF_FEATURES else _MTP if kind == _MTP else "block"

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        kind = _type(checkpoint)
        if kind == _MTP:
            return _layer(checkpoint)
        if kind not in _HEADS_OF_FEATURES:
            return _block(checkpoint, taps)
        checkpoint.refuse_unknown_keys(_KNOWN if kind == _EAGLE3 else {*_KNOWN, MASK_KEYS[0]})
        if (MASK_HIDDEN in checkpoint.sizes) != (kind == _PARALLEL):
            checkpoint.refuse(_TYPE, f"the weights must have {MASK_HIDDEN} for {_PARALLEL}, and for no other type")
        if checkpoint.config.get("norm_before_residual") is None:
            checkpoint.refuse("norm_before_residual", "it must be true or false: engines differ in what they assume")
        body = checkpoint.nested(_BODY)
        body.refuse_unknown_keys(DECODER_KEYS)
        return replace(_LAYOUT, depths=_proposed(checkpoint)).card(
            checkpoint,
            checkpoint,
            body,
            taps or checkpoint.numbers(_LAYERS) or (),
            tap_norm=tap_norm_of(checkpoint, checkpoint.flag("fc_norm")),
            target=verifier(checkpoint),
        )

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        if card.kind == _MTP:
            return DraftWeights(checkpoint.weights(checkpoint.sizes))
        return _LAYOUT.weights(checkpoint, card) if card.kind == "eagle" else read_with_ends(checkpoint, card)

    def stored_name(self, checkpoint: Checkpoint, name: str) -> str:
        """The name in the files of a tensor of the shape."""
        return _LAYOUT.stored(name) if _type(checkpoint) in _HEADS_OF_FEATURES else name


def _type(checkpoint: Checkpoint) -> str:
    found, known = checkpoint.config[_TYPE], (*_HEADS_OF_FEATURES, *_BLOCKS, _MTP)
    if found not in known:
        checkpoint.refuse(_TYPE, f"it must be one of {', '.join(known)}")
    return str(found)


def verifier(checkpoint: Checkpoint) -> str:
    """The name of the target for which a draft was made; empty where the configuration has none."""
    found = checkpoint.nested("speculators_config").nested("verifier").config.get("name_or_path")
    return found if isinstance(found, str) else ""


def _proposed(checkpoint: Checkpoint) -> int | None:
    """The tokens that a draft of this checkpoint has; `None` where it does not tell it. Raises `ModelLoadError`."""
    methods = checkpoint.nested("speculators_config").config.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, dict) or first.get("speculative_tokens") is None:
        return None
    return Checkpoint(checkpoint.directory, first, "speculators_config.proposal_methods.0.").count("speculative_tokens")


def _layer(checkpoint: Checkpoint) -> DraftDescription:
    """The card of a layer for multi-token prediction, whose tensors are checked when it is loaded."""
    checkpoint.refuse_unknown_keys(())
    if checkpoint.count("num_nextn_predict_layers", 1) != 1:
        checkpoint.refuse("num_nextn_predict_layers", "it must be 1")
    checkpoint.allow("num_centroids")
    body = checkpoint.nested(_BODY)
    size, vocabulary = body.count("hidden_size"), body.count("vocab_size")
    checkpoint.allow("draft_vocab_size", vocabulary)
    strange = sorted(name for name in checkpoint.sizes if not name.startswith(_MTP_LAYER) and name != _UNUSED)
    if strange:
        checkpoint.fail(f"its weights have {shorten(strange[:3])} in excess, beside {_MTP_LAYER}*")
    return DraftDescription(verifier(checkpoint), vocabulary, size, (), None, kind=_MTP, taps=(LAST_TAP,))


def _block(checkpoint: Checkpoint, taps: Sequence[Tap]) -> DraftDescription:
    """The card of a block drafter."""
    kind = _type(checkpoint)
    checkpoint.refuse_unknown_keys(_KNOWN_OF_BLOCKS | SELECTOR_KEYS if kind == _DFLASH2 else _KNOWN_OF_BLOCKS)
    body = checkpoint.nested(_BODY)
    body.refuse_unknown_keys(DECODER_KEYS)
    chosen = tuple(taps) or checkpoint.numbers(_BLOCK_LAYERS)
    if not chosen:
        checkpoint.refuse(_BLOCK_LAYERS, "it must be set")
    given = {key: value for key, value in checkpoint.config.items() if value is not None}
    unset = _HEADS if kind == _DSPARK else dict.fromkeys(_HEADS) | (_SECOND if kind == _DFLASH2 else {})
    return block_card(
        checkpoint,
        Checkpoint(checkpoint.directory, {**unset, **given}),
        body,
        chosen,
        predicts_next=_BLOCKS[kind],
        target=verifier(checkpoint),
    )


def write_eagle3(
    directory: Path,
    card: DraftDescription,
    weights: DraftWeights,
    *,
    architectures: Sequence[str],
    speculative_tokens: int,
    file_bytes: int | None = None,
) -> None:
    """Write an EAGLE-3 head of Llama layers into an existing directory, in bfloat16.

    `card` has a `FeatureShape` and layer numbers as taps; `weights` have a head and its vocabulary, and no embedding.
    `architectures` are those of the target, `speculative_tokens` the tokens of a chain that other engines draft
    by default. With `file_bytes`, tensors are spread over files of at most so many bytes, or one tensor. Raises
    `TypeError` for a card of another shape, and for weights of other parts.
    """
    from workers.model.tensor_file import in_bfloat16

    shape = card.shape
    if not isinstance(shape, FeatureShape):
        raise TypeError(f"{type(shape).__name__} is no shape of an EAGLE-3 head")
    if weights.head is None or weights.vocabulary is None or weights.embedding is not None:
        raise TypeError("weights: needed a head and its vocabulary, and no embedding")
    stored = in_bfloat16(
        {_LAYOUT.stored(name): value for name, value in weights.tensors.items()} | {ENDS[1]: weights.head}
    )
    _save(directory, stored | _maps(weights.vocabulary, card.target_vocabulary_size), file_bytes)
    config = _config(_EAGLE3, card, shape.body, architectures, speculative_tokens) | {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(weights.vocabulary),
        "target_hidden_size": None if shape.target_hidden_size == shape.body.hidden_size else shape.target_hidden_size,
        _LAYERS: list(card.taps),
        "norm_before_residual": shape.keeps_normed_residual,
        "norm_before_fc": shape.tap_norm == "joint",
        "fc_norm": shape.tap_norm == "each",
        "norm_output": shape.feeds_normed,
        "embed_requires_grad": False,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_dspark(
    directory: Path,
    card: DraftDescription,
    weights: DraftWeights,
    *,
    architectures: Sequence[str],
    file_bytes: int | None = None,
) -> None:
    """Write a DSpark drafter into an existing directory, in bfloat16; the embedding is the target's.

    `card` has a `MaskedBlockShape` with a Markov head whose slots predict the next tokens, and layer numbers as taps.
    `weights` may have a head, with the rows of their vocabulary or of all tokens; without one, the target's is used.
    The other parameters are those of `write_eagle3`. Raises `TypeError` for a card of another shape, and for weights
    with a vocabulary but no head, or with an embedding.
    """
    from workers.model.tensor_file import in_bfloat16

    shape = card.shape
    if not isinstance(shape, MaskedBlockShape) or shape.markov is None or not shape.predicts_next:
        raise TypeError(f"{shape} is no shape of a DSpark drafter")
    if (weights.head is None and weights.vocabulary is not None) or weights.embedding is not None:
        raise TypeError("weights: needed a head beside a vocabulary, and no embedding")
    stored = in_bfloat16(dict(weights.tensors) | ({} if weights.head is None else {ENDS[1]: weights.head}))
    if weights.vocabulary is not None:
        stored |= _maps(weights.vocabulary, card.target_vocabulary_size)
    _save(directory, stored, file_bytes)
    config = _config(_DSPARK, card, shape.body, architectures, shape.depths) | {
        "architectures": ["DSparkDraftModel"],
        "draft_vocab_size": card.vocabulary_size or card.target_vocabulary_size,
        "target_hidden_size": None,
        _BLOCK_LAYERS: list(card.taps),
        "block_size": shape.slots,
        "mask_token_id": shape.mask_token,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": shape.markov.rank,
        "markov_head_type": shape.markov.kind,
        "enable_confidence_head": shape.confidence != "none",
        "confidence_head_with_markov": shape.confidence == "markov",
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _maps(vocabulary: Tensor, size: int) -> dict[str, Tensor]:
    """The maps between the rows of a head and the tokens of a vocabulary of `size`; see `MAPS`."""
    import torch

    tokens = vocabulary.detach().to("cpu", torch.int64)
    is_drafted = torch.zeros(size, dtype=torch.bool)
    is_drafted[tokens] = True
    return dict(zip(MAPS, (tokens - torch.arange(len(tokens)), is_drafted), strict=True))


def _config(
    kind: str, card: DraftDescription, body: DecoderShape, architectures: Sequence[str], speculative_tokens: int
) -> dict[str, Any]:
    """What the configurations of all types have: the target, how many tokens a chain has, and the layers."""
    family, layers = ("qwen3", "Qwen3ForCausalLM") if body.has_head_norms else ("llama", "LlamaForCausalLM")
    return {
        _TYPE: kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens}],
            "verifier": {"name_or_path": card.target, "architectures": list(architectures)},
        },
        _BODY: {
            "model_type": family,
            "architectures": [layers],
            "vocab_size": card.target_vocabulary_size,
            "hidden_size": body.hidden_size,
            "num_hidden_layers": body.layers,
            "num_attention_heads": body.heads,
            "num_key_value_heads": body.kv_heads,
            "head_dim": body.head_width,
            "intermediate_size": body.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": body.norm_epsilon,
            "max_position_embeddings": body.rope.most_positions,
            "rope_parameters": {
                "rope_type": body.rope.kind,
                "rope_theta": body.rope.theta,
                **dict(body.rope.parameters),
            },
            "attention_bias": False,
            "tie_word_embeddings": False,
        }
        | ({} if body.has_head_norms else {"mlp_bias": False}),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        WRITER: WRITTEN_BY,
    }


def _save(directory: Path, tensors: Mapping[str, Tensor], file_bytes: int | None) -> None:
    """Write tensors to one file, or to several with an index, as `transformers` names them."""
    from safetensors.torch import save_file

    files: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    for name, value in tensors.items():
        if file_bytes is not None and files[-1] and sizes[-1] + value.nbytes > file_bytes:
            files.append({})
            sizes.append(0)
        files[-1][name] = value
        sizes[-1] += value.nbytes
    if len(files) == 1:
        save_file(files[0], directory / WEIGHTS, metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(part, directory / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


register(SpeculatorsFormat())
