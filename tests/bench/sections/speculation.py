"""Drafts against plain decoding on the six tasks of Spec-Bench, measured in turn in the same run.

Target, drafters and coordinator are separate processes that communicate over gRPC. At batch 1, drafter and target have
one core each; they are compared with plain decoding on one core and on all cores. At larger batch sizes both have all
cores, and plain decoding is measured before and after: the difference between the two is the error of a ratio.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field

from cluster.core.config.sections import Configuration
from tests.bench import drafting
from tests.bench.agreement import Agreement, agreement
from tests.bench.client import Answers, RequestOptions
from tests.bench.drafting import GREEDY, SAMPLED, Passes, TaskPrompts
from tests.bench.options import Options
from tests.bench.processes import clusters
from tests.bench.processes.clusters import ProcessCluster
from tests.bench.report import heading, ratios, spread, table, write

BATCHES, QUICK_BATCHES = (1, 4, 8, 16, 32), (1, 4)
PLAIN, PLAIN_ONE_CORE = "plain, all cores", "plain, one core"
SEPARATE_CORES, LARGEST_TREES = "draft and target on a core each", "the same, always the largest tree"
NGRAM, DRAFT_MODEL = "ngram", "draft model"
PLAIN_AGAIN = "plain, once more"
BATCHED = (PLAIN, NGRAM, DRAFT_MODEL, PLAIN_AGAIN)


@dataclass
class Bench:
    """The clusters by name, and their measurements."""

    task_prompts: TaskPrompts
    tokens: int
    clusters: dict[str, ProcessCluster] = field(default_factory=dict)
    passes: dict[tuple[str, int, RequestOptions], Passes] = field(default_factory=dict)

    def parts(self, name: str, place: slice) -> list[Answers]:
        """The greedy answers of one cluster to some prompts at batch 1, per repetition. Empty without a cluster."""
        return [answers.part(place) for answers in self.passes.get((name, 1, GREEDY), Passes()).answers]

    def plain_rates(self, batch: int) -> list[float]:
        """Tokens per second of plain decoding on all cores, per repetition: the mean of before and after."""
        before, after = (self.passes[name, batch, GREEDY].rates for name in (PLAIN, PLAIN_AGAIN))
        return [(one + other) / 2 for one, other in zip(before, after, strict=True)]

    def measure(self, name: str, batch: int, request_options: RequestOptions = GREEDY) -> None:
        """Measure one pass of a cluster, if there is such a cluster."""
        if name not in self.clusters:
            return
        prompts = self.task_prompts.prompts if batch == 1 else self.task_prompts.at_least(2 * batch)
        passes = self.passes.setdefault((name, batch, request_options), Passes())
        drafting.measure(self.clusters[name], prompts, self.tokens, batch, passes, request_options)
        last = passes.answers[-1]
        write(f"{name}, batch {batch}: {last.rate:.1f} tokens/s, {last.committed_per_step:.2f} per step")


def run(options: Options) -> None:
    """Measure and report."""
    heading("Speculation: drafts against plain decoding, Spec-Bench's tasks")
    task_prompts = drafting.read_task_prompts(options)
    bench = Bench(task_prompts, options.answer_tokens)
    batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    plain = drafting.plain(options)
    model = drafting.modelled(options)
    write(f"{plain.target.served_name}, {plain.target.dtype}; {task_prompts.describe(options.answer_tokens)}")
    write(drafting.describe(model or drafting.ngram(options)))
    with ExitStack() as stack:
        _open(stack, bench, options, plain, model, apart=1 in batches)
        for name, cluster in bench.clusters.items():
            if name == PLAIN_AGAIN:
                continue  # the same cluster as `PLAIN`
            some = [batch for batch in batches if batch == 1 or name in BATCHED]
            drafting.warm(cluster, task_prompts.prompts, options.answer_tokens, some)
        for repeat in range(options.repeats):
            write(f"repetition {repeat + 1}")
            step = 1 if repeat % 2 == 0 else -1  # a machine that slows down over time then affects all clusters equally
            for batch in batches:
                for name in (tuple(bench.clusters) if batch == 1 else BATCHED)[::step]:
                    bench.measure(name, batch)
            for name in (PLAIN, PLAIN_ONE_CORE, SEPARATE_CORES)[::step] if 1 in batches else ():
                bench.measure(name, 1, SAMPLED)
        agreed = _agreements(bench) if 1 in batches else {}
    if 1 in batches:
        _report_tasks(bench, agreed)
        _report_alone(bench)
    _report_batches(bench, batches)


def _open(
    stack: ExitStack,
    bench: Bench,
    options: Options,
    plain: Configuration,
    model: Configuration | None,
    *,
    apart: bool,
) -> None:
    """Start the clusters. One target has all cores. With `apart`, another has the first core and a drafter the last."""
    cores = clusters.all_cores()
    wide = stack.enter_context(clusters.target(plain, cores))
    ngram = drafting.ngram(options)
    opened = bench.clusters
    opened[PLAIN] = clusters.start_cluster(stack, plain, wide)
    opened[NGRAM] = clusters.start_cluster(stack, ngram, wide)
    if apart:
        drafted = model or ngram
        narrow = stack.enter_context(clusters.target(plain, cores[:1]))
        own = stack.enter_context(clusters.draft(drafted, cores[-1:]))
        opened[PLAIN_ONE_CORE] = clusters.start_cluster(stack, plain, narrow, opened[PLAIN].draft)
        opened[SEPARATE_CORES] = clusters.start_cluster(stack, drafted, narrow, own)
        opened[LARGEST_TREES] = clusters.start_cluster(stack, drafting.changed(drafted, controller="off"), narrow, own)
    if model is not None:
        opened[DRAFT_MODEL] = clusters.start_cluster(stack, model, wide)
    opened[PLAIN_AGAIN] = opened[PLAIN]


def _agreements(bench: Bench) -> dict[str, Agreement]:
    """How often the drafter agrees with the target's text, by task."""
    cluster, plain = bench.clusters[SEPARATE_CORES], bench.passes[PLAIN, 1, GREEDY].answers[0]
    texts = [tuple(answer.tokens) for answer in plain.each]
    return {
        task: asyncio.run(agreement(cluster.draft.address, bench.task_prompts.prompts[place], texts[place]))
        for task, place in bench.task_prompts.places.items()
    }


def _report_tasks(bench: Bench, agreed: dict[str, Agreement]) -> None:
    """Print the table of tasks: batch 1, greedy."""
    places = bench.task_prompts.places | {"overall": slice(None)}
    shares = agreed | {"overall": sum(agreed.values(), Agreement())}
    rows: list[list[str]] = []
    for task, place in places.items():
        wide, narrow, apart, largest = (
            bench.parts(name, place) for name in (PLAIN, PLAIN_ONE_CORE, SEPARATE_CORES, LARGEST_TREES)
        )
        rows.append(
            [
                task,
                f"{shares[task].share * 100:.0f} %",
                spread([part.committed_per_step for part in apart]),
                spread([part.committed_per_step for part in largest]) if largest else "–",
                spread([part.own_rate for part in apart], 1),
                *(
                    spread(ratios([getattr(part, rate) for part in apart], [getattr(part, rate) for part in plain]))
                    for rate in ("own_rate", "decoding_rate")
                    for plain in (wide, narrow)
                ),
            ]
        )
    columns = ("task", "agreement", "τ", "τ, largest trees", "tokens/s", "÷ plain, all cores", "÷ plain, one core")
    table((*columns, "decoding ÷ all cores", "decoding ÷ one core"), rows)
    write("batch 1, greedy, drafter and target on one core each; agreement: how often the drafter's first token at a")
    write("position is the target's; τ: tokens per target step; decoding: without the time to the first tokens")


def _report_alone(bench: Bench) -> None:
    """Print the table of batch 1: every cluster, greedy and sampled."""
    rows: list[list[str]] = []
    for (name, batch, request_options), passes in bench.passes.items():
        if batch != 1:
            continue
        plain = bench.passes[PLAIN, 1, request_options]
        rows.append(
            [
                f"{name}, {'greedy' if request_options == GREEDY else 'sampled'}",
                spread(passes.rates, 1),
                spread(ratios(passes.rates, plain.rates)),
                spread(passes.committed),
                spread([activity.target_idle * 100 for activity in passes.activity], 0) + " %",
                spread([activity.draft_idle * 100 for activity in passes.activity], 0) + " %",
                passes.equal(plain),
            ]
        )
    table(
        ("batch 1", "tokens/s", "÷ plain, all cores", "τ", "target idle", "drafter idle", "equal to plain's"),
        rows,
    )
    write("÷ plain: by the first plain pass of the same repetition")
    write(f"sampled: temperature {SAMPLED.temperature}, top-p {SAMPLED.top_p}, a seed for each prompt")


def _report_batches(bench: Bench, batches: tuple[int, ...]) -> None:
    """Print the table of larger batches, in which both sides have all cores."""
    rows: list[list[str]] = []
    for batch in batches:
        plain = bench.passes[PLAIN, batch, GREEDY]
        for name in BATCHED[1:]:
            passes = bench.passes.get((name, batch, GREEDY))
            if passes is not None:
                below = plain.rates if name == PLAIN_AGAIN else bench.plain_rates(batch)
                rows.append(
                    [
                        name,
                        str(batch),
                        spread(below, 1),
                        spread(passes.rates, 1),
                        spread(ratios(passes.rates, below)),
                        spread(passes.committed),
                        spread([activity.draft_idle * 100 for activity in passes.activity], 0) + " %",
                        passes.equal(plain),
                    ]
                )
    table(("drafts", "batch", "plain, tokens/s", "tokens/s", "÷ plain", "τ", "drafter idle", "equal to plain's"), rows)
    write("all have all cores; plain: the mean of a pass before and one after; the order is reversed in every second")
    write("repetition; plain, once more: one of the two plain passes ÷ the other")
