"""Makes a drafting module from the target's answers: heads, a block drafter, an EAGLE head, an exit norm, a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from deploy.distillation.budget import Budget
from deploy.distillation.data import DistillData, begin_budget, collect_answers, draft_vocabulary
from deploy.distillation.module_plan import CURVE, start_module, wanted_shape, with_defaults
from deploy.distillation.module_training import ModuleRun, ModuleTrainer, Trained, served_tokens, stored_states
from deploy.distillation.options import DistillOptions
from deploy.distillation.seq2seq import decoder_rows, is_encoder_decoder, read_source_files, translate_all
from deploy.models import Models, resolve_models, served_name
from deploy.progress import ProgressReporter
from deploy.settings import Settings
from deploy.terminal import notices
from workers.distill.chart import loss_curve
from workers.distill.export import check_replaceable, replaced_directory
from workers.distill.modules.exit_search import ExitCandidate, search_exit
from workers.distill.modules.module_card import ModuleFacts, write_card
from workers.distill.modules.successors import count_successors
from workers.distill.prompts import read_prompts
from workers.distill.seq2seq.answers import decoder_start
from workers.distill.seq2seq.student import load_seq2seq_target
from workers.distill.student import load_target
from workers.model.devices import choose_device
from workers.model.draft_card import DraftCard
from workers.model.draft_shapes import ExitShape, TableShape
from workers.model.drafting.files import DraftingModule, load_ends, make_module, save_drafter
from workers.model.drafting.table import SuccessorTable
from workers.model.target_ends import decoder_vocabulary_size


@dataclass(frozen=True, slots=True)
class _Made:
    """A finished module, and what the model card says of it."""

    module: DraftingModule
    vocabulary: torch.Tensor | None
    trained: Trained
    start: str = ""


def run_module(settings: Settings, options: DistillOptions, command_line: str) -> None:
    """Make a module: collect answers and hidden states, train, measure, write. Raises `PilotfishError`."""
    check_replaceable(options.out)
    with notices.status("looking for the target") as status:
        models = resolve_models(settings.configuration, settings.cache_directory, status.update)
    config = AutoConfig.from_pretrained(models.target, trust_remote_code=False).get_text_config()
    options = with_defaults(options, config)
    shape = wanted_shape(options, config)
    data, budget = _data(models, options, has_encoder=config.is_encoder_decoder)
    name = served_name(models.configuration)
    sizes = decoder_vocabulary_size(config), int(config.hidden_size)
    card = DraftCard(name, *sizes, options.layers, options.vocabulary_size, options.kind, options.taps, shape)
    stage = ModuleRun(models.configuration, options, models.target, data, budget, choose_device(options.device, 0))
    made = _make(stage, card)
    notes = "" if options.notes is None else options.notes.read_text(encoding="utf-8")
    trained = made.trained
    progress = trained.progress
    curve = loss_curve(progress, is_tokens=True) if progress.losses or progress.served else None
    facts = ModuleFacts(
        card=trained.card,
        target_dtype=models.configuration.target.dtype,
        command_line=command_line,
        answers=data.train,
        start=made.start,
        parameters=sum(value.numel() for value in made.module.parameters()),
        progress=progress,
        device=_device_name(stage.device),
        measured=trained.accepted,
        served=trained.served,
        serving=_serving(models.configuration),
        curve=CURVE if curve else "",
        notes="\n".join(filter(None, (trained.notes, notes))),
    )
    with replaced_directory(options.out, write_card(facts), {} if curve is None else {CURVE: curve}) as scratch:
        save_drafter(scratch, trained.card, made.module, made.vocabulary, int8=options.int8)
    tokens = [f", {each.tokens_per_step:.2f} tokens per step on {of}" for of, each in trained.served.items()]
    notices.print(f"{options.out}: {options.kind} for {name}{''.join(tokens)}")


def _data(models: Models, options: DistillOptions, *, has_encoder: bool) -> tuple[DistillData, Budget]:
    """The target's answers, and the budget of the command, which begins once the prompt files are read."""
    needs_states = options.kind != "table" and not options.search
    if not has_encoder:
        files = [read_prompts(path) for path in options.prompts]
        budget = begin_budget(options, is_frozen=False, needs_states=needs_states)
        return collect_answers(models.configuration, options, files, budget, is_frozen=False), budget
    sources = read_source_files(options)
    budget = begin_budget(options, is_frozen=False, needs_states=needs_states)
    target = load_seq2seq_target(models.target, choose_device(options.device, 0))
    data = translate_all(target, models.target, options, sources, budget, is_frozen=False)
    return decoder_rows(data, decoder_start(target)), budget


def _load_target(stage: ModuleRun) -> Any:
    """The target as a module of `transformers`."""
    load = load_seq2seq_target if is_encoder_decoder(stage.target) else load_target
    return load(stage.target, stage.device)


def _device_name(device: torch.device) -> str:
    """The name of the device of a training, for the model card."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def _serving(configuration: Configuration) -> str:
    """The settings of a measurement in the engine, for the model card."""
    draft, target = configuration.draft, configuration.target
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
        notices.print(f"{count_successors(table, data.train):,} tokens have successors")
        return _Made(table, None, Trained(card))
    vocabulary = torch.tensor(draft_vocabulary(options, data, stage.target, card.target_vocabulary_size))
    model = _load_target(stage)
    model.to(dtype)
    notes = ""
    if options.search:
        found = _search(stage, model)
        card, notes = replace(card, shape=ExitShape(found[0].layers), layers=found[0].layers), _table(found)
    ends = load_ends(stage.target, card, vocabulary, dtype, stage.device)
    module = make_module(ends, card.shape or ExitShape((0,)), card.taps).to(stage.device)
    if not card.taps:
        trained = served_tokens(stage, card, module, vocabulary)
        return _Made(module, vocabulary, replace(trained, notes=notes))
    cache = stored_states(stage, model, card)
    del model
    start = start_module(module, ends, cache, options, stage.target, data.train)
    trained = ModuleTrainer(stage, card, module, ends, vocabulary, cache).train()
    return _Made(module, vocabulary, trained, start)


def _search(stage: ModuleRun, model: Any) -> list[ExitCandidate]:
    """Candidates for early exit, best first."""
    options = stage.options
    with ProgressReporter(notices, "search") as reporter:
        limit = None if options.minutes is None else time.monotonic() + stage.budget.left_for_training()
        return search_exit(model, stage.data.held_out[:8], options.max_length, reporter, limit)


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
