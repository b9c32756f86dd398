"""What each kind of drafting module predicts from many positions of a batch at once: paths of tokens.

A path starts at a position n: the module has the tokens before n and the target's taps up to n - 2, because the target
has decided the token at n - 1 and not computed it. Depth j predicts the token at n + j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError
from workers.distill.modules.batches import TapBatch
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.exit_norm import ExitNorm
from workers.model.drafting.files import DraftingModule
from workers.model.drafting.heads import MedusaHeads


@dataclass(frozen=True, slots=True)
class Paths:
    """Predictions along paths. Depths beyond the end of a row are not predicted."""

    hidden: Tensor
    """[paths, depths, hidden size] Vectors for the head."""
    rows: Tensor
    """[paths] The row of the batch."""
    starts: Tensor
    """[paths] The position n of the first predicted token."""

    def parts(self, size: int) -> list[Paths]:
        """The paths in parts of at most this size."""
        split = (torch.split(part, size) for part in (self.hidden, self.rows, self.starts))
        return [Paths(*part) for part in zip(*split, strict=True)]


def predict(
    module: DraftingModule,
    ends: TargetEnds,
    batch: TapBatch,
    limit: int = 0,
    generator: torch.Generator | None = None,
    depths: int = 3,
) -> Paths:
    """Predictions of a module from up to `limit` positions of a batch, drawn by the generator; 0: from all positions.

    `depths` is the number of roll-outs of an EAGLE head, which has no depth of its own.
    """
    match module:
        case MedusaHeads():
            rows, starts = _starts(batch, limit, generator)
            hidden = ends.normalised(batch.taps[..., -ends.hidden_size :][rows, starts - 2])
            return Paths(module(hidden, _embedded(ends, batch, rows, starts - 1)), rows, starts)
        case BlockDrafter():
            return _by_block(module, ends, batch, limit, generator)
        case EagleHead():
            return _by_eagle(module, ends, batch, depths, _starts(batch, limit, generator))
        case ExitNorm():
            # The exit runs on the token at n - 1 itself.
            rows, starts = _starts(batch, limit, generator)
            states = batch.taps[..., -ends.hidden_size :][rows, starts - 1]
            return Paths(module(states.float()).unsqueeze(1), rows, starts)
        case _:
            raise ConfigurationError(f"module {type(module).__name__}: it predicts no paths from hidden states")


def _starts(batch: TapBatch, limit: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    rows, starts = batch.drafted.nonzero(as_tuple=True)
    if 0 < limit < len(rows):
        chosen = torch.randperm(len(rows), generator=generator)[:limit].sort().values.to(rows.device)
        rows, starts = rows[chosen], starts[chosen]
    return rows, starts


def _embedded(ends: TargetEnds, batch: TapBatch, rows: Tensor, positions: Tensor) -> Tensor:
    return ends.embed(batch.tokens[rows, positions])


def _by_block(
    module: BlockDrafter, ends: TargetEnds, batch: TapBatch, limit: int, generator: torch.Generator | None
) -> Paths:
    """Equally many anchors in each row, with one attention mask: drawn ones, or all. Anchors are the token at n - 1."""
    count, length = batch.tokens.shape
    each = length if not limit else max(1, limit // count)
    score = torch.rand((count, length), generator=generator).to(batch.tokens.device)
    starts = score.masked_fill(~batch.drafted, -1.0).topk(min(each, length), dim=1).indices.sort(dim=1).values
    places = torch.arange(length, device=starts.device).expand(count, -1)
    fused, keys, values = module.context(batch.taps.float(), places)
    positions = places.masked_fill(places >= batch.lengths.unsqueeze(1), -1)
    anchors = (starts - 1).clamp(min=1)
    row = torch.arange(count, device=starts.device).unsqueeze(1)
    last, before = ends.embed(batch.tokens[row, anchors]), fused[row, anchors - 1]
    hidden = module(last.float(), before, anchors, keys, values, positions)
    is_place = batch.drafted[row, starts]
    return Paths(hidden[is_place], row.expand_as(starts)[is_place], starts[is_place])


def _by_eagle(
    module: EagleHead, ends: TargetEnds, batch: TapBatch, depths: int, wanted: tuple[Tensor, Tensor]
) -> Paths:
    """Unrolled as in EAGLE-3's training-time test: from depth 1 on, own outputs take the place of the fused taps.

    The prediction at depth s of the input at position i attends to the fused taps up to i - s, and after them to one
    position of each earlier depth: what it would have drafted itself.
    """
    count, length = batch.tokens.shape
    length -= 1
    features, following = module.fusion(batch.taps.float()[:, :-1]), ends.embed(batch.tokens[:, 1:]).float()
    places = torch.arange(length, device=features.device)
    positions = places.expand(count, -1)
    past, masks, outputs = module.no_past(count), [], []
    for depth in range(depths):
        masks = [places.unsqueeze(0) == places.unsqueeze(1) - (depth - earlier) for earlier in range(1, depth)]
        own = places.unsqueeze(1) - depth
        context = (places.unsqueeze(0) <= own) & (places.unsqueeze(0) > own - module.shape.layer.window)
        diagonal = [places.unsqueeze(0) == places.unsqueeze(1)] if depth else []
        mask = torch.cat([context, *masks, *diagonal], dim=1).unsqueeze(0)
        output, keys, values = module(features, following, positions, past, mask)
        past = (torch.cat([past[0], keys], dim=1), torch.cat([past[1], values], dim=1))
        outputs.append(output)
        features = torch.cat([output[:, :1], output[:, :-1]], dim=1)  # the output at i - 1 is the feature at i
    rows, starts = wanted
    # The path from n begins with the input at n - 2; its depth s is the prediction of the input at n - 2 + s.
    hidden = [
        module.normalised(output)[rows, (starts - 2 + depth).clamp(max=length - 1)]
        for depth, output in enumerate(outputs)
    ]
    return Paths(torch.stack(hidden, dim=1), rows, starts)
