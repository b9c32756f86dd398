"""An expander that runs a loaded language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.core.ports import SourceStates
from cluster.core.request import SequenceStart
from workers.draft.common.trees.expander import DraftedToken, ExpansionRow, OpenSource
from workers.forward.loaded_model import LoadedModel
from workers.forward.native.largest import Largest, load_largest
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore, StoredSource
from workers.sampling.allowed_tokens import allowed_at
from workers.sampling.candidates import Candidate, candidates
from workers.sampling.context import DecisionContext, leaders_of

_LEAST_MASS = 1e-3
"""Smallest probability that excluded tokens may leave to the others. Less of it is not known well enough."""


class ModelExpander:
    """Expands nodes by forward passes of a loaded model. `pool` must be truncatable."""

    def __init__(self, model: LoadedModel, pool: KvPool, count: int, *, has_target_encoder: bool = False) -> None:
        """`has_target_encoder` says that the model's encoder is the target's."""
        self._model = model
        self._pool = pool
        self._count = count
        """Number of candidates drafted below each node."""
        self._runner = ModelRunner(model, pool)
        self._greedy: GreedyCandidates | None = None
        if model.device.type == "cpu":
            self._greedy = GreedyCandidates(load_largest(model.device, model.code_directory), model.vocabulary)
        self._sources = None if model.source is None else SourceStore(pool)
        self._has_target_encoder = has_target_encoder
        self._states: SourceStates | None = None

    @property
    def memory(self) -> KvPool:
        return self._pool

    @property
    def max_context_len(self) -> int:
        return self._model.max_context_len

    @property
    def vocabulary_size(self) -> int:
        """All tokens are below this value."""
        return self._model.vocabulary_size

    @property
    def vocabulary(self) -> Tensor | None:
        """The tokens that the logits are of, int64 [size], ascending; `None` means all tokens of the vocabulary."""
        return self._model.vocabulary

    def open_source(self, start: SequenceStart) -> OpenSource | None:
        """Make room for the source of a sequence; `None` if it has none. Raises `KvPoolExhausted`.

        The encoder reads it in the next pass that has a row of it.
        """
        if self._sources is None or not start.source:
            return None
        return _HeldSource(self._sources, self._sources.acquire(start.source, start.cache_salt))

    def read_sources_from(self, states: SourceStates) -> None:
        """Use the output of the target's encoder instead of reading sources, if the encoder is the same."""
        self._states = states if self._has_target_encoder else None

    def warm_up(self) -> None:
        """Run passes of the usual shapes, so that the first proposals do not wait for one-time work."""
        self._runner.warm_up()

    def expand(self, rows: Sequence[ExpansionRow]) -> list[tuple[DraftedToken, ...]]:
        """Commit each row's tokens to its table, and draft the tokens that may follow. This is one forward pass."""
        logits, contexts = self.compute(rows)
        if not contexts:
            return [()] * len(rows)
        best = None if self._greedy is None else self._greedy.of(logits.float(), contexts, self._count)
        found = iter(candidates(logits, contexts, self._count, self._model.vocabulary) if best is None else best)
        return [
            tuple((candidate.token, candidate.probability) for candidate in next(found)) if row.is_last else ()
            for row in rows
        ]

    def compute(self, rows: Sequence[ExpansionRow]) -> tuple[Tensor, tuple[DecisionContext, ...]]:
        """Run one forward pass and commit each row's tokens to its table.

        Returns the logits [n, size] after the rows with `is_last`, and their contexts. The logits are valid until the
        next pass.
        """
        sources = [row.source.stored if isinstance(row.source, _HeldSource) else None for row in rows]
        unread = {
            source: row.start
            for source, row in zip(sources, rows, strict=True)
            if source is not None and not source.is_encoded
        }
        if unread and self._sources is not None:
            self._read(unread, self._sources)
        forward_rows = [
            ForwardRow(row.table, row.tokens, select=(len(row.tokens) - 1,) if row.is_last else (), source=source)
            for row, source in zip(rows, sources, strict=True)
        ]
        logits = self._runner.forward(forward_rows)
        for forward_row in forward_rows:
            self._runner.commit(forward_row)
        return logits, tuple(
            DecisionContext(
                row.start.sampling, row.table.tokens, row.start.prompt_len, allowed_at(row.next_tokens, row.depth - 1)
            )
            for row in rows
            if row.is_last
        )

    def _read(self, sources: Mapping[StoredSource, SequenceStart], store: SourceStore) -> None:
        """Store the keys and values of sources, by the target's states where they are known, else by the encoder."""
        unknown: list[StoredSource] = []
        for source, start in sources.items():
            known = None if self._states is None else self._states.of(start.source, start.cache_salt)
            if known is None:
                unknown.append(source)
            else:
                states = torch.frombuffer(known.data, dtype=torch.bfloat16).view(len(known), known.width)
                self._runner.store_encoded(source, states, store)
        if unknown:
            self._runner.encode(unknown, store)


class GreedyCandidates:
    """Finds the candidates of rows in which logits alone decide, apart from excluded tokens.

    One pass over the logits is enough, which the general way copies and sorts.
    """

    def __init__(self, largest: Largest, vocabulary: Tensor | None) -> None:
        """`vocabulary`, int64 [size], ascending, are the tokens of the logits; `None` means all."""
        self._largest = largest
        self._tokens: list[int] | None = None if vocabulary is None else vocabulary.tolist()
        self._columns: dict[int, int] = {token: column for column, token in enumerate(self._tokens or ())}

    def of(self, logits: Tensor, contexts: Sequence[DecisionContext], count: int) -> list[tuple[Candidate, ...]] | None:
        """The best `count` tokens at each row's position, as `candidates` returns them, from float32 [n, size] on CPU.

        `None` where the general way is needed.
        """
        if any(context.allowed is not None or not leaders_of(context.sampling) for context in contexts):
            return None
        excluded = [set(context.excluded_tokens) for context in contexts]
        wanted = min(count + max(map(len, excluded), default=0), logits.shape[1])
        values, columns, totals = self._largest(logits, wanted)
        found: list[tuple[Candidate, ...]] = []
        rows = zip(values.tolist(), columns.tolist(), totals.tolist(), excluded, strict=True)
        for row, (scores, places, (total,), without) in enumerate(rows):
            lost = sum(math.exp(float(logits[row, at]) - total) for at in map(self._column, without) if at is not None)
            if not lost < 1.0 - _LEAST_MASS or not math.isfinite(scores[0]):
                return None
            tokens = places if self._tokens is None else [self._tokens[place] for place in places]
            best = [
                Candidate(token, math.exp(score - total) / (1.0 - lost))
                for token, score in zip(tokens, scores, strict=True)
                if token not in without and score > -math.inf
            ]
            found.append(tuple(best[:count]))
        return found

    def _column(self, token: int) -> int | None:
        """The column of a token's logit; `None` if there is none."""
        return token if self._tokens is None else self._columns.get(token)


@dataclass(frozen=True, slots=True)
class _HeldSource:
    """The source of a sequence in a store. It is an `OpenSource`."""

    store: SourceStore
    stored: StoredSource

    def close(self) -> None:
        """Free it, unless another sequence reads the same source."""
        self.store.release(self.stored)
