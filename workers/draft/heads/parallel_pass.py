"""Heads that predict all depths from one hidden state. Recurring numbers of rows run as CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workers.draft.common.modules.path_ranker import PathRanker
from workers.draft.common.modules.ranked_paths import RankedPaths
from workers.forward.captured_passes import CapturedPasses, GraphCapture
from workers.forward.graph_sizes import MOST_RANKED, DraftingSize, drafting_graph_sizes, smallest_drafting_graph
from workers.sampling.context import DecisionContext
from workers.transfer import StepArray, joined, split_together, to_device, words_together


class HeadsBuffers:
    """The inputs of the passes of one size, at fixed addresses: states of the target, and last tokens."""

    def __init__(self, size: DraftingSize, hidden_size: int, device: torch.device) -> None:
        self._size, self._width, self._device = size, hidden_size, device
        arrays = self._arrays((), ())
        self._numbers = torch.zeros(words_together(arrays), dtype=torch.int64, device=device)
        self.last, states = split_together(self._numbers, arrays)
        """int64 `[rows]`."""
        self.states = states.view(torch.bfloat16)
        """`[rows, hidden size]`."""

    def fill(self, states: Sequence[Tensor], last: Sequence[int]) -> None:
        """Copy what the host has of rows that fit into the buffers, in one piece. The host does not wait."""
        # torch does not reuse pinned memory before the copy has finished.
        self._numbers.copy_(joined(self._arrays(states, last), self._device), non_blocking=True)

    def _arrays(self, states: Sequence[Tensor], last: Sequence[int]) -> list[StepArray]:
        tokens = np.zeros(self._size.rows, dtype=np.int64)
        found = np.zeros((self._size.rows, self._width // 2), dtype=np.int32)
        if states:
            tokens[: len(last)] = last
            found[: len(last)] = torch.stack(tuple(states)).view(torch.int32).numpy()
        return [tokens, found]


class ParallelPass(ABC):
    """The weights of heads on their device, and the ranking of their candidates."""

    depths: int
    hidden_size: int
    """Width of a state."""
    vocabulary_size: int
    device: torch.device
    ranker: PathRanker
    graphs: CapturedPasses[DraftingSize, None, HeadsBuffers] | None = None
    """The captured passes. They compute with the weights that these heads were loaded with."""

    @abstractmethod
    def computed(self, states: Tensor, last: Tensor, depths: int) -> tuple[Tensor, Tensor]:
        """Vectors for the output heads [rows, depths, hidden size], and logits [rows × depths, draft vocabulary].

        `states` [rows, hidden size] are the target's residual streams before its last tokens, int64 `last` [rows].
        """

    def capture(self, capture: GraphCapture | None) -> None:
        """Capture the passes. Without `capture`, and for states of an odd width, none are."""
        if capture is None or self.hidden_size % 2:
            return

        def make(size: DraftingSize) -> HeadsBuffers:
            return HeadsBuffers(size, self.hidden_size, self.device)

        def compute(inputs: HeadsBuffers, _: None) -> Sequence[Tensor]:
            hidden, logits = self.computed(inputs.states, inputs.last, self.depths)
            return [hidden, logits.view(*hidden.shape[:2], -1)]

        self.graphs = CapturedPasses(make, compute, capture)
        sizes = drafting_graph_sizes((self.depths,), MOST_RANKED)
        self.graphs.capture_all([(size, None) for size in sizes])

    @torch.inference_mode()
    def rank(
        self, taps: Sequence[Tensor], last: Sequence[int], contexts: Sequence[DecisionContext], siblings: int
    ) -> list[RankedPaths]:
        """Rank the candidates after each row's last token.

        `taps` are the rows' residual streams after the last layer, [hidden size] each, at the position before the last
        token; `contexts` [rows x depths] are those of the decisions at each depth, at most `self.depths`.
        """
        depths = len(contexts) // len(taps)
        found = self._replayed(taps, last, depths)
        if found is None:
            found = self.computed(torch.stack(tuple(taps)), to_device(last, self.device), depths)
        return self.ranker.rank_logits(found[1], found[0], contexts, siblings)

    def _replayed(self, taps: Sequence[Tensor], last: Sequence[int], depths: int) -> tuple[Tensor, Tensor] | None:
        """What a captured pass computes; `None` if the rows fit none."""
        graphs, rows = self.graphs, len(taps)
        if graphs is None or any(one.dtype is not torch.bfloat16 or one.device.type != "cpu" for one in taps):
            return None
        size = smallest_drafting_graph(graphs.sizes(None), rows, rows * self.depths)
        if size is None:
            return None
        captured = graphs.captured[size, None]
        captured.inputs.fill(taps, last)
        captured.replay()
        hidden, logits = (one[:rows, :depths] for one in captured.outputs)
        return hidden, logits.flatten(0, 1)
