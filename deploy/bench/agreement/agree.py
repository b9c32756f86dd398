"""Compares a draft model with a target on a file of texts, and its predicted with its measured speed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers.utils import logging as transformers_logging

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from cluster.generation.text.tokenizer import Tokenizer
from deploy.bench.agreement.positions import Text, compare
from deploy.bench.agreement.report import ANSWERS, AgreementReport, Measured, RoundTimes, markdown
from deploy.bench.contestants.answers import BenchAnswer, BenchPass, BenchPrompt, BenchTasks
from deploy.bench.contestants.peers import load_assistant, load_target
from deploy.bench.evaluation.tasks.jsonl import Row, read_rows
from deploy.bench.measuring import measures
from deploy.bench.measuring.competitors import BenchSettings, Competitor
from deploy.bench.measuring.results import CellResult
from deploy.bench.measuring.runner import bench_clusters
from deploy.bench.measuring.session import BenchSession, Schedule
from deploy.bench.measuring.setup import context_len, empty_results, render_prompt
from deploy.bench.options import AgreementOptions
from deploy.models import served_name
from deploy.progress import ProgressReporter
from deploy.terminal import notices
from workers.distill.prompts import read_prompts
from workers.forward.loaded_model import GenerationDefaults
from workers.model.encoder_decoder.generation_defaults import read_generation_defaults
from workers.model.weight_files import is_encoder_decoder

_TASK = "texts"


def run(options: AgreementOptions, settings_source: BenchSettings) -> AgreementReport:
    """Compare the models. Raises `PilotfishError`."""
    transformers_logging.disable_progress_bar()
    plain, competitor = _configurations(options, settings_source)
    target, tokenizer = Path(plain.target.path), Tokenizer.load(Path(plain.target.path))
    defaults = read_generation_defaults(target) if is_encoder_decoder(target) else None
    weights = competitor.configuration.draft.weights
    if weights is None:
        raise ConfigurationError("--draft: needed a draft model, found none")
    longest = context_len(plain, target) - options.max_tokens
    asked = _asked(_read(options, reads_source=defaults is not None), tokenizer, longest)
    report = AgreementReport(
        f"{served_name(plain)} and {Path(weights.path).name}; {len(asked)} texts of {options.file.name}",
        competitor.configuration.draft.max_nodes,
        competitor.configuration.draft.max_depth,
        options.temperature,
    )
    answered: CellResult | None = None
    if options.measure:
        answered = _answer(options, plain, competitor, tuple(prompt for _, prompt in asked))
        report.measured = _measured(answered)
    model = load_target(plain)
    assistant = load_assistant(Path(weights.path), target, model)
    compared = {"texts": [_text(pair, prompt, tokenizer, options.text_tokens, defaults) for pair, prompt in asked]}
    if answered is not None:
        answers = answered.plain[0].answers
        compared[ANSWERS] = [
            _answered(prompt, answer, defaults) for (_, prompt), answer in zip(asked, answers, strict=True)
        ]
    forbidden = () if defaults is None else tuple(word[0] for word in defaults.bad_words if len(word) == 1)
    for name, texts in compared.items():
        report.sources[name] = compare(model, assistant, texts, options.temperature, forbidden)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "agreement.md").write_text(markdown(report), encoding="utf-8")
        (options.out / "agreement.json").write_text(report.to_json(), encoding="utf-8")
    return report


def _configurations(options: AgreementOptions, settings_source: BenchSettings) -> tuple[Configuration, Competitor]:
    named = (f"target.path={options.target}",) if options.target else ()
    source = BenchSettings(settings_source.config, (*settings_source.assignments, *named))
    own = ["draft.method=model"]
    if options.draft:
        own.append(f"draft.model.path={options.draft}")
    if not any(text.startswith("draft.controller=") for text in source.assignments):
        own.append("draft.controller=off")  # else rounds without drafts would enter τ
    return source.plain().configuration, Competitor("model", source.settings(own).configuration, tuple(own))


def _read(options: AgreementOptions, *, reads_source: bool) -> list[Pair]:
    if reads_source:
        return read_pairs(options.file, options.fields, options.texts)
    return [Pair(text) for text in islice(read_texts(options.file), options.texts)]


def _asked(pairs: Sequence[Pair], tokenizer: Tokenizer, longest: int) -> list[tuple[Pair, BenchPrompt]]:
    """Each pair with its prompt. Pairs with a longer prompt are left out."""
    prompts = [render_prompt(pair.prompt, tokenizer, longest, as_chat=not pair.source) for pair in pairs]
    found = [(pair, prompt) for pair, prompt in zip(pairs, prompts, strict=True) if prompt is not None]
    if not found:
        raise ConfigurationError(f"every text is longer than {longest} tokens, the context less --max-tokens")
    return found


def _text(
    pair: Pair, prompt: BenchPrompt, tokenizer: Tokenizer, most: int, defaults: GenerationDefaults | None
) -> Text:
    """The first `most` tokens of a text of the file; behind its source, the text ends with the end token."""
    if defaults is None:
        return Text(tokenizer.encode(pair.text)[:most], 1)
    tokens = (*tokenizer.encode_answer(pair.text), *tokenizer.eos_token_ids[:1])[:most]
    return Text((*defaults.decoder_start, *tokens), len(defaults.decoder_start), prompt.tokens)


def _answered(prompt: BenchPrompt, answer: BenchAnswer, defaults: GenerationDefaults | None) -> Text:
    if defaults is None:
        return Text((*prompt.tokens, *answer.tokens), len(prompt.tokens))
    return Text((*defaults.decoder_start, *answer.tokens), len(defaults.decoder_start), prompt.tokens)


def _answer(
    options: AgreementOptions, plain: Configuration, competitor: Competitor, prompts: tuple[BenchPrompt, ...]
) -> CellResult:
    """The answers to the prompts, plain and with drafts. Raises `ConfigurationError` if they cannot be measured."""
    tasks: BenchTasks = {_TASK: prompts}
    results = empty_results("agreement")
    with ProgressReporter(notices, "agreement") as report:
        session = BenchSession(Schedule(options.max_tokens), tasks, results, report, lambda _: None, 1)
        asyncio.run(bench_clusters(session, plain, [competitor]))
    found = results.of(competitor.name)
    if not found:
        reasons = [skipped.reason for skipped in results.skipped] + [cell.skipped for cell in results.cells]
        raise ConfigurationError(f"--measure: the draft model does not run; {'; '.join(filter(None, reasons))}")
    return found[0]


def _measured(found: CellResult) -> Measured:
    """What the cluster measured."""
    plain, (drafted,) = found.plain, found.passes
    waited = drafted.counters.get("wait_for_drafts_seconds", 0.0) / max(1.0, drafted.counters.get("target_passes", 0.0))
    times = RoundTimes(_round_seconds(plain), _round_seconds([drafted]), waited)
    ratios = measures.speed_ratios(plain, found.passes)
    tau = measures.committed_per_step(found.passes) or 0.0
    below, own = _token_seconds(plain), _token_seconds([drafted])
    return Measured(times, tau, ratios[0] if ratios else 0.0, below / own if own else 0.0, str(found.exactness))


def _round_seconds(passes: Sequence[BenchPass]) -> float:
    """Mean time between two commits of an answer, which leaves prompts out."""
    spans = [_after_first(answer) for found in passes for answer in found.answers]
    rounds = sum(len(answer.arrivals) - 1 for found in passes for answer in found.answers if answer.arrivals)
    return sum(spans) / rounds if rounds else 0.0


def _token_seconds(passes: Sequence[BenchPass]) -> float:
    """Mean time per token after the first commit of an answer."""
    answers = [answer for found in passes for answer in found.answers if answer.arrivals]
    tokens = sum(answer.completion_tokens - answer.arrivals[0].tokens for answer in answers)
    return sum(map(_after_first, answers)) / tokens if tokens else 0.0


def _after_first(answer: BenchAnswer) -> float:
    return answer.seconds - answer.arrivals[0].seconds if answer.arrivals else 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A text, and for an encoder-decoder model its source."""

    text: str
    source: str = ""

    @property
    def prompt(self) -> str:
        """What a model is asked."""
        return self.source or self.text


def read_pairs(file: Path, fields: str, most: int) -> list[Pair]:
    """The first `most` sources and texts of a JSONL file. `fields` is `SOURCE,TEXT`, two fields of its lines.

    Raises `ConfigurationError`.
    """
    names = [name.strip() for name in fields.split(",")]
    if len(names) != 2 or not all(names):
        raise ConfigurationError(f"--fields: {fields!r} is refused; it must be two names with a comma between: fr,en")
    source, text = names
    return [Pair(row.text(text), row.text(source)) for row in read_rows("FILE", file, most)]


def read_texts(file: Path) -> Iterator[str]:
    """The texts of a JSONL file (the field `text` if the first line has it, else the first message of each prompt).

    Of another file, each line is one. Blank texts are left out.

    Raises `ConfigurationError`.
    """
    if file.suffix != ".jsonl":
        yield from _lines(file)
        return
    rows = read_rows("FILE", file)
    if "text" in rows[0].values:
        yield from (row.text("text") for row in rows if not _is_blank(row))
        return
    yield from (prompt.turns[0] for prompt in read_prompts(file) if prompt.turns)


def _lines(file: Path) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: needed a readable file of texts; {error}") from None
    if not lines:
        raise ConfigurationError(f"{file}: needed at least one line, found none")
    return lines


def _is_blank(row: Row) -> bool:
    text = row.values.get("text")
    return isinstance(text, str) and not text.strip()
