"""Trains an EAGLE-3 head by its own roll-outs over texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError
from workers.distill.device_training import DevicePlan, DeviceTraining, Measured
from workers.distill.divergence import FORWARD_KL, divergence_named
from workers.distill.eagle3.head import LM_HEAD, Eagle3Head
from workers.distill.eagle3.states import TextBatch, TextStates, target_probabilities
from workers.distill.examples import fill_batches
from workers.distill.peers import ALONE, Peers

MULTIPLE = 64
"""Batches on a GPU have lengths that are multiples of this: few shapes, and none that a kernel copies to align it."""
_NEIGHBOURS = 32
"""Shuffled texts are sorted by length within this many batches. This saves padding and keeps the order random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollOutPlan(DevicePlan):
    """Settings of a training by roll-outs."""

    depths: int = 5
    """Steps of a roll-out."""
    batch_tokens: int = 16384
    """Tokens of a batch, padding included, of all processes together."""
    packs: bool = False
    """Whether texts of any length share rows, as long as the longest text, instead of being padded to similar ones."""
    loss: str = FORWARD_KL
    """The name of the divergence that is minimised, one of `DIVERGENCES`."""
    overlap: float = 0.0
    """Weight of the share of tokens that the best coupling rejects, added to the divergence."""


class RollOutTraining(DeviceTraining[Eagle3Head, TextStates, TextBatch]):
    """Trains one head for a target."""

    _plan: RollOutPlan

    def __init__(
        self, target: Any, head: Eagle3Head, vocabulary: Tensor, plan: RollOutPlan, peers: Peers = ALONE
    ) -> None:
        """`target` is a decoder-only model of `transformers` on the device.

        `vocabulary` [draft vocabulary] are the tokens of the rows of the head, ascending. `peers` train with this
        process; they have sharded the head.
        """
        super().__init__(target.get_output_embeddings().weight, head, plan, peers)
        self._target = target
        self._vocabulary = vocabulary
        self._embedding = target.get_input_embeddings().weight

    @torch.no_grad()
    def measure(self, texts: TextStates) -> Measured:
        plan, module = self._plan, self._module
        module.eval()
        right, known = torch.zeros(plan.depths), torch.zeros(plan.depths)
        paths = accepted = 0.0
        for rows in _grouped(texts.learnable, texts.lengths, plan.batch_tokens):
            batch = texts.batch(rows)
            starts = self._drafted(batch, 0).to(batch.tokens.device)
            outputs = self._outputs(batch)
            still = torch.ones_like(starts)
            for depth, output in enumerate(outputs):
                chosen = self._vocabulary[self._logits(output).argmax(dim=-1)]
                is_right = (chosen[:, :-1] == batch.tokens[:, 2:]) & starts
                # A path from i has its prediction of this depth at i + depth.
                here, ahead = starts[:, : max(0, starts.shape[1] - depth)], starts[:, depth:]
                counted = here & ahead & still[:, : here.shape[1]]
                right[depth] += float((counted & is_right[:, depth:]).sum())
                known[depth] += float(counted.sum())
                still = counted & is_right[:, depth:]
                accepted += float(still.sum())
            paths += float(starts.sum())
        module.train()
        slots = tuple((right / known.clamp(min=1)).tolist())
        return Measured(slots, 1 + accepted / max(1.0, paths))

    def _losses(self, _: TextStates, batch: TextBatch) -> tuple[Tensor, Tensor]:
        plan = self._plan
        # These are found on the CPU, so that no step waits for the device.
        drafted = [self._drafted(batch, depth).flatten().nonzero().flatten() for depth in range(plan.depths)]
        first = torch.full((batch.tokens.shape[0] * (batch.tokens.shape[1] - 2),), -1)
        first[drafted[0]] = torch.arange(len(drafted[0]))
        device = batch.tokens.device
        wanted = self._wanted(batch, drafted[0].to(device, non_blocking=True))
        counts = torch.tensor([len(places) for places in drafted], dtype=torch.float32)
        counts = self._peers.summed(counts.to(device, non_blocking=True))
        weights = (counts > 0) * plan.decay ** torch.arange(plan.depths, device=device)
        weights = weights / weights.sum() / counts.clamp(min=1)
        loss = wanted.new_zeros(())
        for depth, output in enumerate(self._outputs(batch)):
            places = drafted[depth].to(device, non_blocking=True)
            logits = self._logits(output[:, :-1].flatten(0, 1)[places]).float()
            goal = wanted[first[drafted[depth]].to(device, non_blocking=True)]
            loss = loss + weights[depth] * roll_out_loss(logits, goal, plan.loss, plan.overlap)
        return loss, loss.reshape(1)

    def _wanted(self, batch: TextBatch, places: Tensor) -> Tensor:
        """The target's probabilities [places, draft vocabulary] of the tokens that outputs at some places predict.

        `places` are positions among [rows x (length - 2)]. A row sums to less than one where the target has other
        tokens.
        """
        return target_probabilities(self._target, batch.final[:, 1:-1].flatten(0, 1)[places], self._vocabulary)

    def _outputs(self, batch: TextBatch) -> list[Tensor]:
        """The outputs of each depth at all positions of a batch but the last one."""
        following = self._embedding[batch.tokens[:, 1:]].float()
        with self._autocast():
            plan = self._plan
            places = None if batch.packed is None else batch.packed.places[:, :-1].to(following.device)
            found: list[Tensor] = self._module(
                batch.taps[:, :-1], following, plan.depths, places=places, recomputes=plan.recomputes
            )
            return found

    def _logits(self, outputs: Tensor) -> Tensor:
        with self._autocast():
            return self._module.logits(outputs)

    def _drafted(self, batch: TextBatch, depth: int) -> Tensor:
        """Positions [rows, length - 2] whose output of this depth predicts a token of the answer, on the CPU."""
        if (packed := batch.packed) is not None:
            return ((packed.places >= packed.first + depth) & (packed.left >= 2))[:, :-2]
        places = torch.arange(batch.tokens.shape[1] - 2)
        return (places >= batch.first.unsqueeze(1) + depth) & (places < batch.lengths.unsqueeze(1) - 2)

    def _batches(self, texts: TextStates) -> Iterator[tuple[int, TextBatch]]:
        parts, peers = self._checked_parts(), self._peers
        usable = [[row for row in texts.learnable if row % parts == part] for part in range(parts)]
        if not all(usable):
            raise ConfigurationError(
                f"texts: needed an answer of two tokens within the longest length in each of {parts} parts, found none"
            )
        multiple = MULTIPLE if self._device.type == "cuda" else 1
        epoch = 0
        while True:
            draw = random.Random(f"{self._plan.seed}:{epoch}")  # noqa: S311 - an order, not a secret
            if self._plan.packs:
                orders = [draw.sample(rows, len(rows)) for rows in usable]
                yield from ((epoch, batch) for batch in self._packed(texts, orders))
                epoch += 1
                continue
            of_parts = []
            for rows in usable:
                order = draw.sample(rows, len(rows))
                of_parts.append(_grouped(order, texts.lengths, self._plan.batch_tokens // parts))
                draw.shuffle(of_parts[-1])
            for groups in zip(*of_parts, strict=False):
                chosen = groups if peers.count == 1 else groups[peers.rank : peers.rank + 1]
                yield epoch, texts.batch([row for group in chosen for row in group], multiple)
            epoch += 1

    def _packed(self, texts: TextStates, orders: Sequence[Sequence[int]]) -> Iterator[TextBatch]:
        """Batches of rows with several texts each, in the order of each part."""
        peers, multiple = self._peers, MULTIPLE if self._device.type == "cuda" else 1
        length = -(-max(texts.lengths[row] for order in orders for row in order) // multiple) * multiple
        rows = max(1, self._plan.batch_tokens // len(orders) // length)
        of_parts = [_rows_of(order, texts.lengths, length, rows) for order in orders]
        for groups in zip(*of_parts, strict=False):
            chosen = groups if peers.count == 1 else groups[peers.rank : peers.rank + 1]
            yield texts.packed([row for group in chosen for row in group], length)

    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """In bfloat16, Muon for the matrices of the layer, and AdamW for vectors and the output matrix; else AdamW.

        Muon multiplies in bfloat16, for which many CPUs have no instructions.
        """
        plan = self._plan
        named = dict(self._module.named_parameters())
        head = [named.pop(LM_HEAD)]
        inner = [value for value in named.values() if value.dim() == 2]
        vectors = [value for value in named.values() if value.dim() == 1]
        decayed = head if plan.is_bfloat16 else head + inner
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": decayed, "weight_decay": plan.weight_decay}]
        adam = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95))
        return (self._muon(inner), adam) if plan.is_bfloat16 else (adam,)


def roll_out_loss(logits: Tensor, goal: Tensor, name: str, overlap: float = 0.0) -> Tensor:
    """The sum over positions of a divergence of `DIVERGENCES`, but for what does not depend on the logits.

    So many times `overlap` is added, the share of tokens that the best coupling rejects.

    `logits` and `goal` are [positions, draft vocabulary], float32. `goal` are the target's probabilities; a row sums to
    less than one where the target has other tokens.
    """
    if name == FORWARD_KL and not overlap:
        return torch.nn.functional.cross_entropy(logits, goal, reduction="sum")
    target, known = goal.clamp(min=torch.finfo(goal.dtype).tiny).log(), torch.ones_like(goal, dtype=torch.bool)
    return divergence_named(name, overlap)(logits.log_softmax(dim=-1), target, known).sum()


def _grouped(order: Sequence[int], lengths: Sequence[int], most_tokens: int) -> list[tuple[int, ...]]:
    """Texts in batches of at most so many tokens with padding, or one text; neighbours are sorted by length."""
    mean = sum(lengths[row] for row in order) / max(1, len(order))
    neighbours = max(1, int(_NEIGHBOURS * most_tokens / max(1.0, mean)))
    return [
        batch
        for start in range(0, len(order), neighbours)
        for batch in fill_batches(
            sorted(order[start : start + neighbours], key=lengths.__getitem__), lengths, most_tokens
        )
    ]


def _rows_of(order: Sequence[int], lengths: Sequence[int], length: int, most: int) -> list[list[list[int]]]:
    """Texts in batches of at most `most` rows of `length` tokens, each text in the first row with room for it."""
    batches: list[list[list[int]]] = []
    left: list[int] = []
    for text in order:
        fits = next((row for row, space in enumerate(left) if space >= lengths[text]), None)
        if fits is None and len(left) in (0, most):
            batches.append([])
            left = []
        if fits is None:
            batches[-1].append([])
            left.append(length)
            fits = len(left) - 1
        batches[-1][fits].append(text)
        left[fits] -= lengths[text]
    return batches
