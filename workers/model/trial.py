"""The trial of a model before it serves: step by step it must compute what it computes in one dense pass.

A step may be a single token, a chunk beside another row, a chain or a tree. State that is not keys and values,
positions that a model counts itself, masks that nobody reads: all of them show as other logits, in families that nobody
has seen as well. A model that fails is refused. One that passes is not tried again as long as nothing changes: the
verdict is kept in the directory of the compiled kernels.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cluster.core.config.model_section import ModelSection, PoolSection
from cluster.core.errors import ModelLoadError
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.forward.adapters.registry import dense_attentions
from workers.forward.attention import UnsupportedModel
from workers.forward.code_folder import folder_fault, is_private_file, make_private_folder
from workers.forward.loaded_model import LoadedModel
from workers.forward.probe import attention_named
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.groups import group_layers
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.model.kept_files import code_digest, model_state
from workers.model.latents import expanded
from workers.ranks import least_of_all_ranks

logger = logging.getLogger(__name__)

FOLDER = "trials"
_CODE = ("forward/**/*.py", "forward/native/*.[ch]", "kv/*.py", "model/**/*.py", "ranks.py")
_BLOCK_SIZE, _BLOCKS_PER_TABLE = 4, 40
_STRIDE = 7919  # a prime: it spreads the trial's tokens over the vocabulary
_FIRST_TOKEN = 4
_TEXT, _NEIGHBOR, _SOURCE = 12, 9, 7
"""Tokens of the trial's two texts, and of the source of an encoder."""
_STORED = 6
"""Tokens of the text that are stored before a chain or a tree."""
_PATHS = ((3, 4, 5), (1,))
"""Numbers of the tokens of the tree's branches. They meet where a small vocabulary gives them one token."""

_MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Bounds on |found - expected| / |expected| of a token's logits, both less their mean.

In float32 they hold for every token. In a shorter format a mixture of experts may choose another expert where two are
nearly equal, so they hold for the median of each kind of step. SmolLM2-135M has errors of 5e-6 in float32, and a median
of 0.035 in bfloat16; where state or positions are lost, the error is about 1.
"""


@dataclass(frozen=True, slots=True)
class Expected:
    """Logits of the model's own dense pass, float32 `[tokens, vocabulary]`, by text."""

    source: tuple[int, ...]
    """Tokens that the encoder reads; empty without one."""
    logits: dict[tuple[int, ...], torch.Tensor]

    def after(self, text: Sequence[int]) -> torch.Tensor:
        """The logits after the last token of a text, `[vocabulary]`."""
        for known, logits in self.logits.items():
            if known[: len(text)] == tuple(text):
                return logits[len(text) - 1]
        raise KeyError(text)


@dataclass(frozen=True, slots=True)
class _Texts:
    """The tokens of the trial."""

    text: tuple[int, ...]
    neighbor: tuple[int, ...]
    tree: TokenTree
    """Tree that grows from the first `_STORED` tokens of the text and one more."""

    @property
    def branches(self) -> list[tuple[int, ...]]:
        """The text before the tree with each path to a leaf."""
        return [(*self.text[: _STORED + 1], *path) for path in self.tree.candidates()]


def _texts(vocabulary: int) -> _Texts:
    paths = [tuple(_token(2 * _TEXT + number, vocabulary) for number in path) for path in _PATHS]
    return _Texts(
        tuple(_token(index, vocabulary) for index in range(_TEXT)),
        tuple(_token(_TEXT + index, vocabulary) for index in range(_NEIGHBOR)),
        TokenTree.from_candidates(paths, sum(map(len, paths))),
    )


def _token(number: int, vocabulary: int) -> int:
    """One of the vocabulary's tokens. The first few are avoided: padding among them has a meaning of its own."""
    first = min(_FIRST_TOKEN, vocabulary - 1)
    return first + (number + 1) * _STRIDE % (vocabulary - first)


class Trial:
    """The trial of one model that is being loaded."""

    def __init__(self, verdict: Path | None) -> None:
        """`verdict` is where the verdict is kept, if it is."""
        self._verdict = verdict
        self._expected: Expected | None = None

    @torch.inference_mode()
    def expect(
        self, module: Any, vocabulary: int, device: torch.device, ranks: int, *, source_vocabulary: int = 0
    ) -> None:
        """Compute the logits of the model of `transformers` by its own attention, unless it passed an earlier trial.

        `source_vocabulary` counts the tokens of its encoder, 0 without one. All ranks call this together.
        """
        known = self._verdict is not None and _is_trusted(self._verdict)
        self._expected = None
        if least_of_all_ranks(int(known), ranks):
            return
        source: tuple[int, ...] = ()
        if source_vocabulary:
            source = tuple(_token(index, source_vocabulary) for index in range(_SOURCE))
        texts = _texts(vocabulary)
        rows = [texts.text, texts.neighbor, *texts.branches]
        longest = max(map(len, rows))
        ids = {"input_ids": [(*row, *[row[-1]] * (longest - len(row))) for row in rows]}  # no token sees later ones
        if source:
            ids = {"input_ids": [source] * len(rows), "decoder_input_ids": ids["input_ids"]}
        inputs = {name: torch.tensor(tokens, device=device) for name, tokens in ids.items()}
        each = 1 if source else len(rows)  # the experts of an encoder may be shared by all that it reads in a pass
        firsts = range(0, len(rows), each)
        passes = [{name: one[first : first + each] for name, one in inputs.items()} for first in firsts]
        for attention in dense_attentions(module):
            with attention_named(module, attention), expanded(module):
                logits = torch.cat([module(**one, use_cache=False).logits.float() for one in passes])
            # Eager products overflow in float16 where large ones are scaled only afterwards.
            if module.dtype is not torch.float16 or least_of_all_ranks(int(bool(logits.isfinite().all())), ranks):
                break
        self._expected = Expected(source, {row: one[: len(row)].clone() for row, one in zip(rows, logits, strict=True)})

    def check(self, model: LoadedModel) -> None:
        """Raise `UnsupportedModel` unless the model computes the expected logits in steps of every kind.

        All ranks of a model call this together, and all of them raise.
        """
        if self._expected is None:
            return
        bound = _MAX_RELATIVE_ERROR[model.dtype]
        for kind, errors in _step_errors(model, self._expected).items():
            ordered = torch.tensor(errors).sort().values
            error = float(ordered[-1] if model.dtype is torch.float32 else ordered[len(ordered) // 2])
            if not least_of_all_ranks(int(error <= bound), model.tensor_parallel):  # NaN is no such number
                raise UnsupportedModel(
                    f"{kind}, it computes other logits than in one dense pass (relative error {error:.2g}, at most "
                    f"{bound} are allowed), so its answers would be wrong"
                )
        self._keep(model.name)

    def _keep(self, model: str) -> None:
        """Record that the trial was passed. Without the record, the next start tries the model again."""
        if self._verdict is None:
            return
        try:
            make_private_folder(self._verdict.parent.parent)
            make_private_folder(self._verdict.parent)
            partial = self._verdict.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"model": model, "verdict": "equal to the dense pass"}), "utf-8")
            partial.chmod(0o600)  # whatever the umask is
            partial.replace(self._verdict)
        except OSError as error:
            logger.info("the verdict on %s is not kept: %s", model, error)


def _is_trusted(verdict: Path) -> bool:
    """Whether there is a verdict, and nobody else may have written it."""
    try:
        folders = (verdict.parent, verdict.parent.parent)
        return is_private_file(verdict) and all(folder_fault(folder) is None for folder in folders)
    except OSError:
        return False


@torch.inference_mode()
def _step_errors(model: LoadedModel, expected: Expected) -> dict[str, list[float]]:
    """Relative errors of the logits, by kind of step."""
    texts = _texts(model.vocabulary_size)
    steps = _Steps(replace(model, uses_cuda_graphs=False), expected)
    alone, text, length = steps.table(), texts.text, _STORED
    single = [steps.run([(alone, (token,), EMPTY_TREE)]) for token in text[:length]]
    errors = {"token by token": [error for found in single for error in found]}
    chunked, beside, chained, branched = (steps.table() for _ in range(4))
    steps.run([(beside, texts.neighbor[:5], EMPTY_TREE)])
    first, second = (chunked, text[:length], EMPTY_TREE), (beside, texts.neighbor[5:], EMPTY_TREE)
    errors["in chunks beside another row"] = [
        *steps.run([first, second]),
        *steps.run([(chunked, text[length:], EMPTY_TREE)]),
    ]
    steps.run([(chained, text[:length], EMPTY_TREE), (branched, text[:length], EMPTY_TREE)])
    chain = TokenTree.chain(text[length + 1 :])
    errors["in a chain"] = steps.run([(chained, (text[length],), chain)])
    errors["in a tree"] = steps.run([(branched, (text[length],), texts.tree)])
    return errors


class _Steps:
    """Runs steps of a model over a pool of its own, and compares their logits."""

    def __init__(self, model: LoadedModel, expected: Expected) -> None:
        section = PoolSection(block_size=_BLOCK_SIZE)
        tables = group_layers(model.kv_spec, section).layout.tables
        self._pool = KvPool(model.kv_spec, section, tables * _BLOCKS_PER_TABLE)
        self._runner = ModelRunner(model, self._pool)
        self._expected = expected
        self._offset = model.vocabulary_offset
        self._stored: dict[int, tuple[int, ...]] = {}
        self._tables: list[Any] = []
        self._source = None
        if expected.source:
            store = SourceStore(self._pool)
            self._source = store.acquire(expected.source, "")
            self._runner.encode([self._source], store)

    def table(self) -> int:
        """A new sequence."""
        self._tables.append(self._pool.new_table())
        self._stored[len(self._tables) - 1] = ()
        return len(self._tables) - 1

    def run(self, rows: Sequence[tuple[int, tuple[int, ...], TokenTree]]) -> list[float]:
        """Run (sequence, tokens, tree) as one step and commit the tokens. Returns the relative error of each token."""
        step = [
            ForwardRow(self._tables[sequence], tokens, tree, tuple(range(len(tokens) + len(tree))), source=self._source)
            for sequence, tokens, tree in rows
        ]
        for row in step:
            self._pool.reserve(row.table, row.end)
        found = self._runner.forward(step).float()
        for row in step:
            self._runner.commit(row)
        return [
            _relative_error(logits, self._share(self._expected.after(text), len(logits)))
            for logits, text in zip(found, self._selected(rows), strict=True)
        ]

    def _share(self, logits: torch.Tensor, width: int) -> torch.Tensor:
        """This rank's part of the logits, where the dense pass computed those of all ranks."""
        return logits if len(logits) == width else logits[self._offset : self._offset + width]

    def _selected(self, rows: Sequence[tuple[int, tuple[int, ...], TokenTree]]) -> Iterator[tuple[int, ...]]:
        """The text up to each token of the rows. Remembers the tokens that are now committed."""
        for sequence, tokens, tree in rows:
            before = self._stored[sequence]
            self._stored[sequence] = text = (*before, *tokens)
            yield from (text[: length + 1] for length in range(len(before), len(text)))
            yield from ((*text, *tree.path_tokens(node)) for node in range(len(tree)))


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected| of both less their mean, as Euclidean norms. NaN if either holds NaN."""
    found, expected = (part.double() - part.double().mean() for part in (found, expected))
    least = torch.finfo(torch.float32).tiny
    return float((found - expected).norm() / expected.norm().clamp(min=least))


def verdict_file(section: ModelSection, ranks: int, device: torch.device) -> Path | None:
    """Where the verdict of a trial that was passed is kept. The name covers all that the trial depends on."""
    if section.compile_directory is None:
        return None
    try:
        weights, states = model_state(section)
    except (OSError, ModelLoadError):  # loading the model says what is wrong
        return None
    included = {"dtype", "load_format", "max_context_len", "quantization", "enable_expert_parallel"}
    settings = section.model_dump(mode="json", include=included)
    is_cpu = device.type == "cpu"
    processor = torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(device)
    parts = [weights, states, settings, ranks, device.type, processor, code_digest(_CODE)]
    parts += [torch.__version__, version("transformers")]
    key = blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Path(section.compile_directory) / FOLDER / f"{key}.json"
