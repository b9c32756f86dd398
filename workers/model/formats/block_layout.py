"""What checkpoints of DFlash (Chen et al. 2026), DFlash2 and DSpark share: the shape of the drafter and its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from cluster.core.drafting import Tap
from workers.model.draft_card import DraftDescription
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.decoder_config import decoder_shape
from workers.model.formats.draft_vocabulary import MAPS, ends_sizes
from workers.model.public_shapes import ConvolutionShape, MarkovShape, MaskedBlockShape, SelectorShape

_FROM_ANCHOR, _BONUS_ANCHOR = "sample_from_anchor", "dspark_bonus_anchor"
BLOCK_KEYS = frozenset(
    ("mask_token_id", "is_causal", "causal", "use_swa", "attention_mode", _FROM_ANCHOR, _BONUS_ANCHOR)
)
"""The keys of blocks that are read here and that may change the arithmetic."""
_CONVOLUTION = ("conv_kernel_size", "conv_group_size")
_SELECTOR = ("selector_rank", "selector_top_k")
SELECTOR_KEYS = frozenset((*_CONVOLUTION, *_SELECTOR))
"""The keys that DFlash2 has besides; all of them are set, or none is."""
_SCALE, _FACTOR, _CAP = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
SCALE_KEYS = frozenset((_SCALE, _FACTOR, _CAP))
"""The keys of factors on embeddings and logits, and of the logits' soft bound."""
_MOST_SLOTS = 256
_KINDS: dict[str, Literal["vanilla", "gated", "rnn"]] = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}
_FUSED_NORM = "hidden_norm.weight"


def has_block(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint, of any original format, normalises fused taps outside of its layers."""
    return "speculators_model_type" not in checkpoint.config and {"fc.weight", _FUSED_NORM} <= checkpoint.sizes.keys()


def block_card(
    checkpoint: Checkpoint,
    config: Checkpoint,
    body: Checkpoint,
    taps: Sequence[Tap],
    *,
    predicts_next: bool,
    target: str = "",
) -> DraftDescription:
    """The card of a checkpoint whose own keys are in `config` and those of its layers in `body`.

    `predicts_next` is whether a slot predicts the token after it where no key says so. Without a key that says so,
    there is neither a Markov head nor a confidence head. Raises `ModelLoadError`.
    """
    vocabulary, size = body.count("vocab_size"), body.count("hidden_size")
    config.allow("target_hidden_size", size)
    config.allow("is_causal", False)
    config.allow("causal", False)
    config.allow("use_swa", False)
    config.allow("attention_mode", "gqa")
    predicts_next = _predicts_next(config, predicts_next)
    reduced = config.reduced_vocabulary(vocabulary)
    has_bias = body.flag("attention_bias")
    layers = replace(
        decoder_shape(body, checkpoint.sizes, layers=body.layers(), first="layers.0."),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_head_norms=True,
    )
    markov, slots = _markov(config, vocabulary, reduced, predicts_next), _slots(config)
    selector, convolution = _second(config, vocabulary, size, slots)
    if selector is not None and (markov is not None or reduced < vocabulary):
        config.refuse(_SELECTOR[0], "it must be unset where there is a Markov head or a reduced vocabulary")
    shape = MaskedBlockShape(
        body=layers,
        slots=slots,
        taps=len(taps),
        mask_token=config.token("mask_token_id", vocabulary),
        predicts_next=predicts_next,
        markov=markov,
        confidence=_confidence(config, markov),
        selector=selector,
        convolution=convolution,
        embedding_scale=config.number(_SCALE, 1.0),
        logit_scale=config.number(_FACTOR, 1.0),
        logit_cap=config.number(_CAP, 1.0) if config.config.get(_CAP) else None,
    )
    checkpoint.check_tensors(shape.tensors() | ends_sizes(checkpoint, vocabulary, reduced, size, size), MAPS)
    return DraftDescription(
        target,
        vocabulary,
        size,
        (),
        reduced if reduced < vocabulary else None,
        kind="block",
        taps=tuple(taps),
        shape=shape,
    )


def _predicts_next(config: Checkpoint, default: bool) -> bool:
    """Whether a slot predicts the token after it. vLLM's key says whether the first slot predicts nothing."""
    found = config.flag(_FROM_ANCHOR, not config.flag(_BONUS_ANCHOR, not default))
    if config.flag(_BONUS_ANCHOR, not found) == found:
        config.refuse(_BONUS_ANCHOR, f"it must be {not found} where {_FROM_ANCHOR} is {found}")
    return found


def _slots(config: Checkpoint) -> int:
    slots = config.count("block_size", least=2)
    if slots > _MOST_SLOTS:
        config.refuse("block_size", f"it must be at most {_MOST_SLOTS}")
    return slots


def _markov(config: Checkpoint, vocabulary: int, rows: int, predicts_next: bool) -> MarkovShape | None:
    rank = config.count("markov_rank", 0, least=0)
    if not rank:
        return None
    config.allow("markov_head_type", *_KINDS)
    kind = _KINDS[config.config.get("markov_head_type") or "vanilla"]
    if kind == "rnn" and not predicts_next:
        config.refuse("markov_head_type", "it must be vanilla or gated where the last token's slot predicts nothing")
    return MarkovShape(rank, kind, vocabulary, rows)


def _second(
    config: Checkpoint, vocabulary: int, size: int, slots: int
) -> tuple[SelectorShape | None, ConvolutionShape | None]:
    """The selector and the convolutions of DFlash2."""
    if all(config.config.get(key) is None for key in SELECTOR_KEYS):
        return None, None
    width, group = map(config.count, _CONVOLUTION)
    rank, candidates = map(config.count, _SELECTOR)
    if size % group:
        config.refuse(_CONVOLUTION[1], f"it must divide hidden_size, {size}")
    for key, found, most, what in (
        (_CONVOLUTION[0], width, slots, "block_size"),
        (_SELECTOR[1], candidates, vocabulary, "vocab_size"),
    ):
        if found > most:
            config.refuse(key, f"it must be at most {what}, {most}")
    return SelectorShape(rank, candidates, vocabulary), ConvolutionShape(width, group)


def _confidence(config: Checkpoint, markov: MarkovShape | None) -> Literal["none", "hidden", "markov"]:
    if not config.flag("enable_confidence_head"):
        return "none"
    if not config.flag("confidence_head_with_markov"):
        return "hidden"
    if markov is None:
        config.refuse("confidence_head_with_markov", "it must be false where markov_rank is 0")
    return "markov"
