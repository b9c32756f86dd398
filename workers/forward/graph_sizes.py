"""The sizes of the CUDA graphs: which are captured before the first request, and which of them a step runs in.

The list is a pure function of what the backend of attention can do, the pool's block size, its number of blocks and the
model's longest sequence. It is equal on all ranks: they take the same backend, and agree on the number of blocks when
the pool is made. A step that fits no graph is launched kernel by kernel.

Attention computes a row alike in a graph of any size, outside of graphs and beside any rows, to the bit. The library
that multiplies plain numbers chooses its code by the number of tokens, in graphs as outside of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.forward.layout import RowShape
    from workers.kv.groups import AttentionWindow

WORD = 64
"""Bits of a word, which says which tokens of its row a token sees. A row of more tokens is wide: part of a prompt."""
MOST_TOKENS = 512
"""Most tokens of a graph. In larger steps the kernels take longer than their launches.

`pilotfish simulate step` on an H100, each kernel launched by itself or in a graph: a prompt of 128 tokens takes 0.7%
more for Llama-3.1-8B, 0.6% for a rank of Llama-3.3-70B on eight, 0.8% for Qwen3-30B-A3B; of 512 tokens 0.1%, 0.1% and
0.5%; of 1,024 0.1%, 0.0% and 0.4%. Tokens that pad a step cost more than that."""
LONGEST = 1 << 15
"""Most tokens of a row in a graph of many rows: their tables of blocks are copied at every step."""
FEW_ROWS, LONGEST_OF_FEW = 8, 1 << 17
"""Most rows of a graph of long rows, and most tokens of such a row. These graphs need no more memory than the others:
rows of four times the length, and a quarter of the most tokens."""
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_WIDTHS = (1, 2, 4, 8, 16)
"""Tokens of all rows, per row."""
_PROMPT_ROWS = (8, 64)
_PROMPT_STEP = 64
"""The graphs of prompts have multiples of so many tokens: padding costs what it computes."""
_NARROW = 4
"""Tokens of narrow rows per row, in a graph of prompts."""
_FEWEST_BLOCKS, _MOST_KEYS, _MOST_GATHERED_TOKENS = 8, 1 << 17, 2048
"""The fewest blocks of a row, and the most keys of all rows and of one, in graphs of rows with as many blocks each."""


MOST_RANKED = 256
"""Most tokens of a drafting module's graph whose logits are in it: those of 256 tokens and 150,000 candidates take
400 MB."""
_LOGIT_BYTES = 2 + 4 + 4
"""Bytes of such a logit: as its product has it, in float32, and among the results."""


@dataclass(frozen=True, slots=True)
class GraphSize:
    """The size of a graph: the most of everything that a step in it may have."""

    rows: int
    queries: int
    """Tokens of a row."""
    tokens: int
    """Total of all rows."""
    blocks: int
    """Blocks of a row."""
    selected: int
    """Tokens with logits."""

    @property
    def has_wide_rows(self) -> bool:
        """Whether a row may be wide. It then has no draft."""
        return self.queries > WORD

    @property
    def narrow(self) -> int:
        """Total of the tokens of rows that are not wide."""
        return min(self.tokens, _NARROW * self.rows) if self.has_wide_rows else self.tokens

    def blocks_of(self, window: AttentionWindow, block_size: int) -> int:
        """The most blocks that a row's tokens see through this window."""
        if window.size is None:
            return self.blocks
        return min(self.blocks, -(-window.sinks // block_size) + (window.size + self.queries) // block_size + 2)

    def order(self) -> tuple[int, ...]:
        """What it costs: a step runs in the first graph that it fits, in ascending order."""
        return self.tokens, self.has_wide_rows, self.rows * self.blocks, self.queries


@dataclass(frozen=True, slots=True)
class DraftingSize:
    """The size of a graph of a drafting module: the most rows, and the most tokens of all rows."""

    rows: int
    tokens: int

    def order(self) -> tuple[int, ...]:
        """What it costs: a pass runs in the first graph that it fits, in ascending order."""
        return self.tokens, self.rows


def drafting_graph_sizes(widths: Iterable[int] = _WIDTHS, most: int = MOST_TOKENS) -> list[DraftingSize]:
    """The sizes for a drafting module's passes of up to `most` tokens, `widths` of which each row has on average."""
    found = {DraftingSize(rows, rows * width) for rows in _ROWS for width in widths if rows * width <= most}
    return sorted(found, key=DraftingSize.order)


def smallest_drafting_graph(sizes: Iterable[DraftingSize], rows: int, tokens: int) -> DraftingSize | None:
    """The first of `sizes`, in ascending order, that so many rows and tokens fit; `None` if they fit none."""
    return next((size for size in sizes if rows <= size.rows and tokens <= size.tokens), None)


def ranked_tokens(widths: Iterable[int]) -> int:
    """The tokens of the largest graph of a drafting module whose logits are in it, by its widths."""
    return max((size.tokens for size in drafting_graph_sizes(widths, MOST_RANKED)), default=0)


def drafting_graph_bytes(logits: int) -> int:
    """Bytes of a GPU that a drafting module's graphs take at least, by the logits in the largest one."""
    return logits * _LOGIT_BYTES


def widths_up_to(most: int) -> list[int]:
    """The numbers of tokens per row for passes with at most so many, the last one of which is at least `most`."""
    return [1 << exponent for exponent in range((most - 1).bit_length() + 1)]


def packed_graph_sizes(blocks: int, most_blocks: int = 0) -> list[GraphSize]:
    """The sizes for a backend that packs rows of any widths, each of up to `blocks` blocks: tokens, drafts, prompts.

    Few rows may have up to `most_blocks`, if that is more, unless one is part of a prompt.
    """
    prompts = [
        GraphSize(rows, tokens, tokens, blocks, _NARROW * rows)
        for tokens in range(2 * WORD, MOST_TOKENS + 1, _PROMPT_STEP)
        for rows in _PROMPT_ROWS
    ]
    decoding = [
        GraphSize(rows, WORD, rows * width, most, rows * width)
        for most in _lengths(blocks, most_blocks)
        for rows, width in _decoding(most > blocks)
    ]
    return _ordered(decoding + prompts)


def padded_graph_sizes(blocks: int, most_blocks: int = 0) -> list[GraphSize]:
    """The sizes for a backend that pads all rows to one width, and skips blocks that a row does not use: no prompts.

    `blocks` and `most_blocks` are as for `packed_graph_sizes`.
    """
    return _ordered(
        GraphSize(rows, width, rows * width, most, rows * width)
        for most in _lengths(blocks, most_blocks)
        for rows, width in _decoding(most > blocks)
    )


def gathered_graph_sizes(block_size: int, longest: int) -> list[GraphSize]:
    """The sizes for a backend that reads as many blocks of every row as the longest has: one token per row."""
    most = max(_FEWEST_BLOCKS, -(-min(longest, _MOST_GATHERED_TOKENS) // block_size))
    counts = [1 << exponent for exponent in range((most - 1).bit_length() + 1) if 1 << exponent >= _FEWEST_BLOCKS]
    return _ordered(
        GraphSize(rows, 1, rows, blocks, rows)
        for rows in _ROWS
        for blocks in counts
        if rows * blocks * block_size <= _MOST_KEYS
    )


def smallest_graph(
    sizes: Iterable[GraphSize], rows: Sequence[RowShape], selected: int, block_size: int
) -> GraphSize | None:
    """The first of `sizes`, in ascending order, that these rows fit with `selected` logits; `None` if they fit none."""
    widths = [row.width for row in rows]
    queries, tokens = max(widths), sum(widths)
    blocks = -(-max([row.stored_len + width for row, width in zip(rows, widths, strict=True)]) // block_size)
    narrow = tokens
    if queries > WORD:
        narrow = sum(width for width in widths if width <= WORD)
        if any(row.tree and width > WORD for row, width in zip(rows, widths, strict=True)):
            return None
    for size in sizes:
        if (
            len(rows) <= size.rows
            and tokens <= size.tokens
            and queries <= size.queries
            and narrow <= size.narrow
            and blocks <= size.blocks
            and selected <= size.selected
        ):
            return size
    return None


def describe_graphs() -> str:
    """The sizes that do not depend on the model, all of them, in words."""
    sizes = packed_graph_sizes(_FEWEST_BLOCKS)
    decoding, prompts = ([size for size in sizes if size.has_wide_rows is wide] for wide in (False, True))
    return (
        f"CUDA graphs of the target, captured before the first request: {len(decoding)} by rows and tokens in all "
        f"({_by_rows(decoding)}); {len(prompts)} with prompts, of {_listed(size.tokens for size in prompts)} tokens "
        f"with up to {_PROMPT_ROWS[0]} and {_PROMPT_ROWS[-1]} rows; each for rows of up to {LONGEST} tokens of "
        f"context, and those of up to {FEW_ROWS} rows without prompts also for {LONGEST_OF_FEW}; larger steps, and "
        "models without attention or with recurrent layers of which we have no kernels, are launched kernel by kernel"
    )


def describe_head_graphs(nodes: int) -> str:
    """The sizes for a head whose passes expand up to so many nodes of each tree, in words."""
    committed, expanded = drafting_graph_sizes(), drafting_graph_sizes(widths_up_to(nodes), MOST_RANKED)
    return (
        f"{len(committed)} by rows and tokens in all over committed tokens ({_by_rows(committed)}), and for a head "
        f"that drafts token by token {len(expanded)} over the nodes that are expanded ({_by_rows(expanded)})"
    )


def describe_block_graphs() -> str:
    """The sizes for blocks, all of which have the slots of the module's card, in words."""
    return f"the blocks of {_listed(_ROWS)} rows, of up to {MOST_TOKENS} tokens in all"


def describe_parallel_graphs() -> str:
    """The sizes for heads that predict all depths of the module's card from one state, in words."""
    return f"the candidates at all depths of {_listed(_ROWS)} rows, of up to {MOST_RANKED} tokens in all"


def _by_rows(sizes: Sequence[GraphSize] | Sequence[DraftingSize]) -> str:
    """The total of the tokens of each number of rows."""
    return "; ".join(
        f"{rows} row{'s' * (rows > 1)}: {_listed(size.tokens for size in sizes if size.rows == rows)}"
        for rows in sorted({size.rows for size in sizes})
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))


def _lengths(blocks: int, most_blocks: int) -> tuple[int, ...]:
    return (blocks, most_blocks) if most_blocks > blocks else (blocks,)


def _decoding(are_few: bool = False) -> list[tuple[int, int]]:
    """Rows, and tokens per row."""
    rows = [count for count in _ROWS if count <= FEW_ROWS or not are_few]
    return [(count, width) for count in rows for width in _WIDTHS if count * width <= MOST_TOKENS]


def _ordered(sizes: Iterable[GraphSize]) -> list[GraphSize]:
    return sorted(sizes, key=GraphSize.order)
