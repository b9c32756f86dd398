"""How exact each storage is: its perplexity, and its agreement with the de-quantized weights in float32.

Both models read the same tokens: texts of the prompts file, and what the de-quantized weights answer to them. At each
position the best tokens are compared, which are those that greedy decoding would write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from cluster.core.config.model_section import ModelSection, PoolSection
from cluster.core.config.target_section import TargetSection
from cluster.generation.text.chat_messages import Message
from deploy.bench.agreement.positions import Agreement, Text, TextAgreement, compare
from tests.bench.decoding import decoding
from tests.bench.options import SPEC_BENCH, Options, file_prompts
from tests.bench.report import heading, table, write
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.groups import group_layers
from workers.kv.pool import KvPool
from workers.model.loading import load_model

REFERENCE = ("target.quantization=none", "target.dtype=float32")
VARIANTS = {
    "stored-float32": ("target.quantization=stored", "target.dtype=float32"),
    "stored-bfloat16": ("target.quantization=stored", "target.dtype=bfloat16"),
    "bfloat16": ("target.quantization=none", "target.dtype=bfloat16"),
    "int8": ("target.quantization=int8", "target.dtype=bfloat16"),
}
PROMPTS, QUICK_PROMPTS = 16, 2
TEXT_TOKENS = 256
"""Most tokens of a text that are compared."""
_BLOCK = 16


class ReadingModel:
    """A served model that reads whole texts, in the form that `compare` calls models of `transformers`."""

    device = torch.device("cpu")

    def __init__(self, section: ModelSection) -> None:
        self._model: LoadedModel = load_model(section)
        self.logits = torch.empty(0)
        """The logits of the last text, `[tokens, vocabulary]`."""

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        """Read one text, `[1, tokens]`. Its keys and values are not kept."""
        tokens = tuple(input_ids[0].tolist())
        section = PoolSection(block_size=_BLOCK)
        tables = group_layers(self._model.kv_spec, section, truncatable=False).layout.tables
        pool = KvPool(self._model.kv_spec, section, tables * -(-len(tokens) // _BLOCK))
        place = pool.new_table()
        pool.reserve(place, len(tokens))
        rows = [ForwardRow(place, tokens, select=tuple(range(len(tokens))))]
        self.logits = ModelRunner(self._model, pool).forward(rows).float().clone()
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
    sections = {name: _section(options, VARIANTS[name]) for name in options.variants or VARIANTS}
    file = options.prompts_file or SPEC_BENCH
    prompts = file_prompts(file, QUICK_PROMPTS if options.quick else PROMPTS)
    plain = _section(options, REFERENCE)
    encoded = [options.tokenizer.encode(prompt)[:TEXT_TOKENS] for prompt in prompts]
    sources = {
        "texts": [Text(tokens, 1) for tokens in encoded if len(tokens) > 1],
        "its greedy answers": _answers(options, plain, prompts),
    }
    write(f"{plain.path}; {len(prompts)} prompts of {file.name}, {options.answer_tokens} tokens of each answer")
    reference = ReadingModel(plain)
    rows: list[list[str]] = []
    for name, section in sections.items():
        model = ReadingModel(section)
        rows += [_row(name, source, closeness(reference, model, texts)) for source, texts in sources.items()]
        write(f"{name} is compared")
    table(
        (
            *("weights", "on", "positions", "perplexity", "of the reference", "÷"),
            *("equal best tokens, %", "Σ min(p, q)", "largest difference ÷ range of the logits"),
        ),
        rows,
    )


def _section(options: Options, settings: Sequence[str]) -> TargetSection:
    return options.configuration(*settings).target.model_copy(update={"compile": "off"})


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
