"""An expander that runs a loaded language model, and the check that its vocabulary is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoConfig

from cluster.core.config import TargetSection
from cluster.core.errors import ConfigurationError
from workers.draft.expansion.draft_tree import Guess
from workers.draft.expansion.expander import Place
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.sampling.candidates import candidates
from workers.sampling.context import DecisionContext


class ModelExpander:
    """Expands nodes by forward passes of a loaded model; `pool` must rewind."""

    def __init__(self, model: LoadedModel, pool: KvPool, count: int) -> None:
        self._model = model
        self._pool = pool
        self._count = count
        """Guesses after each node."""
        self._runner = ModelRunner(model, pool)

    @property
    def memory(self) -> KvPool:
        """See `Expander`."""
        return self._pool

    @property
    def max_context_len(self) -> int:
        """See `Expander`."""
        return self._model.max_context_len

    @property
    def vocabulary_size(self) -> int:
        """See `Expander`."""
        return self._model.vocabulary_size

    def warm_up(self) -> None:
        """Pay now for what the first proposals would wait for."""
        self._runner.warm_up()

    def expand(self, places: Sequence[Place]) -> list[tuple[Guess, ...]]:
        """See `Expander`."""
        rows = [
            ForwardRow(place.table, place.tokens, select=(len(place.tokens) - 1,) if place.is_last else ())
            for place in places
        ]
        logits = self._runner.forward(rows)  # [places that are last, vocabulary]
        for row in rows:
            self._runner.commit(row)
        contexts = [
            DecisionContext(place.start.sampling, place.table.tokens, place.start.prompt_len)
            for place in places
            if place.is_last
        ]
        if not contexts:
            return [()] * len(places)
        found = iter(candidates(logits, contexts, self._count, self._model.vocabulary))
        return [
            tuple((guess.token, guess.probability) for guess in next(found)) if place.is_last else ()
            for place in places
        ]


def check_vocabularies(draft: LoadedModel, draft_directory: Path, target: TargetSection) -> None:
    """Raise `ConfigurationError` unless the draft has as many tokens as the target, or at least its tokenizer.

    Models of one family pad their embeddings differently: sizes may differ where the tokenizers are the same, and
    the coordinator drops guesses beyond the target's. A target whose directory is not on this machine cannot be
    looked at, and is not.
    """
    directory = Path(target.path)
    if not (directory / "config.json").is_file():
        return
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config()
    if draft.vocabulary_size != config.vocab_size and not _same_tokenizer(draft_directory, directory):
        raise ConfigurationError(
            f"draft.model.path: {draft.name!r} has a vocabulary of {draft.vocabulary_size} tokens and the target "
            f"{directory.name!r} one of {config.vocab_size}; a draft must share the target's tokenizer"
        )


def _same_tokenizer(one: Path, other: Path) -> bool:
    files = [directory / "tokenizer.json" for directory in (one, other)]
    if not all(file.is_file() for file in files):
        return False
    first, second = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    return bool(first == second)
