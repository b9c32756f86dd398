"""`pilotfish distill --plan`: what a training takes on 1, 2, 4 and 8 devices, or on the only one that it can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table
from transformers import AutoModelForCausalLM

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from deploy.distillation import dspark, eagle3
from deploy.distillation.begun_draft import begun_card
from deploy.distillation.single_process_job import block_words, head_words
from deploy.terminal import output, write_json
from workers.distill.dspark.memory import BlockBatch, block_flops, block_memory, block_size
from workers.distill.dspark.memory import text_bytes as block_text_bytes
from workers.distill.eagle3.memory import RollOutBatch, head_size, roll_out_flops, roll_out_memory, text_bytes
from workers.distill.eagle3.training import MULTIPLE
from workers.distill.memory import HALF, ModuleSize, TargetSize, TrainingMemory
from workers.distill.modules.memory import (
    ModuleBatch,
    StudentShape,
    TrainedShape,
    module_flops,
    module_memory,
    module_size,
)
from workers.distill.modules.module_plan import (
    layer_shape,
    module_training_plan,
    wanted_shape,
    with_defaults,
)
from workers.distill.options import DSPARK, SINGLE_PROCESS, DistillOptions
from workers.distill.student import checked_config
from workers.distill.student_pipeline import student_plan
from workers.model.draft_card import LAYERS
from workers.model.draft_shapes import BlockShape, EagleShape, ExitShape, HeadsShape, TableShape
from workers.model.public_shapes import FeatureShape, MaskedBlockShape
from workers.model.rank_bytes import rank_bytes
from workers.model.stored.quantized_checkpoint import stored_bytes
from workers.model.stored_choice import choose_stored
from workers.model.target_ends import read_config

RANKS = (1, 2, 4, 8)
"""Numbers of devices that are planned for."""
_FLOPS_PER_SECOND = 989e12  # NVIDIA's data sheet, H100 SXM, bfloat16 without sparsity
_UTILIZATION = 0.4  # an assumption: the share of that peak which a training reaches
_LINK_BYTES_PER_SECOND = 450e9  # NVIDIA's data sheet: 900 GB/s NVLink in both directions together
_LIKE_LLAMA = 0.02  # biases and norms of other families are no larger a share of a layer's parameters
_USABLE = 0.95  # an assumption: the rest is lost to fragments of the allocator and to libraries
_ON_RANKS = (
    "A step reads of the target its embedding and its head. Before, {ranks}\n"
    "hidden states, with {part:.1f} GB of weights on a device, and KV memory, which is not counted. `stored`: a\n"
    "device fits a step, but not that, which is not needed where all texts and their hidden states are stored."
)


@dataclass(frozen=True, slots=True)
class Training:
    """A training whose memory and operations are known."""

    name: str
    """What is trained, in words."""
    step: str
    """What one device computes in a step, in words."""
    target: TargetSize
    size: ModuleSize
    batch: BlockBatch | RollOutBatch | ModuleBatch
    text_bytes: int
    """Bytes of a token of the texts on a device; 0: they are on the disk."""
    memory: Callable[[int, int, bool], TrainingMemory]
    """Memory for tokens of texts, ranks, and whether activations are computed again."""
    flops: Callable[[bool], int]
    """Operations of a step of one device."""
    note: str
    ranks: tuple[int, ...] = RANKS
    recomputes: tuple[bool, ...] = (False, True)


@dataclass(frozen=True, slots=True)
class PlannedTraining:
    """One configuration of a training, in bytes of one device."""

    ranks: int
    recomputes: bool
    memory: TrainingMemory
    free: int
    """Bytes that are left of a device; below 0, the training does not fit."""
    fits_target: bool
    """Whether a device also fits what is there before steps or between them, with the target or a rank's part of it."""
    most_text_tokens: int | None
    """Tokens of texts that fit one device's memory; below 0, not even the training fits. `None`: on the disk."""
    tokens_per_second: float
    """Predicted tokens of texts, padding included, that all devices train on in a second."""

    @property
    def fits(self) -> bool:
        """Whether a device fits a step."""
        return self.free >= 0


def plan_block(target: TargetSize, shape: MaskedBlockShape, batch: BlockBatch) -> Training:
    """The training of a DSpark drafter. `batch` is what one device computes in a step."""
    return Training(
        name="A DSpark drafter",
        step=f"{batch.rows} rows of {batch.length} tokens, {batch.blocks} blocks of {shape.slots} in a row",
        target=target,
        size=block_size(shape),
        batch=batch,
        text_bytes=block_text_bytes(shape.taps, shape.body.hidden_size),
        memory=lambda tokens, ranks, again: block_memory(target, shape, batch, tokens, ranks=ranks, recomputes=again),
        flops=lambda again: block_flops(target, shape, batch, recomputes=again),
        note=_on_ranks(target),
    )


def plan_roll_outs(target: TargetSize, shape: FeatureShape, batch: RollOutBatch) -> Training:
    """The training of an EAGLE-3 head. `batch` is what one device computes in a step."""
    rows = f"{batch.rows} {'packed rows' if batch.packs else 'rows'} of {batch.length} tokens"
    return Training(
        name="An EAGLE-3 head",
        step=f"{rows}, roll-outs of {batch.depths} steps",
        target=target,
        size=head_size(shape, batch.vocabulary),
        batch=batch,
        text_bytes=text_bytes(shape),
        memory=lambda tokens, ranks, again: roll_out_memory(
            target, shape, batch, tokens, ranks=ranks, recomputes=again
        ),
        flops=lambda again: roll_out_flops(target, shape, batch, recomputes=again),
        note=_on_ranks(target),
    )


def plan_module(target: TargetSize, shape: TrainedShape, batch: ModuleBatch, text_tokens: int) -> Training:
    """A training in one process on one device, on as many tokens of texts."""
    stored = HALF * batch.taps * target.hidden_size * text_tokens
    name, reads = shape.title, "to write texts, before anything else is there."
    if batch.taps:
        reads = f"to compute hidden states, which take {stored / 1e9:.1f} GB of the disk, and to measure."
    return Training(
        name=name,
        step=f"{batch.rows} rows of {batch.length} tokens, {batch.paths} drafts of {batch.depths} tokens",
        target=target,
        size=module_size(target, shape, batch.taps),
        batch=batch,
        text_bytes=0,
        memory=lambda *_: module_memory(target, shape, batch),
        flops=lambda _: module_flops(target, shape, batch),
        note=(f"One process trains it. The device has the whole target, with KV memory that is not counted,\n{reads}"),
        ranks=(1,),
        recomputes=(False,),
    )


def plans_of(training: Training, text_tokens: int, device_bytes: float) -> list[PlannedTraining]:
    """Plan a training on all numbers of devices, with and without activations that are computed again.

    `text_tokens` are those of all devices together.
    """
    found = []
    for ranks in training.ranks:
        for recomputes in training.recomputes:
            memory = training.memory(-(-text_tokens // ranks), ranks, recomputes)
            usable = int(_USABLE * device_bytes)
            fits_target = memory.most <= usable
            most = usable - memory.peak + memory.texts
            seconds = training.flops(recomputes) / (_UTILIZATION * _FLOPS_PER_SECOND)
            # Parameters are gathered for both passes, and gradients are scattered, all in float32.
            moved = 3 * 4 * training.size.parameters * (ranks - 1) / ranks
            seconds += moved / _LINK_BYTES_PER_SECOND
            rate = ranks * training.batch.rows * training.batch.length / seconds
            tokens = most // training.text_bytes if training.text_bytes else None
            free = usable - memory.peak
            found.append(PlannedTraining(ranks, recomputes, memory, free, fits_target, tokens, rate))
    return found


def print_plan(options: DistillOptions, target: Path, ranks: int = 1, quantization: str = "none") -> None:
    """Print the plan of a command; see `plans_for`."""
    training, planned = plans_for(options, target, ranks, quantization)
    if options.json:
        write_json(description(training, planned))
    else:
        output.print(plan_table(training, planned, options.device_gb))


def plans_for(
    options: DistillOptions, target: Path, ranks: int = 1, quantization: str = "none"
) -> tuple[Training, list[PlannedTraining]]:
    """The plans of a command whose target is a directory with a config.json, on tensor-parallel ranks.

    `quantization` is `target.quantization`. Raises `ConfigurationError`, and `ModelLoadError` for a configuration that
    cannot be read.
    """
    if not (target / "config.json").is_file():
        raise ConfigurationError(f"target.path: {target} is refused; --plan needed a directory with a config.json")
    config: Any = read_config(target)
    if config.is_encoder_decoder:
        raise ConfigurationError(f"target.path: {target} is refused; --plan is for decoder-only targets")
    size = _size_of(config)
    size = replace(size, ranks=ranks)
    size = replace(size, stored=_stored_bytes(size, target, quantization))
    training = _training(options, config.get_text_config(), size, target)
    if options.workers > 1:
        training = replace(training, ranks=(options.workers,))
    if options.recompute:
        training = replace(training, recomputes=(True,))
    return training, plans_of(training, options.answer_tokens, options.device_gb * 1e9)


def _training(options: DistillOptions, config: Any, size: TargetSize, target: Path) -> Training:
    """The training that the options of the command ask for. Raises `ConfigurationError`."""
    if options.kind == LAYERS:
        return _student_training(options, size, target)
    if options.kind not in SINGLE_PROCESS:
        return _module_training(options, config, size, target)
    needed = ["--target", str(target), "--prompts", "unused", "--out", "unused"]
    needed += ["--max-length", str(options.max_length)]
    count = int(config.num_hidden_layers)
    if options.kind == DSPARK:
        chosen = dspark.options([*needed, *block_words(options)])
        taps = options.taps or dspark.default_taps(count)
        blocks = BlockBatch(chosen.batch_rows, options.max_length, chosen.blocks)
        own = None if options.start is None else begun_card(options.start, MaskedBlockShape, config).shape
        block = own if isinstance(own, MaskedBlockShape) else dspark.block_shape(config, chosen, len(taps))
        return plan_block(size, block, blocks)
    chosen = eagle3.options([*needed, *head_words(options)])
    taps = options.taps or eagle3.default_taps(count)
    length = -(-options.max_length // MULTIPLE) * MULTIPLE
    rows = max(1, chosen.batch_tokens // (length if chosen.pack else options.max_length))
    card = None if options.start is None else begun_card(options.start, FeatureShape, config)
    if card is not None and isinstance(card.shape, FeatureShape):
        shape, vocabulary = card.shape, card.vocabulary_size or size.vocabulary
    else:
        shape = eagle3.shape_of(config, taps, is_normed=chosen.tap_norm == "each")
        vocabulary = min(chosen.vocabulary_size, size.vocabulary)
    return plan_roll_outs(size, shape, RollOutBatch(rows, length, chosen.depths, vocabulary, chosen.pack))


def _module_training(options: DistillOptions, config: Any, size: TargetSize, target: Path) -> Training:
    """The training of a module that one process trains. Raises `ConfigurationError`."""
    options = with_defaults(replace(options, minutes=None, steps=1), config, target)
    shape, plan = wanted_shape(options, config, target), module_training_plan(options)
    if isinstance(shape, TableShape) or (isinstance(shape, ExitShape) and not shape.has_norm):
        raise ConfigurationError(f"--plan: refused for kind {options.kind} with these layers: nothing is trained")
    batch = replace(_batch(options, size), taps=len(options.taps))
    match shape:
        case HeadsShape():
            batch = replace(batch, paths=min(plan.paths, batch.paths), depths=shape.depths)
        case BlockShape():
            each = min(max(1, plan.paths // batch.rows), batch.length)
            batch = replace(batch, paths=batch.rows * each, depths=shape.block)
        case EagleShape():
            batch = replace(batch, depths=plan.depths)
    return plan_module(size, shape, batch, options.answer_tokens)


def _student_training(options: DistillOptions, size: TargetSize, target: Path) -> Training:
    """The training of a small model. Raises `ConfigurationError` for one whose layers are unlike Llama's."""
    plan = student_plan(options)
    config: Any = checked_config(target, plan, options.vocabulary_size)
    shape = StudentShape(layer_shape(config, options.max_length), int(config.num_hidden_layers))
    batch = _batch(options, size)
    if plan.vocabulary is not None:
        batch = replace(batch, vocabulary=len(plan.vocabulary))
    own = _size_of(config).parameters - (1 if config.tie_word_embeddings else 2) * size.vocabulary * size.hidden_size
    counted = module_size(size, shape, 0).parameters
    if abs(own - counted) > _LIKE_LLAMA * own:
        raise ConfigurationError(f"--plan: refused for model type {config.model_type!r}: its layers are unlike Llama's")
    return plan_module(size, shape, batch, options.answer_tokens)


def _batch(options: DistillOptions, size: TargetSize) -> ModuleBatch:
    """A batch as the options say, with a draft of one token at each position."""
    rows = max(1, options.batch_tokens // options.max_length)
    vocabulary = options.vocabulary_size or size.vocabulary
    return ModuleBatch(rows, options.max_length, 0, rows * options.max_length, 1, vocabulary)


def _size_of(config: Any) -> TargetSize:
    """The sizes of a model with a configuration of `transformers`. No weights are made. Raises `ConfigurationError`."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:  # it writes more than text
        raise ConfigurationError(f"--plan: refused for model type {config.model_type!r}: {error}") from None
    text = config.get_text_config()
    return TargetSize(sum(one.numel() for one in model.parameters()), text.hidden_size, text.vocab_size)


def _stored_bytes(size: TargetSize, target: Path, quantization: str) -> int | None:
    """Bytes of the weights of a target as the engine's ranks store them; `None` for bfloat16.

    Raises `ConfigurationError` for a number of ranks that stored weights are not divided among.
    """
    if quantization == "int8":
        return size.whole - (size.parameters - size.ends // HALF)
    if quantization == "auto":
        section = TargetSection(path=str(target), dtype="bfloat16", tensor_parallel=size.ranks)
        quantization = "stored" if choose_stored(section, target, on_gpu=True).is_kept else "none"
    if quantization == "stored" and size.ranks > 1:
        most = rank_bytes(target, "bfloat16", size.ranks, on_gpu=True)
        return None if most is None else size.ranks * most
    if quantization == "stored":
        return stored_bytes(target, "bfloat16", on_gpu=True) or None
    return None


def _on_ranks(target: TargetSize) -> str:
    count = target.ranks
    ranks = f"{count} ranks write texts and compute" if count > 1 else "one rank writes texts and computes"
    return _ON_RANKS.format(ranks=ranks, part=target.rank_bytes / 1e9)


def description(training: Training, planned: Sequence[PlannedTraining]) -> dict[str, Any]:
    """The plan as JSON values, in bytes."""
    return {
        "target": asdict(training.target),
        "module_parameters": training.size.parameters,
        "batch": asdict(training.batch),
        "plans": [
            asdict(one) | {"held": one.memory.held, "peak": one.memory.peak, "most": one.memory.most, "fits": one.fits}
            for one in planned
        ],
    }


def plan_table(training: Training, planned: Sequence[PlannedTraining], device_gb: float) -> Table:
    """One row per number of devices, with and without activations that are computed again."""
    table = Table(
        title=(
            f"{training.name} of {training.size.parameters / 1e6:,.0f} M parameters for a target of "
            f"{training.target.parameters / 1e9:.1f} B: GB of each device.\nA step of one device: {training.step}.\n"
            "Tokens/s are predicted for H100."
        ),
        caption=training.note,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in plan_headings(training, device_gb):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in plan_rows(training, planned):
        table.add_row(*row)
    return table


def plan_headings(training: Training, device_gb: float) -> tuple[str, ...]:
    """The headings of the columns of `plan_rows`; a long one has a line break."""
    others = "texts" if training.text_bytes else "between"
    headings = ("devices", "re-\ncompute", "target", "module", others, "step", "most")
    return (*headings, f"fits\n{device_gb:g} GB", "text\ntokens", "tokens\nper s")


def plan_rows(training: Training, planned: Sequence[PlannedTraining]) -> list[tuple[str, ...]]:
    """The cells of each planned configuration, memory in GB."""
    is_on_disk, rows = not training.text_bytes, list[tuple[str, ...]]()
    for one in planned:
        memory = one.memory
        others = memory.between if is_on_disk else memory.texts
        parts = (memory.target, memory.weights + memory.optimizer, others, memory.peak - memory.held, memory.most)
        rows.append(
            (
                str(one.ranks),
                "yes" if one.recomputes else "no",
                *(f"{part / 1e9:.1f}" for part in parts),
                "yes" if one.fits_target else "stored" if one.fits and not is_on_disk else "no",
                "disk" if one.most_text_tokens is None else f"{max(0, one.most_text_tokens):,}",
                f"{one.tokens_per_second:,.0f}",
            )
        )
    return rows
