"""Makes a drafting module from the target's answers: heads, a block drafter, an EAGLE head, an exit norm, a table."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.budget import Budget
from workers.distill.card import computed_in
from workers.distill.chart import loss_curve
from workers.distill.data import DistillData, begin_budget, collect_answers, draft_vocabulary
from workers.distill.job import DistillJob
from workers.distill.modules.exit_search import ExitCandidate, search_exit
from workers.distill.modules.learner import TappedModule
from workers.distill.modules.module_card import ModuleFacts, write_card
from workers.distill.modules.module_plan import CURVE, start_module, wanted_shape, with_defaults
from workers.distill.modules.module_trainer import (
    ModuleRun,
    ModuleTrainer,
    Trained,
    answers_of,
    fill_states,
    served_tokens,
    states_that_fit,
    stored_length,
)
from workers.distill.modules.tap_cache import TapCache, taps_of
from workers.distill.options import DistillOptions
from workers.distill.output import replaced_directory
from workers.distill.prompts import read_prompts
from workers.distill.seq2seq_data import (
    decoder_rows,
    decoder_start,
    is_encoder_decoder,
    read_source_files,
    translate_all,
)
from workers.distill.target_model import device_name, load_seq2seq_target, load_target
from workers.model.devices import choose_device
from workers.model.draft_card import DraftCard
from workers.model.draft_shapes import ExitShape, TableShape
from workers.model.drafting.files import DraftingModule, load_ends, make_module
from workers.model.drafting.public_form import obstacle
from workers.model.drafting.table import SuccessorTable
from workers.model.target_ends import decoder_vocabulary_size, read_config


@dataclass(frozen=True, slots=True)
class _Made:
    """A finished module, and what the model card says of it."""

    module: DraftingModule
    vocabulary: torch.Tensor | None
    trained: Trained
    start: str = ""


def distill_module(job: DistillJob) -> None:
    """Make a module: collect answers and hidden states, train, measure, write. Raises `PilotfishError`."""
    config: Any = read_config(job.target).get_text_config()
    options = with_defaults(job.options, config, job.target)
    shape = wanted_shape(options, config, job.target)
    data, budget = _data(job, options, has_encoder=config.is_encoder_decoder)
    sizes = decoder_vocabulary_size(config), int(config.hidden_size)
    card = DraftCard(job.name, *sizes, options.layers, options.vocabulary_size, options.kind, options.taps, shape)
    stage = ModuleRun(job, options, data, budget, choose_device(options.device, 0))
    made = _make(stage, card)
    notes = "" if options.notes is None else options.notes.read_text(encoding="utf-8")
    trained = made.trained
    progress = trained.progress
    curve = loss_curve(progress, is_tokens=True) if progress.losses or progress.served else None
    facts = ModuleFacts(
        card=trained.card,
        target_form=computed_in(job.configuration.target),
        command_line=job.command_line,
        answers=data.train,
        start=made.start,
        obstacle=obstacle(trained.card, job.target, int8=options.int8),
        parameters=sum(value.numel() for value in made.module.parameters()),
        progress=progress,
        device=device_name(stage.device),
        measured=trained.accepted,
        served=trained.served,
        serving=_serving(job),
        curve=CURVE if curve else "",
        notes="\n".join(filter(None, (trained.notes, notes))),
    )
    with replaced_directory(options.out, write_card(facts), {} if curve is None else {CURVE: curve}) as scratch:
        stage.write(scratch, trained.card, made.module, made.vocabulary)
    tokens = [f", {each.tokens_per_step:.2f} tokens per step on {of}" for of, each in trained.served.items()]
    job.notices.print(f"{options.out}: {options.kind} for {job.name}{''.join(tokens)}")


def _data(job: DistillJob, options: DistillOptions, *, has_encoder: bool) -> tuple[DistillData, Budget]:
    """The target's answers, and the budget of the command, which begins once the prompt files are read."""
    needs_states = options.kind != "table" and not options.search
    if not has_encoder:
        files = [read_prompts(path) for path in options.prompts]
        budget = begin_budget(job, is_frozen=False, needs_states=needs_states)
        return collect_answers(job, files, budget, is_frozen=False), budget
    sources = read_source_files(job)
    budget = begin_budget(job, is_frozen=False, needs_states=needs_states)
    target = load_seq2seq_target(job.target, choose_device(options.device, 0))
    data = translate_all(target, job, sources, budget, is_frozen=False)
    return decoder_rows(data, decoder_start(target)), budget


def _load_target(stage: ModuleRun, dtype: torch.dtype) -> Any:
    """The target as a module of `transformers`, in the type of the matrix products."""
    if not is_encoder_decoder(stage.job.target):
        return load_target(stage.job.target, stage.device, dtype)
    found: Any = load_seq2seq_target(stage.job.target, stage.device)
    return found.to(dtype)


def _states(stage: ModuleRun, card: DraftCard, dtype: torch.dtype) -> TapCache:
    """The hidden states of all answers that the budget has time for.

    The serving engine computes them, with the settings of the command; for a target with an encoder, `transformers`.
    """
    if is_encoder_decoder(stage.job.target):
        cache = states_that_fit(stage, card)
        fill_states(stage, partial(taps_of, _load_target(stage, dtype)), cache)
        return cache
    longest = max((len(one.prompt) + len(one.answer) for one in answers_of(stage)), default=1)
    with stage.job.ranks(min(longest, stored_length(stage.options))) as ranks:
        cache = states_that_fit(stage, card, ranks.settings)
        if not all(map(cache.has, answers_of(stage))):
            fill_states(stage, ranks.reading(card.taps), cache)
    return cache


def _serving(job: DistillJob) -> str:
    """The settings of a measurement in the engine, for the model card."""
    draft, target = job.configuration.draft, job.configuration.target
    return (
        f"greedy answers of the target in {target.dtype}, at most {draft.max_nodes} drafted tokens in a tree and "
        f"{draft.max_depth} on a path, always the largest tree"
    )


def _make(stage: ModuleRun, card: DraftCard) -> _Made:
    """Make and train the module that the card describes, or the one that a search finds."""
    options, data = stage.options, stage.data
    if card.shape is None:
        raise ConfigurationError(f"--kind: {options.kind!r} is refused; it has no shape")
    torch.manual_seed(options.seed)
    dtype = torch.bfloat16 if options.precision == "bfloat16" else torch.float32
    if isinstance(card.shape, TableShape):
        table = SuccessorTable(card.shape, card.target_vocabulary_size)
        stage.job.notices.print(f"{count_successors(table, data.train):,} tokens have successors")
        return _Made(table, None, Trained(card))
    vocabulary = torch.tensor(draft_vocabulary(stage.job, options, data, card.target_vocabulary_size))
    cache = _states(stage, card, dtype) if card.taps else None
    notes = ""
    if options.search:
        found = _search(stage, _load_target(stage, dtype))
        card, notes = replace(card, shape=ExitShape(found[0].layers), layers=found[0].layers), _table(found)
    ends = load_ends(stage.job.target, card, vocabulary, dtype, stage.device)
    module = make_module(ends, card.shape or ExitShape((0,)), card.taps).to(stage.device)
    if cache is None:
        trained = served_tokens(stage, card, module, vocabulary)
        return _Made(module, vocabulary, replace(trained, notes=notes))
    tapped = TappedModule(module, ends, cache)
    start = start_module(tapped, options, stage.job.target, data.train)
    trained = ModuleTrainer(stage, card, tapped, vocabulary).train()
    return _Made(module, vocabulary, trained, start)


def _search(stage: ModuleRun, model: Any) -> list[ExitCandidate]:
    """Candidates for early exit, best first."""
    options = stage.options
    with stage.job.notices.stage("search") as report:
        limit = None if options.minutes is None else time.monotonic() + stage.budget.left_for_training()
        return search_exit(model, stage.data.held_out, options.max_length, report, limit)


def _table(found: Sequence[ExitCandidate]) -> str:
    rows = [
        f"| {len(each.layers)} | {each.agreement:.1%} | {each.speedup:.2f} | {_ranges(each.layers)} |"
        for each in found[:12]
    ]
    heading = "## Layers that draft\n\nMeasured on held-out answers; the speed-up is estimated from the agreement.\n\n"
    return heading + "| layers | agreement | estimated speed-up | which |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _ranges(layers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def count_successors(table: SuccessorTable, answers: Iterable[Answer]) -> int:
    """Fill a table with the tokens that were most often among the target's most probable ones after each token.

    A token counts with the probability that the target gave it; the written token counts once where the target's
    probabilities are not stored. Returns the number of tokens that have successors. Raises `ConfigurationError` for a
    token outside the table.
    """
    counts: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for answer in answers:
        before = (answer.prompt[-1], *answer.answer[:-1])
        for place, token in enumerate(before):
            if answer.leading is None:
                counts[token][answer.answer[place]] += 1
                continue
            weights = torch.from_numpy(answer.leading.log_probabilities[place].astype("float32")).exp().tolist()
            for follower, weight in zip(answer.leading.tokens[place].tolist(), weights, strict=True):
                counts[token][follower] += weight
    size, width = table.successors.shape
    for token, followers in counts.items():
        best = sorted(followers, key=lambda each: -followers[each])[:width]
        if not all(0 <= each < size for each in (token, *best)):
            raise ConfigurationError(f"table: token {max(token, *best)} is refused; it must be below {size}")
        table.successors[token, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return len(counts)
