"""How exact each storage is: its perplexity, and its agreement with the de-quantized weights in float32.

Both models read the same tokens: texts of the prompts file, and what the de-quantized packaged weights answer to them.
At each position the best tokens are compared, which are those that greedy decoding would write. A storage that the
packaged file does not have is written anew, and compared with its own de-quantized weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from cluster.generation.text.chat_messages import Message
from deploy.bench.agreement.positions import Agreement, Text, TextAgreement, compare
from tests.bench.decoding import decoding
from tests.bench.options import SPEC_BENCH, Options, file_prompts
from tests.bench.report import heading, table, write
from tests.bench.sections.target.stored_formats import FORMATS, USUAL, written
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner, choose_attention
from workers.kv.groups import group_layers
from workers.kv.pool import KvPool
from workers.model.loading import load_model

_FULL_KV = ("target.kv.dtype=auto", "target.kv.window=null")
_STORED = ("target.quantization=stored", "target.dtype=float32")
REFERENCE = ("target.quantization=none", "target.dtype=float32", *_FULL_KV)
VARIANTS = {
    "stored-float32": _STORED,
    "stored-bfloat16": ("target.quantization=stored", "target.dtype=bfloat16"),
    "bfloat16": ("target.quantization=none", "target.dtype=bfloat16"),
    "int8": ("target.quantization=int8", "target.dtype=bfloat16"),
    "stored-kv-int8": (*_STORED, "target.kv.dtype=int8"),
    "stored-kv-fp8": (*_STORED, "target.kv.dtype=fp8"),
}
PROMPTS, QUICK_PROMPTS, FORMAT_PROMPTS = 16, 2, 4
"""Prompts for the packaged file, in a quick run, and for each format that is written anew."""
TEXT_TOKENS = 256
"""Most tokens of a text that are compared."""
Sources = Mapping[str, Sequence[Text]]
"""Texts by where they come from."""


class ReadingModel:
    """A served model that reads whole texts, in the form that `compare` calls models of `transformers`."""

    device = torch.device("cpu")

    def __init__(self, section: TargetSection) -> None:
        """Raises `ConfigurationError` for a target of several ranks."""
        if section.tensor_parallel > 1:
            raise ConfigurationError(
                f"target.tensor_parallel: {section.tensor_parallel} is refused; for `quality` it must be 1"
            )
        self._backend = section.attention_backend
        self._model: LoadedModel = load_model(section, max_context_len=section.max_context_len)
        alone = {"prefix_cache": False, "host_bytes": 0, "disk_directory": None}
        self._kv = section.kv.model_copy(update=alone)
        self.logits = torch.empty(0)
        """The logits of the last text, `[tokens, vocabulary]`."""

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        """Read one text, `[1, tokens]`, in two steps: the second one reads what the first one stored."""
        tokens = tuple(input_ids[0].tolist())
        spec = self._model.kv_spec
        blocks = group_layers(spec, self._kv).layout.tables * -(-len(tokens) // self._kv.block_size)
        pool = KvPool(spec, self._kv, blocks)
        runner = ModelRunner(self._model, pool, attention=choose_attention(self._model, pool, self._backend))
        place, half = pool.new_table(), len(tokens) // 2
        found = []
        for part in filter(None, (tokens[:half], tokens[half:])):
            row = ForwardRow(place, part, select=tuple(range(len(part))))
            pool.reserve(place, row.end)
            found.append(runner.forward([row]).float().cpu().clone())
            runner.commit(row)
        self.logits = torch.cat(found)
        return SimpleNamespace(logits=self.logits.clone()[None])


@dataclass(frozen=True, slots=True)
class Closeness:
    """How close a model is to the reference on some texts."""

    agreement: Agreement
    largest_difference: float
    """The largest difference of a logit, as a share of the range of the logits of its text."""


def closeness(reference: ReadingModel, model: ReadingModel, texts: Sequence[Text]) -> Closeness:
    """Compare a model with the reference at every position of texts."""
    found: list[TextAgreement] = []
    largest = 0.0
    for text in texts:
        found += compare(reference, model, [text]).texts
        own = reference.logits[text.first - 1 : -1]
        difference = (own - model.logits[text.first - 1 : -1]).abs().max()
        largest = max(largest, float(difference / (own.max() - own.min())))
    return Closeness(Agreement(tuple(found)), largest)


def run(options: Options) -> None:
    """Measure and report."""
    heading("Quality of each storage, beside the de-quantized weights in float32")
    names = options.variants or (*VARIANTS, *(USUAL[:1] if options.quick else USUAL))
    if unknown := [name for name in names if name not in VARIANTS and name not in FORMATS]:
        raise ConfigurationError(
            f"--variants: {', '.join(unknown)} is refused; needed some of {', '.join((*VARIANTS, *FORMATS))}"
        )
    file = options.prompts_file or SPEC_BENCH
    prompts = file_prompts(file, QUICK_PROMPTS if options.quick else PROMPTS)
    plain = _section(options, REFERENCE)
    encoded = [options.tokenizer.encode(prompt)[:TEXT_TOKENS] for prompt in prompts]
    sources = {
        "texts": [Text(tokens, 1) for tokens in encoded if len(tokens) > 1],
        "its greedy answers": _answers(options, plain, prompts),
    }
    write(f"{plain.path}; {len(prompts)} prompts of {file.name}, {options.answer_tokens} tokens of each answer")
    rows: list[list[str]] = []
    if of_settings := [name for name in names if name in VARIANTS]:
        reference = ReadingModel(plain)
        for name in of_settings:
            rows += _rows(name, reference, ReadingModel(_section(options, VARIANTS[name])), sources)
        del reference
    few = {source: texts[:FORMAT_PROMPTS] for source, texts in sources.items()}
    for name in (name for name in names if name in FORMATS):
        rows += _rows_of_format(options, plain, name, few)
    table(
        (
            *("weights", "on", "positions", "perplexity", "of the reference", "÷"),
            *("equal best tokens, %", "Σ min(p, q)", "largest difference ÷ range of the logits"),
        ),
        rows,
    )


def _section(options: Options, settings: Sequence[str]) -> TargetSection:
    """The target with these settings over the chosen ones. Its layers are compiled only if that is asked for."""
    section = options.configuration(*settings).target
    return section.model_copy(update={"compile": "off"}) if section.compile == "auto" else section


def _rows_of_format(options: Options, plain: TargetSection, name: str, sources: Sources) -> list[list[str]]:
    """Lines for the model in a format that is written for this, and read in float32."""
    section = _section(options, _STORED)
    with written(Path(plain.path), name) as (stored, dequantized):
        reference = ReadingModel(plain.model_copy(update={"path": str(dequantized)}))
        return _rows(name, reference, ReadingModel(section.model_copy(update={"path": str(stored)})), sources)


def _rows(name: str, reference: ReadingModel, model: ReadingModel, sources: Sources) -> list[list[str]]:
    found = [_row(name, source, closeness(reference, model, texts)) for source, texts in sources.items()]
    write(f"{name} is compared")
    return found


def _answers(options: Options, section: TargetSection, prompts: Sequence[str]) -> list[Text]:
    """Greedy answers to chat prompts, each behind its prompt."""
    found = []
    with decoding(section, options.configuration().scheduler.max_step_tokens) as running:
        for text in prompts:
            prompt = options.tokenizer.encode_chat([Message("user", text, None)])
            running.add("answer", prompt)
            for _ in range(options.answer_tokens - 1):
                running.step()
            found.append(Text(running.text("answer"), len(prompt)))
            running.clear()
    return found


def _row(name: str, source: str, found: Closeness) -> list[str]:
    each = found.agreement
    return [
        name,
        source,
        str(each.positions),
        f"{each.draft_perplexity:.4f}",
        f"{each.target_perplexity:.4f}",
        f"{each.draft_perplexity / each.target_perplexity:.5f}",
        f"{100 * each.share_within(1):.2f}",
        f"{each.overlap:.5f}",
        f"{found.largest_difference:.1e}",
    ]
