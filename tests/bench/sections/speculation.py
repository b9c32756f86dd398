"""A draft model with cores of its own against plain decoding, on the six tasks of Spec-Bench, measured in turn.

Target, drafter and coordinator are separate processes that communicate over gRPC. Drafter and target have one core each
and are compared with plain decoding on one core and on all cores, at batch 1. `pilotfish bench race` compares drafting
methods that share all cores, at any batch.
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

PLAIN, PLAIN_ONE_CORE = "plain, all cores", "plain, one core"
SEPARATE_CORES, LARGEST_TREES = "draft and target on a core each", "the same, always the largest tree"
SAMPLED_TOO = (PLAIN, PLAIN_ONE_CORE, SEPARATE_CORES)


@dataclass
class Bench:
    """The clusters by name, and their measurements."""

    task_prompts: TaskPrompts
    tokens: int
    clusters: dict[str, ProcessCluster] = field(default_factory=dict)
    passes: dict[tuple[str, RequestOptions], Passes] = field(default_factory=dict)

    def parts(self, name: str, place: slice) -> list[Answers]:
        """The greedy answers of one cluster to some prompts, per repetition."""
        return [answers.part(place) for answers in self.passes[name, GREEDY].answers]

    def measure(self, name: str, request_options: RequestOptions = GREEDY) -> None:
        """Measure one pass of a cluster."""
        passes = self.passes.setdefault((name, request_options), Passes())
        drafting.measure(self.clusters[name], self.task_prompts.prompts, self.tokens, 1, passes, request_options)
        last = passes.answers[-1]
        write(f"{name}: {last.rate:.1f} tokens/s, {last.committed_per_step:.2f} per step")


def run(options: Options) -> None:
    """Measure and report."""
    heading("Speculation: a draft model on a core of its own against plain decoding, Spec-Bench's tasks")
    task_prompts = drafting.read_task_prompts(options)
    bench = Bench(task_prompts, options.answer_tokens)
    plain = drafting.plain(options)
    drafted = drafting.modelled(options) or drafting.ngram(options)
    write(f"{plain.target.served_name}, {plain.target.dtype}; {task_prompts.describe(options.answer_tokens)}")
    write(drafting.describe(drafted))
    with ExitStack() as stack:
        _open(stack, bench, plain, drafted)
        for cluster in bench.clusters.values():
            drafting.warm(cluster, task_prompts.prompts, options.answer_tokens, (1,))
        for repeat in range(options.repeats):
            write(f"repetition {repeat + 1}")
            step = 1 if repeat % 2 == 0 else -1  # a machine that slows down over time then affects all clusters equally
            for name in tuple(bench.clusters)[::step]:
                bench.measure(name)
            for name in SAMPLED_TOO[::step]:
                bench.measure(name, SAMPLED)
        agreed = _agreements(bench)
    _report_tasks(bench, agreed)
    _report_all(bench)


def _open(stack: ExitStack, bench: Bench, plain: Configuration, drafted: Configuration) -> None:
    """Start the clusters. One target has all cores. Another has the first core, and a drafter has the last."""
    cores = clusters.all_cores()
    wide = stack.enter_context(clusters.target(plain, cores))
    narrow = stack.enter_context(clusters.target(plain, cores[:1]))
    own = stack.enter_context(clusters.draft(drafted, cores[-1:]))
    opened = bench.clusters
    opened[PLAIN] = clusters.start_cluster(stack, plain, wide)
    opened[PLAIN_ONE_CORE] = clusters.start_cluster(stack, plain, narrow, opened[PLAIN].draft)
    opened[SEPARATE_CORES] = clusters.start_cluster(stack, drafted, narrow, own)
    opened[LARGEST_TREES] = clusters.start_cluster(stack, drafting.changed(drafted, controller="off"), narrow, own)


def _agreements(bench: Bench) -> dict[str, Agreement]:
    """How often the drafter agrees with the target's text, by task."""
    cluster, plain = bench.clusters[SEPARATE_CORES], bench.passes[PLAIN, GREEDY].answers[0]
    texts = [tuple(answer.tokens) for answer in plain.each]
    return {
        task: asyncio.run(agreement(cluster.draft.address, bench.task_prompts.prompts[place], texts[place]))
        for task, place in bench.task_prompts.places.items()
    }


def _report_tasks(bench: Bench, agreed: dict[str, Agreement]) -> None:
    """Print the table of tasks, greedy."""
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
                spread([part.committed_per_step for part in largest]),
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


def _report_all(bench: Bench) -> None:
    """Print the table of every cluster, greedy and sampled."""
    rows: list[list[str]] = []
    for (name, request_options), passes in bench.passes.items():
        plain = bench.passes[PLAIN, request_options]
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
    write("÷ plain: by the plain pass of the same repetition")
    write(f"sampled: temperature {SAMPLED.temperature}, top-p {SAMPLED.top_p}, a seed for each prompt")
