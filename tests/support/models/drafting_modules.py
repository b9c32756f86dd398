"""Small random drafting modules for the tiny target, as `pilotfish distill` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from workers.model.draft_card import DraftCard
from workers.model.draft_shapes import BlockShape, EagleShape, ExitShape, HeadsShape, LayerShape, Shape, TableShape
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import DraftingModule, load_ends, make_module, save_drafter
from workers.model.drafting.selector import Selector

CPU = torch.device("cpu")


def shapes(hidden_size: int) -> dict[str, Shape]:
    """A small shape of each kind."""
    layer = LayerShape(hidden_size, 4, 2, 8, 48, rope_theta=10000.0, norm_epsilon=1e-5, window=16)
    return {
        "heads": HeadsShape(depths=3, mix_rank=16, selector_rank=8),
        "block": BlockShape(layer, block=4, layers=2, selector_rank=8),
        "eagle": EagleShape(layer, layers=2),
        "exit": ExitShape((0, 1), has_norm=True),
        "table": TableShape(4),
    }


def card_for(
    target: Path, kind: str, taps: Sequence[int], size: int | None = None, shape: Shape | None = None
) -> DraftCard:
    """A card for a draft of the model in `target`."""
    config = AutoConfig.from_pretrained(target)
    shape = shape or shapes(config.hidden_size)[kind]
    return DraftCard(target.name, config.vocab_size, config.hidden_size, (), size, kind, tuple(taps), shape)


def randomized(module: nn.Module, seed: int = 0) -> None:
    """Give every parameter a random value: an untrained module has zeros that hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5


def save(
    target: Path,
    directory: Path,
    kind: str,
    taps: Sequence[int] = (1, 2),
    vocabulary: Sequence[int] | None = None,
    *,
    shape: Shape | None = None,
    seed: int = 0,
    int8: bool = False,
) -> DraftingModule:
    """Write a random module of a kind into `directory`. Returns it, in float32."""
    tokens = None if vocabulary is None else torch.tensor(vocabulary)
    card = card_for(target, kind, taps, None if vocabulary is None else len(vocabulary), shape)
    ends = load_ends(target, card, tokens, torch.float32, CPU)
    if card.shape is None:
        raise ValueError(f"kind: {kind!r} has no shape")
    module = make_module(ends, card.shape, taps)
    randomized(module, seed)
    directory.mkdir(parents=True, exist_ok=True)
    save_drafter(directory, card, module, tokens, target_directory=target, int8=int8)
    return module


def selected(
    selector: Selector, ends: TargetEnds, hidden: Tensor, previous: Tensor, rows: Tensor, log_probabilities: Tensor
) -> Tensor:
    """Log-probabilities [..., candidates] of candidates, given the token before.

    `hidden` and `previous` (its embedding) are [..., hidden size], `rows` [..., candidates] are the candidates' rows of
    the head and `log_probabilities` [..., candidates] theirs without the selector. The mass of all candidates together
    is kept: the selector distributes it anew among them.
    """
    corrected = selector(hidden, previous)
    scores = ends.logits_of(rows, corrected).float()
    mass = log_probabilities.logsumexp(dim=-1, keepdim=True)
    kept: Tensor = scores.log_softmax(dim=-1) + mass
    return kept


def causal_mask(head: EagleHead, positions: Tensor, context: Tensor) -> Tensor:
    """The mask [rows, tokens, context] of a chain: earlier positions and itself, within the window.

    `positions` [rows, tokens], `context` [rows, context]: positions of all keys, -1 for padding.
    """
    own, key = positions.unsqueeze(2), context.unsqueeze(1)
    return (key >= 0) & (key <= own) & (key > own - head.shape.layer.window)
