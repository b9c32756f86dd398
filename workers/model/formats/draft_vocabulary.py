"""Own embeddings, own heads and reduced vocabularies of draft checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from workers.model.draft_card import DraftDescription
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.registry import DraftWeights
from workers.model.public_shapes import PublicShape, Sizes

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING, _HEAD = ENDS = ("embed_tokens.weight", "lm_head.weight")
"""Names of a draft's own embedding and head."""
_BODY = "transformer_layer_config"
"""The section of the decoder layers in configurations of `speculators`."""
_OFFSETS, _IS_DRAFTED = MAPS = ("d2t", "t2d")
"""Names of the maps of a reduced vocabulary: row i of the head is the token `i + d2t[i]`, and `t2d[token]` says whether
a token has a row."""


def ends_sizes(checkpoint: Checkpoint, vocabulary: int, reduced: int, size: int, target_size: int) -> Sizes:
    """The sizes of the ends and maps that a checkpoint has or needs.

    An absent embedding or head is the target's, which needs the target's width, and for a head all its tokens. An
    absent head that is tied to the draft's own embedding needs all tokens alone.
    """
    wanted: Sizes = {}
    for name, rows in ((_EMBEDDING, vocabulary), (_HEAD, reduced)):
        is_other = size != target_size and not (name == _HEAD and _is_tied(checkpoint))
        if name in checkpoint.sizes or is_other or rows != vocabulary:
            wanted[name] = (rows, size)
    if reduced < vocabulary:
        wanted[_OFFSETS] = (reduced,)
    for name, count in ((_OFFSETS, reduced), (_IS_DRAFTED, vocabulary)):
        if name in checkpoint.sizes:
            wanted[name] = (count,)
    return wanted


def read_with_ends(
    checkpoint: Checkpoint, card: DraftDescription, stored: Callable[[str], str] = lambda name: name
) -> DraftWeights:
    """The weights of a draft with its own ends and maps. `stored` gives the name in the files of a tensor of its shape.

    Raises `ModelLoadError`.
    """
    if not isinstance(card.shape, PublicShape):
        raise TypeError(f"{type(card.shape).__name__} is no shape of this format")
    names = {name: stored(name) for name in card.shape.tensors()}
    found = checkpoint.weights([*names.values(), *ENDS])
    if any(name in checkpoint.sizes for name in MAPS):
        found |= checkpoint.tensors(MAPS)
    vocabulary = None
    if card.vocabulary_size is not None:
        vocabulary = _tokens(checkpoint, found[_OFFSETS], found.get(_IS_DRAFTED), card.target_vocabulary_size)
    tensors = {name: found[own] for name, own in names.items()}
    head = found[_EMBEDDING] if _is_tied(checkpoint) else found.get(_HEAD)
    return DraftWeights(tensors, vocabulary, found.get(_EMBEDDING), head)


def _is_tied(checkpoint: Checkpoint) -> bool:
    """Whether a draft's own embedding is its head: it has no head, and the configuration ties them."""
    parts = (checkpoint, checkpoint.nested(_BODY))
    has_one_end = _EMBEDDING in checkpoint.sizes and _HEAD not in checkpoint.sizes
    return has_one_end and any(part.flag("tie_word_embeddings") for part in parts)


def _tokens(checkpoint: Checkpoint, offsets: Tensor, is_drafted: Tensor | None, size: int) -> Tensor:
    """The tokens of the head's rows. Raises `ModelLoadError` unless they ascend and agree with `is_drafted`."""
    import torch

    if offsets.is_floating_point():
        checkpoint.fail(f"{_OFFSETS} must be integers, not {offsets.dtype}")
    tokens = offsets.long() + torch.arange(len(offsets))
    if bool((tokens.diff() <= 0).any()) or int(tokens[0]) < 0 or int(tokens[-1]) >= size:
        checkpoint.fail(
            f"{_OFFSETS} must hold the offset of each row's token from the row's number, so that the tokens ascend "
            f"from 0 to at most {size - 1}; it gives tokens from {int(tokens.min())} to {int(tokens.max())}"
        )
    if is_drafted is not None and is_drafted.bool().nonzero().flatten().tolist() != tokens.tolist():
        checkpoint.fail(f"{_IS_DRAFTED} must name the tokens of {_OFFSETS}; they differ")
    return tokens
