"""A round with an EAGLE head on the fake device: the target verifies and shows hidden states, then the head drafts.

The target's step and the drafting method are those that serve. The head's passes are CUDA graphs, which are counted as
they are captured, padding included, and then replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import EvidenceSection, TargetSection
from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Evidence, HiddenStates
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import ROOT, TokenTree
from deploy.simulation.device.fake_device import Kernel, KernelCounter, Operation, fake_device
from deploy.simulation.device.kernels import CountedKernels
from deploy.simulation.device.models import MODELS, RankModel
from deploy.simulation.device.step import Rows, StepCount, count_step
from workers.draft.common.modules import layer_stack
from workers.draft.common.modules.context_store import ContextMemory, ContextStore
from workers.draft.common.modules.pass_of_salt import PassOfSalt
from workers.draft.common.modules.shortlist import Shortlist
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.common.trees.pass_cost import PassCost
from workers.draft.eagle import EagleSettings
from workers.draft.eagle.eagle_drafter import LEAST_SCRATCH, EagleTreeDrafter
from workers.draft.eagle.eagle_growth import GrowthLimits
from workers.draft.eagle.eagle_pass import EaglePass
from workers.draft.eagle.head_pass import HeadPass
from workers.forward import window_attention
from workers.forward.triton.tiles import WindowTiles
from workers.model.draft_shapes import EagleShape, LayerShape
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds

_CANDIDATES: int = EagleSettings.model_fields["candidates"].default
_WIDTH: int = EagleSettings.model_fields["width"].default
_CHOSEN = 32000
"""Tokens that a head chooses from, as public EAGLE-3 heads for Qwen3-8B have."""
_KNOWN = LEAST_SCRATCH
"""Positions before a round whose hidden states the head has seen. Its kernels read the slots of all."""


class CountedWindows:
    """The kernels over the windows of a drafting module, which are counted instead of launched."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter
        self.slots = 0
        """Slots of the windows that all rows of a pass read."""

    def write_windows(self, keys: Tensor, values: Tensor, tiles: WindowTiles, layer: int) -> None:  # noqa: ARG002
        self._counter.add(Kernel("store_windows", 2 * (keys.nbytes + values.nbytes)))

    def write_layers(self, keys: Tensor, values: Tensor, tiles: WindowTiles) -> None:  # noqa: ARG002
        self._counter.add(Kernel("store_windows", 2 * (keys.nbytes + values.nbytes)))

    def window_attention(
        self,
        queries: Tensor,
        tiles: WindowTiles,
        layer: int,  # noqa: ARG002 - part of the interface
        kv_heads: int,
        value_dim: int,
        scale: float,  # noqa: ARG002
    ) -> Tensor:
        if tiles.table.device != queries.device:
            raise RuntimeError(f"tiles are on {tiles.table.device}, queries on {queries.device}")
        slot = kv_heads * (queries.shape[2] + value_dim) * queries.element_size()
        self._counter.add(Kernel("attend_windows", 2 * queries.nbytes + self.slots * slot))
        return queries.new_empty((*queries.shape[:2], value_dim))


@contextmanager
def counted_modules(counter: KernelCounter) -> Iterator[CountedWindows]:
    """Inside, drafting modules that are made compute with kernels that are counted, as on a GPU."""
    windows = CountedWindows(counter)
    replaced: list[tuple[Any, str, Any]] = [
        (window_attention, "kernels_for", lambda *_: windows),
        (window_attention, "address_of", lambda _: 0),
        (window_attention, "bytes_of", lambda mask: np.ones(mask.numel(), dtype=np.uint8)),
        (layer_stack, "operations_on", lambda *_: CountedKernels(counter)),
        (TargetEnds, "embedding_scale", lambda _: 1.0),  # it is read of the weights
        (torch, "frombuffer", _unread),
        (PassCost, "is_worthwhile", lambda _, gain, __: gain > 0),  # it compares times, of which there are none
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield windows


def _unread(data: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of as many numbers as the data has."""
    return torch.empty(len(data) // dtype.itemsize, dtype=dtype)


class CountedCaptures:
    """Stands for the capture of CUDA graphs. A replay counts what was launched at the capture."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter
        self.captured = self.replayed = 0
        self.inside = list[list[Operation]]()
        """What each replay launched."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        counter, self.captured = self._counter, self.captured + 1
        begin, copies, waits = len(counter.operations), counter.copies, counter.waits
        with counter:
            function()
        if (counter.copies, counter.waits) != (copies, waits):
            raise RuntimeError("a captured pass copies from or to the host")
        launched = counter.operations[begin:]
        del counter.operations[begin:]
        return lambda: self._replay(launched)

    def _replay(self, launched: list[Operation]) -> None:
        self.replayed += 1
        self.inside.append(launched)


@dataclass(frozen=True, slots=True)
class DraftCount:
    """What an EAGLE head on the target's GPU does between two steps."""

    passes: tuple[tuple[Kernel, ...], ...]
    """Launched by each graph of the head: over committed tokens, then for each depth of the trees."""
    beside: tuple[Kernel, ...]
    """Launched by the host for the drafts, beside these graphs."""
    copies: int
    """Tensors copied to the device for the drafts."""
    waits: int
    """Times that the host waits for the device, to read what the drafts need."""
    graphs: int
    """Graphs of the head."""


@dataclass(frozen=True, slots=True)
class RoundCount:
    """What one round of a target with an EAGLE head on its GPU does."""

    target: StepCount
    drafts: DraftCount


def eagle_shape(name: str) -> EagleShape:
    """A head of one layer as those of the model."""
    config: Any = MODELS[name]
    layer = LayerShape(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        rope_theta=1e6,
        norm_epsilon=config.rms_norm_eps,
        window=2048,
    )
    return EagleShape(layer, layers=1)


def eagle_taps(name: str) -> tuple[int, ...]:
    """The layers after which EAGLE-3 heads read hidden states: one of the first, the middle, one of the last."""
    config: Any = MODELS[name]
    layers: int = config.num_hidden_layers
    return (2, layers // 2, layers - 3)


def count_eagle_round(model: RankModel, rows: int, stored: int, draft: DraftSection) -> RoundCount:
    """Count a round in which the target verifies a chain of the draft's most nodes in each row, and accepts it."""
    target = count_step(model, (Rows(rows, stored, nodes=draft.max_nodes),), taps=eagle_taps(model.name))
    return RoundCount(target, count_eagle_drafts(model, rows, stored, draft))


def count_eagle_drafts(model: RankModel, rows: int, stored: int, draft: DraftSection) -> DraftCount:
    """Count what a head does after a step in which each row accepted the first path of its tree.

    The head sees the accepted tokens, and grows the next trees. Its first candidates are by far the most probable, so
    the trees are as deep as the draft may be.
    """
    counter = KernelCounter()
    with fake_device() as device, counted_modules(counter) as windows, torch.inference_mode():
        captures = CountedCaptures(counter)
        head, vocabulary = _head(model.name, device, draft)
        head.capture(captures, eagle_shape(model.name).layer.hidden_size, _WIDTH)
        drafter = _drafter(model.name, head, Shortlist(vocabulary, knows_noise=True), draft, rows)
        drafter.propose(_rows(model.name, rows, stored + 1, None))
        drafted = drafter.propose(
            _rows(model.name, rows, stored + 2, [()] * rows, draft)
        )  # windows have grown after it
        accepted = [_first_path(one.tree) for one in drafted]
        captures.inside.clear()
        counter.operations.clear()
        counter.copies = counter.waits = 0
        windows.slots = rows * stored
        with counter:
            drafter.propose(_rows(model.name, rows, stored + 3 + len(accepted[0]), accepted, draft))
    return DraftCount(
        tuple(tuple(operation.kernel for operation in one) for one in captures.inside),
        tuple(counter.eager()),
        counter.copies,
        counter.waits,
        captures.captured,
    )


def _head(name: str, device: torch.device, draft: DraftSection) -> tuple[EaglePass, Tensor | None]:
    """The passes of a head, and the tokens that it chooses from."""
    config, shape = MODELS[name], eagle_shape(name)
    hidden = shape.layer.hidden_size
    with torch.device(device):
        embedding, head = (torch.empty(size, hidden, dtype=torch.bfloat16) for size in (config.vocab_size, _CHOSEN))
        ends = TargetEnds(embedding, head, torch.empty(hidden), shape.layer.norm_epsilon, torch.arange(_CHOSEN))
        module = EagleHead(ends, shape, len(eagle_taps(name)))
        scratch = max(LEAST_SCRATCH, _WIDTH * draft.max_depth)
        return EaglePass(module, ends, "bfloat16", scratch), ends.vocabulary


def _drafter(name: str, head: EaglePass, shortlist: Shortlist, draft: DraftSection, rows: int) -> EagleTreeDrafter:
    taps = eagle_taps(name)
    target = TargetSection(path=name, evidence=EvidenceSection(taps=taps))
    heads: PassOfSalt[HeadPass] = PassOfSalt(head)
    return EagleTreeDrafter(
        heads,
        shortlist,
        TapReader(taps, target, eagle_shape(name).layer.hidden_size),
        draft,
        ContextMemory(ContextStore(0, torch.bfloat16), rows),
        GrowthLimits(_CANDIDATES, _WIDTH),
    )


def _first_path(tree: TokenTree) -> tuple[int, ...]:
    """The tokens of the first node, of its first child, and so on."""
    found: list[int] = []
    node = ROOT
    while node in tree.parents:
        node = tree.parents.index(node)
        found.append(tree.tokens[node])
    return tuple(found)


def _rows(
    name: str,
    rows: int,
    length: int,
    accepted: Sequence[tuple[int, ...]] | None,
    draft: DraftSection | None = None,
) -> Sequence[DraftRow]:
    """Rows of greedy sequences of that many tokens, the last of which are `accepted` and one more.

    Without them, rows with which the sequences begin.
    """
    width = len(eagle_taps(name)) * eagle_shape(name).layer.hidden_size
    known = _KNOWN if accepted is None else len(accepted[0]) + 1
    hidden = HiddenStates(length - 1 - known, width, bytes(2 * width * known))
    tokens = [(0,) * length] * rows if accepted is None else [(*path, 0) for path in accepted]
    budget = NO_DRAFT if draft is None else DraftBudget(draft.max_nodes, draft.max_depth)
    start = SequenceStart(1, SamplingParameters(temperature=0.0)) if accepted is None else None
    evidence = (Evidence(length - 1, hidden=hidden),)
    return [DraftRow(SequenceId(f"s{index}"), length, own, budget, start, evidence) for index, own in enumerate(tokens)]
