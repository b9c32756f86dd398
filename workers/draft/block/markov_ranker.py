"""Ranks the candidates of a block's slots from left to right: each depth is conditioned on the token drafted before it.

Every depth adds the bias of DSpark's Markov head or of DFlash2's selector, and the shared noise of the position in
sampled rows, before its candidates are chosen. With one sibling this is the published chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

from workers.draft.common.modules.product import MakeProduct, Product
from workers.draft.common.modules.ranked_paths import MOST_PARENTS, RankedPaths
from workers.draft.common.modules.shortlist import Shortlist
from workers.draft.common.modules.slot_ranking import listed_paths, rank_slots
from workers.forward.native.markov import GivenSlots, MarkovKind, MarkovSlots, MarkovWeights
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.public import PublicModule
from workers.model.public_shapes import MaskedBlockShape, SelectorShape
from workers.sampling.context import DecisionContext
from workers.sampling.warp import is_only_divided
from workers.transfer import tensor_on

LoadSlots = Callable[[MarkovWeights], MarkovSlots | None]
"""Packs the weights of a Markov head for the CPU kernels; `None` where there are none."""

_FIRST, _SECOND = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_MOST_DRAWN = 1 << 14
"""Most tokens of a draft vocabulary whose noise is computed: of more, those of a shortlist have it alone."""
_LEAST = 1e-6
"""Bound of confidences away from 0 and 1, where one is divided by its distance to 1."""


class MarkovRanker:
    """The output head, the Markov head or the selector, and the confidence head of a drafter.

    It may lack all but the first. The CPU kernels rank all slots in one call if no logits are truncated or changed.
    """

    def __init__(
        self,
        module: PublicModule,
        ends: TargetEnds,
        make: MakeProduct,
        shortlist: Shortlist,
        load: LoadSlots = lambda _: None,
    ) -> None:
        """`load` packs a Markov head; unset: torch ranks all rows."""
        shape = module.shape
        if not isinstance(shape, MaskedBlockShape):
            raise TypeError(f"{type(shape).__name__} is no shape of a block drafter")
        self._shape, self._make, self._shortlist = shape, make, shortlist
        self._load_slots = load
        self._head, self._bias = make(ends.head), None if ends.bias is None else ends.bias.float()
        self._load(module)

    def with_weights(self, module: PublicModule) -> MarkovRanker:
        """A ranker with the weights of `module`, which shares the target's head with this one."""
        other = copy(self)
        other._load(module)
        return other

    def _load(self, module: PublicModule) -> None:
        shape, make = self._shape, self._make
        self._markov: _MarkovHead | _Selector | None = None
        self._slots: MarkovSlots | None = None
        if shape.markov is not None:
            self._slots = self._load_slots(_weights_of(module, shape))
            second = make(module.tensors[_SECOND]) if self._slots is None else self._slots.multiply
            self._markov = _MarkovHead(module, shape.markov.rank, second)
        elif shape.selector is not None:
            self._markov = _Selector(module, shape.selector, make)
        self._confidence = None
        if shape.confidence != "none":
            weight, bias = (module.tensors[f"confidence_head.proj.{part}"].float() for part in ("weight", "bias"))
            self._confidence = (weight, bias)

    def rank(
        self, hidden: Tensor, last: Sequence[int], contexts: Sequence[DecisionContext], siblings: int
    ) -> list[RankedPaths]:
        """Rank the candidates of rows from their vectors for the head, float32 [rows, depths, hidden size].

        `last` are the rows' last committed tokens, `contexts` [rows x depths] those of the decisions at each depth. At
        most `siblings` candidates are listed below one.
        """
        base = self._head(hidden.flatten(0, 1))
        scale, cap = self._shape.logit_scale, self._shape.logit_cap
        base = (base if self._bias is None else base + self._bias).view(*hidden.shape[:2], -1)
        base = base if scale == 1.0 else scale * base
        base = base if cap is None else cap * (base / cap).tanh()
        before = tensor_on(hidden.device, list(last), torch.int64)
        if self._slots is not None and _are_plain(contexts, base.shape[2]):
            siblings, most = min(siblings, base.shape[2]), MOST_PARENTS if siblings > 1 else 1
            given = self._given(base, hidden, before, contexts)
            found = self._slots.rank(given, self._shortlist.vocabulary, siblings=siblings, most=most)
            return listed_paths(found.levels, found.parents)
        slots = _Slots(base, hidden, self._markov, self._confident)
        return rank_slots(slots, self._shortlist, before, contexts, siblings)

    def _given(self, base: Tensor, hidden: Tensor, before: Tensor, contexts: Sequence[DecisionContext]) -> GivenSlots:
        """What the kernels rank. The noise of a position is the same below all parents."""
        rows = contexts[:: base.shape[1]]
        if all(one.is_greedy for one in rows):
            return GivenSlots(base, hidden, before)
        factors = torch.tensor([1.0 if one.is_greedy else 1.0 / one.sampling.temperature for one in rows])
        base = self._shortlist.with_noise((base * factors.view(-1, 1, 1)).flatten(0, 1), contexts).view_as(base)
        return GivenSlots(base, hidden, before, factors)

    def _confident(self, confidences: Tensor, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Confidences [rows, parents, siblings] in which the first one's is the confidence head's.

        The others keep their shares of the rest. A first one that cannot be chosen stays at 0.
        """
        if self._confidence is None:
            return confidences
        weight, bias = self._confidence
        if self._shape.confidence == "markov" and embedded is not None:
            hidden = torch.cat([hidden, embedded], dim=-1)
        sure = torch.nn.functional.linear(hidden, weight, bias).sigmoid().clamp(_LEAST, 1.0 - _LEAST)
        first, others = confidences[..., :1], confidences[..., 1:]
        others = others * ((1.0 - sure) / (1.0 - first).clamp(min=_LEAST))
        return torch.cat([torch.where(first > 0.0, sure, first), others.clamp(max=1.0)], dim=-1)


class _Slots:
    """The slots of a block; see `Slots`."""

    def __init__(
        self,
        base: Tensor,
        hidden: Tensor,
        markov: _MarkovHead | _Selector | None,
        confident: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ) -> None:
        """`base` [rows, depths, draft vocabulary] are the logits of the output head."""
        self._base, self._hidden = base, hidden
        self._markov, self._confident = markov, confident
        self._state = None if markov is None else hidden.new_zeros(len(hidden), 1, markov.rank)
        self._own, self._embedded = hidden, hidden[:0]

    def logits(self, depth: int, previous: Tensor) -> Tensor:
        own = slice(depth, depth + 1)
        self._own, logits = (one[:, own].expand(-1, previous.shape[1], -1) for one in (self._hidden, self._base))
        if self._markov is not None and self._state is not None:
            self._embedded = self._markov.embedded(previous)
            logits, self._state = self._markov.corrected(logits, self._embedded, self._own, self._state)
        return logits

    def confidences(self, found: Tensor) -> Tensor:
        return self._confident(found, self._own, None if self._markov is None else self._embedded)

    def follow(self, origins: Tensor) -> None:
        if self._state is not None:
            self._state = self._state.gather(1, origins.unsqueeze(2).expand(-1, -1, self._state.shape[2]))


class _MarkovHead:
    """The bias on the logits of a slot, given the token before it."""

    def __init__(self, module: PublicModule, rank: int, second: Product) -> None:
        """`second` is the product with the second matrix."""
        self.rank = rank
        self._first, self._second = module.tensors[_FIRST], second
        self._gate, self._joint = (_linear(module, f"markov_head.{name}") for name in ("gate_proj", "joint_proj"))

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., rank] of the tokens before."""
        return self._first[tokens].float()

    def corrected(self, logits: Tensor, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The biased logits [rows, parents, draft vocabulary] of a slot, and the next state [rows, parents, rank].

        `embedded` and `state` are [rows, parents, rank], `hidden` [rows, parents, hidden size] is the slot's.
        """
        mixed = embedded
        if self._gate is not None:
            weight, bias = self._gate
            joined = torch.cat([hidden, embedded], dim=-1)
            mixed = torch.nn.functional.linear(joined, weight, bias).sigmoid() * embedded
        elif self._joint is not None:
            weight, bias = self._joint
            joined = torch.cat([state, embedded, hidden], dim=-1)
            gate, candidate, output = torch.nn.functional.linear(joined, weight, bias).chunk(3, dim=-1)
            gate = gate.sigmoid()
            state, mixed = gate * state + (1.0 - gate) * candidate.tanh(), output.tanh()
        return logits + self._second(mixed.flatten(0, 1)).view(*mixed.shape[:2], -1), state


class _Selector:
    """Ranks the best candidates of a slot, given the token before it and the slot's vector."""

    def __init__(self, module: PublicModule, shape: SelectorShape, make: MakeProduct) -> None:
        self.rank, self._candidates = shape.rank, shape.candidates
        name = "candidate_selector"
        self._before, self._after = (module.tensors[f"{name}.{part}_codebook"] for part in ("predecessor", "successor"))
        self._project = make(module.tensors[f"{name}.hidden_projection.weight"])

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., rank] of the tokens before."""
        return self._before[tokens].float()

    def corrected(self, logits: Tensor, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [rows, parents, vocabulary] of a slot's candidates; `-inf` elsewhere. There is no state.

        `logits` and `hidden` [rows, parents, hidden size] are the same for all parents of a row.
        """
        values, tokens = logits[:, 0].topk(self._candidates)  # [rows, candidates]
        mixed = embedded * self._project(hidden[:, 0].contiguous()).unsqueeze(1)
        scores = values.unsqueeze(1) + mixed @ self._after[tokens].float().transpose(1, 2)
        places = tokens.unsqueeze(1).expand_as(scores)
        return torch.full_like(logits, float("-inf")).scatter(2, places, scores), state


def _are_plain(contexts: Sequence[DecisionContext], size: int) -> bool:
    """Whether the logits of all decisions, `size` each, are used as they are, or divided by a temperature and drawn."""
    return all(map(is_only_divided, contexts)) and (size <= _MOST_DRAWN or all(one.is_greedy for one in contexts))


def _weights_of(module: PublicModule, shape: MaskedBlockShape) -> MarkovWeights:
    """The weights of a Markov head and of the confidence head, in the order that the CPU kernels read."""
    first, size = module.tensors[_FIRST], shape.body.hidden_size
    rank = first.shape[1]
    gate, joint = (_linear(module, f"markov_head.{name}") for name in ("gate_proj", "joint_proj"))
    weight, bias = first.new_zeros((0, size + 2 * rank), dtype=torch.float32), first.new_zeros(0, dtype=torch.float32)
    kind = MarkovKind.AS_IT_IS
    if gate is not None:
        kind, weight, bias = MarkovKind.GATED, pad(gate[0], (0, rank)), gate[1]
    elif joint is not None:
        kind, bias = MarkovKind.RECURRENT, joint[1]
        state, embedded, hidden = torch.split(joint[0], [rank, rank, size], dim=1)
        weight = torch.cat([hidden, embedded, state], dim=1)
    sure = weight.new_zeros((1, 0)), bias.new_zeros(1)
    if shape.confidence != "none":
        sure = _linear(module, "confidence_head.proj") or sure
    rows = torch.cat([weight, pad(sure[0], (0, size + 2 * rank - sure[0].shape[1]))])
    second = module.tensors[_SECOND]
    return MarkovWeights(kind, first, second, rows, torch.cat([bias, sure[1]]), is_sure=shape.confidence != "none")


def _linear(module: PublicModule, name: str) -> tuple[Tensor, Tensor] | None:
    weight, bias = module.get(f"{name}.weight"), module.get(f"{name}.bias")
    return None if weight is None or bias is None else (weight.float(), bias.float())
