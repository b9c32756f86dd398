"""How much memory of a GPU the CUDA graphs and the activations of a target take, from the sizes of the model alone."""

from __future__ import annotations

from dataclasses import dataclass

from workers.forward.graph_sizes import LONGEST, MOST_TOKENS
from workers.forward.triton.tiles import most_splits, padded_width
from workers.kv.groups import AttentionWindow


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one rank's part of a model that decide how much memory a step takes."""

    hidden_size: int
    vocabulary_size: int
    """Tokens whose logits the rank computes."""
    attended: tuple[tuple[int, int], ...]
    """Heads of this rank that attend, and numbers of a value, of layers of each kind."""
    longest: int
    """Longest sequence, in tokens."""
    number_bytes: int

    @property
    def layer_bytes(self) -> int:
        """Bytes that what layers compute of a token needs at most: 32 numbers for each of a hidden state are taken to
        live at once."""
        return 32 * self.hidden_size * self.number_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes that the target's CUDA graphs need at most: those of the largest, since all graphs share them.

        These are the sums of attention's splits, in its kernel's padded rows and as many as under a window; four times
        the logits, in the graph with what a soft cap makes of them, and as the results of this graph and of smaller
        ones; and `layer_bytes` of each token.
        """
        splits = most_splits(min(LONGEST, self.longest), 1, AttentionWindow(LONGEST))
        sums = max(heads * (padded_width(width) + 2) for heads, width in self.attended) * splits * 4
        logits = 4 * self.vocabulary_size * self.number_bytes
        return MOST_TOKENS * (sums + logits + self.layer_bytes)
