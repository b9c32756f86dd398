"""Draft passes of the target over its own sequences, for methods that draft with a part of its layers.

A draft pass begins with the last committed token, whose keys and values are not stored yet. It writes to positions
after the stored ones only. They belong to this sequence alone, are never committed, and so never enter the prefix
cache. The next whole pass overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from cluster.core.drafting import HiddenStates
from cluster.core.errors import ConfigurationError, KvPoolExhausted
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftedPath, DraftMethod, DraftsByTarget, ReadsSourceStates, TargetPart
from cluster.core.request import SamplingParameters
from workers.forward.loaded_model import LoadedModel, PassOptions
from workers.forward.partial_pass import PartialPass
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.sampling.allowed_tokens import allowed_at
from workers.sampling.candidates import candidates
from workers.sampling.context import Branch, DecisionContext
from workers.transfer import HostCopies
from workers.verify.decider import Decider
from workers.verify.sequence_state import SequenceState


class EngineSources:
    """The encoder's output for the sources of an engine's sequences. It is a `SourceStates`."""

    def __init__(self, sources: SourceStore) -> None:
        self._sources = sources
        sources.keeps_hidden = True

    def of(self, source: Sequence[int], salt: str) -> HiddenStates | None:
        stored = self._sources.stored(source, salt)
        if stored is None or stored.hidden is None:
            return None
        states = stored.hidden.cpu().contiguous()
        return HiddenStates(0, states.shape[1], states.view(torch.uint8).numpy().data.cast("B"))


class PartialEngine:
    """The stored sequences of an engine, and what computes them. It is a `DraftingTarget`."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        runner: ModelRunner,
        decider: Decider,
        sequences: Mapping[SequenceId, SequenceState],
    ) -> None:
        self.model = model
        self.pool = pool
        self.runner = runner
        self.decider = decider
        self.sequences = sequences

    @property
    def layers(self) -> int:
        return self.model.depth

    def passes(self, part: TargetPart) -> EngineDraftPasses:
        model = self.model
        norm = torch.tensor(part.exit_norm, dtype=torch.float32, device=model.device) if part.exit_norm else None
        partial = PartialPass(part.layers, part.skip_attention, part.skip_mlp, norm)
        partial.check(self.layers, model.hidden_size, model.device)
        self.runner.expect(partial)
        return EngineDraftPasses(self, partial)


def connect(method: DraftMethod, target: PartialEngine, sources: SourceStore) -> bool:
    """Give a drafting method on the target what it uses of it. Returns whether it computes with the target's layers.

    Raises `ConfigurationError` for a method that the target's layers cannot compute.
    """
    if isinstance(method, ReadsSourceStates):
        method.read_sources_from(EngineSources(sources))
    if not isinstance(method, DraftsByTarget):
        return False
    if target.model.states:
        raise ConfigurationError(
            "draft.method: a method that drafts with the target's own layers is refused for a model with recurrent "
            "layers, whose states a draft pass would change; any other method may be chosen"
        )
    method.bind(target)
    return True


class EngineDraftPasses:
    """Passes through one part. It is a `DraftPasses`."""

    def __init__(self, engine: PartialEngine, partial: PartialPass) -> None:
        self._engine = engine
        self._options = PassOptions(partial)

    @property
    def has_probabilities(self) -> bool:
        return self._engine.model.tensor_parallel == 1

    def sampling(self, sequence_id: SequenceId) -> SamplingParameters | None:
        sequence = self._engine.sequences.get(sequence_id)
        return None if sequence is None else sequence.start.sampling

    @contextmanager
    def reserved(self, lengths: Mapping[SequenceId, int]) -> Iterator[frozenset[SequenceId]]:
        pool, longest = self._engine.pool, self._engine.model.max_context_len
        ready: dict[SequenceId, SequenceState] = {}
        try:
            for sequence_id, length in lengths.items():
                sequence = self._engine.sequences.get(sequence_id)
                if sequence is None or len(sequence.tokens) + length > longest:
                    continue
                try:
                    pool.reserve(sequence.table, len(sequence.tokens) + length)
                except KvPoolExhausted:
                    continue
                ready[sequence_id] = sequence
            yield frozenset(ready)
        finally:
            for sequence in ready.values():
                pool.truncate(sequence.table, len(sequence.tokens))

    def next_tokens(self, paths: Sequence[DraftedPath], count: int) -> list[tuple[tuple[int, float], ...]]:
        engine = self._engine
        rows: list[ForwardRow] = []
        contexts: list[DecisionContext] = []
        for path in paths:
            sequence = engine.sequences[path.sequence_id]
            new = path.tokens[path.computed :]
            last, source = (len(new) - 1,), sequence.source
            rows.append(ForwardRow(sequence.table, new, select=last, uncommitted=path.computed, source=source))
            text = Branch(sequence.tokens, path.tokens)
            allowed = allowed_at(path.next_tokens, len(path.tokens) - 1)
            contexts.append(DecisionContext(sequence.start.sampling, text, sequence.start.prompt_len, allowed))
        logits = engine.runner.forward(rows, self._options)
        if self.has_probabilities:
            found = candidates(logits, contexts, count)
            return [tuple((one.token, one.probability) for one in best) for best in found]
        decided = engine.decider.launch(logits, contexts, HostCopies()).tokens()
        return [((token, 1.0),) if token >= 0 else () for token in decided]
