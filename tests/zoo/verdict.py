"""The verdict on one architecture: a tiny model of it is served, and compared with its own dense pass."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import PilotfishError
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.zoo.configs import CONTEXT, VOCABULARY, architectures, tiny_config
from tests.zoo.ranks import BOUND, TwoRanks, relative_error
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.block_table import BlockTable
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.model.context import ENDLESS, longest_context
from workers.model.loading import load_model

TOKENS, STORED = 40, 30
"""Tokens of the text, and how many are stored before a chain or a tree."""
_TREE = TokenTree((5, 6, 7, 8, 5, 9, 10), (-1, -1, 0, 0, 1, 3, 5))
_MOST_PARAMETERS = 20_000_000


class Kind(Enum):
    """What became of an architecture."""

    MATCH = "MATCH"
    """Served, and every kind of step has the logits of the dense pass."""
    REFUSED = "REFUSED"
    """Refused when it is loaded, with a reason."""
    NOT_MADE = "NOT MADE"
    """No tiny model of it could be made."""
    DIFFERS = "DIFFERS"
    """Served with other logits."""
    FAILED = "FAILED"
    """An exception that is none of Pilotfish's errors."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one architecture."""

    model_type: str
    kind: Kind
    reason: str = ""
    two_ranks: str = ""
    """`yes` if two ranks have the logits of one, else why not; empty unless it is a MATCH."""

    @property
    def is_wrong(self) -> bool:
        """Whether it is neither served right nor refused."""
        return self.kind in (Kind.DIFFERS, Kind.FAILED) or self.two_ranks.startswith(Kind.DIFFERS.value)


def verdict(model_type: str, two_ranks: TwoRanks | None = None) -> Verdict:
    """Make, serve and compare a tiny model of this type, and serve a MATCH on `two_ranks` as well, if given."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        try:
            is_causal = save(model_type, Path(directory))
        except Exception as error:  # its code may raise anything
            return Verdict(model_type, Kind.NOT_MADE, _one_line(error))
        try:
            section = TargetSection(path=directory, device="cpu", compile="off")
            longest = _unstated_context(model_type)
            model = load_model(section, max_context_len=longest, trial=True)
            differing = _compare(model, Path(directory), is_causal=is_causal)
        except PilotfishError as error:
            return Verdict(model_type, Kind.REFUSED, str(error).replace(directory, "…"))
        except Exception as error:
            return Verdict(model_type, Kind.FAILED, _one_line(error))
        if differing:
            return Verdict(model_type, Kind.DIFFERS, differing)
        ranks = "" if two_ranks is None else two_ranks.serve(Path(directory), longest)
        return Verdict(model_type, Kind.MATCH, "", ranks)


def _unstated_context(model_type: str) -> int | None:
    """The longest sequence to serve where a configuration states no limit."""
    config = tiny_config(model_type).get_text_config()
    return CONTEXT if not config.is_encoder_decoder and longest_context(config) > ENDLESS // 2 else None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def save(model_type: str, directory: Path, **settings: Any) -> bool:
    """Save a tiny model with random weights that its logits depend on. Returns whether it has no encoder.

    `settings` take the place of values of its configuration.
    """
    config = tiny_config(model_type)
    for name, value in settings.items():
        setattr(config, name, value)
    kind: Any = AutoModelForSeq2SeqLM if architectures()[model_type] else AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"its smallest model has {size / 1e6:.0f} million parameters")
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:  # sinusoidal positions are fixed
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 0
    model.save_pretrained(directory)
    return not config.is_encoder_decoder


def _compare(model: LoadedModel, directory: Path, *, is_causal: bool) -> str:
    """The kind of step whose logits differ from those of a dense pass, with the error; empty if none does."""
    kind: Any = AutoModelForCausalLM if is_causal else AutoModelForSeq2SeqLM
    reference = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    steps = Steps(model, reference)
    for name, error in steps.errors():
        if not error <= BOUND:
            return f"{name}: relative error {error:.2g}"
    return ""


class Steps:
    """Steps of every kind, each compared with the dense pass."""

    def __init__(self, model: LoadedModel, reference: PreTrainedModel) -> None:
        self._model, self._reference = model, reference
        blocks = 64 * (4 * TOKENS // 4)
        self._pool = KvPool(model.kv_spec, TargetSection().kv.model_copy(update={"block_size": 4}), blocks)
        self._runner = ModelRunner(model, self._pool)
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._source = None
        if model.source is not None:
            store = SourceStore(self._pool)
            self._source = store.acquire(tuple(range(4, 21)), "")
            self._runner.encode([self._source], store)

    def errors(self) -> Iterator[tuple[str, float]]:
        """The largest relative error of each kind of step."""
        longest = min(TOKENS, self._model.max_context_len - len(_TREE))
        text = [int(token) for token in torch.randint(4, VOCABULARY, (longest,))]
        other = [int(token) for token in torch.randint(4, VOCABULARY, (longest // 2,))]
        stored = min(STORED, longest - 8)
        before, pending = text[:stored], text[stored : stored + 1]
        yield "in one pass", self._run([(self._table(), [], text)])
        alone, chunked, beside, chained, branched = (self._table() for _ in range(5))
        self._run([(table, [], before) for table in (alone, chunked, chained, branched)])
        yield "token by token", max(self._run([(alone, text[:at], [text[at]])]) for at in range(stored, longest))
        yield "in chunks beside another row", self._run([(chunked, before, text[stored:]), (beside, [], other)])
        chain = TokenTree.chain(text[stored + 1 :][:6])
        yield "in a chain", self._run([(chained, before, pending)], chain)
        yield "in a tree", self._run([(branched, before, pending)], _TREE, accepted=(0, 3, 5))
        path = [*before, *pending, *(_TREE.tokens[node] for node in (0, 3, 5))]
        yield "after an accepted path", self._run([(branched, path, [11])])

    def _table(self) -> BlockTable:
        return self._pool.new_table()

    def _run(
        self,
        rows: Sequence[tuple[BlockTable, list[int], list[int]]],
        tree: TokenTree = EMPTY_TREE,
        accepted: tuple[int, ...] = (),
    ) -> float:
        """Run (table, stored text, tokens) as one step. Returns the largest relative error of its logits."""
        step, texts = [], []
        for table, text, tokens in rows:
            row = ForwardRow(table, tuple(tokens), tree, tuple(range(len(tokens) + len(tree))), source=self._source)
            self._pool.reserve(table, row.end)
            step.append(row)
            texts += [[*text, *tokens[: count + 1]] for count in range(len(tokens))]
            texts += [[*text, *tokens, *tree.path_tokens(node)] for node in range(len(tree))]
        found = self._runner.forward(step).clone()
        for row in step:
            self._runner.commit(row, accepted)
        expected = self._dense(texts)
        return max(relative_error(logits, one) for logits, one in zip(found, expected, strict=True))

    @torch.inference_mode()
    def _dense(self, texts: Sequence[list[int]]) -> list[torch.Tensor]:
        """Logits after each text, by the model's own attention and without any cache."""
        for text in sorted(texts, key=len, reverse=True):
            if self._known(text) is None:
                ids = {"input_ids": torch.tensor([text])}
                if self._source is not None:
                    source = torch.tensor([list(self._source.tokens)])
                    ids = {"input_ids": source, "decoder_input_ids": ids["input_ids"]}
                self._logits[tuple(text)] = self._reference(**ids, use_cache=False).logits[0]
        return [logits for text in texts if (logits := self._known(text)) is not None]

    def _known(self, text: list[int]) -> torch.Tensor | None:
        """The logits after a text that begins one whose pass was computed."""
        whole = (logits for known, logits in self._logits.items() if known[: len(text)] == tuple(text))
        return next((logits[len(text) - 1] for logits in whole), None)
