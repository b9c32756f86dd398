"""Shared by `speculation` and `overlap`: prompts of Spec-Bench's tasks, configurations, and one measured pass."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.core.config.sections import Configuration
from cluster.core.errors import ModelLoadError
from cluster.generation.text.chat_messages import Message
from tests.bench.client import Answers, RequestOptions, ask_all
from tests.bench.options import Options
from tests.bench.processes.clusters import Activity, ProcessCluster
from tests.bench.report import write
from tests.bench.tasks import read_tasks
from workers.draft.model import DraftModelSettings

SHIPPED = "smollm2-135m-draft"
"""The packaged name of the draft that comes with Pilotfish."""
ROOM = (
    "target.kv.prefix_cache=false",
    "target.kv.pool_bytes=1610612736",
    "draft.model.kv.pool_bytes=402653184",
    "scheduler.max_sequences=32",
)
"""Settings of all clusters: passes repeat the same prompts without a prefix cache, and memory is never short."""
GREEDY = RequestOptions(ignore_eos=False)
SAMPLED = RequestOptions(temperature=0.7, top_p=0.9, ignore_eos=False)


@dataclass(frozen=True)
class TaskPrompts:
    """The prompts of all tasks, one task after another."""

    prompts: tuple[tuple[int, ...], ...]
    places: dict[str, slice]
    """The positions of each task's prompts, by task."""

    def describe(self, tokens: int) -> str:
        """One line for the report: number, length and tasks of the prompts."""
        lengths = [len(prompt) for prompt in self.prompts]
        return (
            f"{len(lengths)} prompts of {min(lengths)}–{max(lengths)} tokens from {len(self.places)} tasks, "
            f"at most {tokens} tokens each"
        )

    def at_least(self, count: int) -> tuple[tuple[int, ...], ...]:
        """All prompts, repeated until there are at least `count`."""
        times = -(-count // len(self.prompts))
        return (self.prompts * times)[: max(count, len(self.prompts))]


def read_task_prompts(options: Options) -> TaskPrompts:
    """Read the chat prompts of each task. Raises `ConfigurationError` with the name of the file."""
    prompts: list[tuple[int, ...]] = []
    places: dict[str, slice] = {}
    for task, texts in read_tasks(options.prompts_file, options.per_task).items():
        places[task] = slice(len(prompts), len(prompts) + len(texts))
        prompts.extend(options.tokenizer.encode_chat([Message("user", text, None)]) for text in texts)
    return TaskPrompts(tuple(prompts), places)


def plain(options: Options) -> Configuration:
    """The configuration without drafts."""
    return options.based_on(*ROOM, "draft.method=none")


def ngram(options: Options) -> Configuration:
    """The configuration with prompt lookup."""
    return options.based_on(*ROOM, "draft.method=ngram")


def changed(
    configuration: Configuration, model_changes: Mapping[str, object] | None = None, **changes: object
) -> Configuration:
    """The configuration with another `draft` section and other settings of its draft model."""
    draft = configuration.draft.with_weights(**(model_changes or {})).model_copy(update=changes)
    return configuration.model_copy(update={"draft": draft})


def modelled(options: Options, *assignments: str) -> Configuration | None:
    """The configuration with a draft model in the target's dtype. Without a model, prints why and returns `None`."""
    dtype = options.configuration().target.dtype
    model = ("draft.method=model", f"draft.model.path={options.draft or SHIPPED}", f"draft.model.dtype={dtype}")
    try:
        configuration = options.based_on(*ROOM, *model, *assignments)
    except ModelLoadError as error:
        if options.draft is not None:
            raise
        write(f"no draft model: {error}")
        return None
    return configuration


def describe(configuration: Configuration) -> str:
    """One line for the report: the drafting method and its settings."""
    draft = configuration.draft
    words = [f"drafts: {draft.name}", f"at most {draft.max_nodes} nodes, {draft.max_depth} deep"]
    if draft.weights is not None:
        words[0] += f", {Path(draft.weights.path).name} in {draft.weights.dtype}"
        model = draft.settings(draft.weights_method or "", DraftModelSettings)
        words += [f"mode {model.mode}", f"width {model.width}", f"{model.candidates} candidates"]
    return "; ".join([*words, f"controller {draft.controller}"])


@dataclass
class Passes:
    """The measurements of one cluster at one batch size, one per repetition."""

    answers: list[Answers] = field(default_factory=list)
    activity: list[Activity] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each pass."""
        return [answers.rate for answers in self.answers]

    @property
    def committed(self) -> list[float]:
        """Tokens per target step (τ) of each pass."""
        return [answers.committed_per_step for answers in self.answers]

    def equal(self, plain: Passes) -> str:
        """How many answers of all repetitions equal those of plain decoding, as text."""
        pairs = [
            pair
            for mine, theirs in zip(self.answers, plain.answers, strict=True)
            for pair in zip(mine.each, theirs.each, strict=True)
        ]
        return f"{sum(one.tokens == other.tokens for one, other in pairs)} of {len(pairs)}"


def measure(
    cluster: ProcessCluster,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    batch: int,
    into: Passes,
    request_options: RequestOptions = GREEDY,
) -> None:
    """Measure one pass through all prompts."""
    cluster.collect()
    into.answers.append(asyncio.run(ask_all(cluster.coordinator.address, prompts, tokens, batch, request_options)))
    into.activity.append(cluster.collect())


def warm(cluster: ProcessCluster, prompts: Sequence[tuple[int, ...]], tokens: int, batches: Sequence[int]) -> None:
    """Send a few prompts at each batch size, so that everything is compiled and the controller has measured times."""
    for batch in batches:
        asyncio.run(ask_all(cluster.coordinator.address, prompts[: max(2, batch)], tokens, batch))
