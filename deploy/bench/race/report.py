"""The results of a race as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.bench.contestants.answers import BenchPass
from deploy.bench.measuring import measures
from deploy.bench.measuring.results import (
    PLAIN,
    BenchResults,
    CellResult,
    Entry,
    Exactness,
    over_tasks,
    plain_passes,
)
from deploy.bench.report.tables import UNKNOWN, machine_line, markdown_table, not_run, number, or_unknown
from deploy.draft_origins import origin_shares

_MIB = 2**20


def markdown(results: BenchResults) -> str:
    """The whole report: what ran where, speed, speed by task, latency, cost, and what did not run."""
    settings = list(dict.fromkeys((found.cell.batch, found.cell.temperature) for found in results.cells))
    parts = [f"# Race of drafting methods\n\n{results.title}"]
    if results.stretch:
        parts.append(f"**{results.stretch}**")
    parts.append(machine_line(results.machine))
    for batch, temperature in settings:
        where = f"batch {batch}, temperature {temperature:g}"
        note = " (stretched target)" if results.stretch else ""
        parts.append(f"## Speed, {where}{note}\n\n{_speed(results, batch, temperature)}")
        parts.append(f"## Speed by task, ÷ plain, {where}{note}\n\n{_by_task(results, batch, temperature)}")
        parts.append(f"## Latency in milliseconds, {where}{note}\n\n{_latency(results, batch, temperature)}")
    parts.append(f"## Settings and memory\n\n{_costs(results)}")
    parts += [not_run(results), _plain_own(results)]
    parts.append(f"Command:\n\n```sh\n{results.command}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


_SPEED_COLUMNS = (
    *("competitor", "tokens/s", "÷ plain", "÷ plain, per device", "plain ÷ plain", "τ", "drafted, accepted"),
    "accepted drafts from",
    *("accepted at position 1, 2, …", "target steps per token", "GFLOP per token", "equal / explained / wrong"),
)
_SPEED_NOTE = (
    "tokens/s and ÷ plain: all tasks in turn. Plain decoding runs before and after every pass, and plain ÷ plain "
    "compares two plain passes that follow each other. τ: committed tokens per target step. Accepted at a "
    "position: share of all target steps. Passes and FLOP leave out prompts; FLOP are those of the matrices, and "
    "the draft model's are estimated from the number of proposed tokens. Explained: the first tokens that differ "
    "have logits closer than rounding may change them. Accepted drafts from earlier answers "
    "are copies of other answers of the same pass; of a server that is measured by its address, of any answer."
)


def _speed(results: BenchResults, batch: int, temperature: float) -> str:
    rows: list[list[str]] = []
    plain = plain_passes(results, batch, temperature)
    if plain:
        rate, tau = measures.spread([found.rate for found in plain]), measures.committed_per_step(plain)
        rows.append([PLAIN, or_unknown(rate), "1", "1", UNKNOWN, number(tau), *[UNKNOWN] * 6])
    for entry in results.entries:
        found = results.of(entry.name, batch=batch, temperature=temperature)
        if found:
            rows.append([_label(entry, found), *_speed_figures(entry, found)])
    return f"{markdown_table(_SPEED_COLUMNS, rows)}\n\n{_SPEED_NOTE}"


def _speed_figures(entry: Entry, found: Sequence[CellResult]) -> list[str]:
    plain, passes = over_tasks(found)
    ratio = measures.spread(measures.speed_ratios(plain, passes))
    per_device = measures.spread([value / entry.cost.devices for value in measures.speed_ratios(plain, passes)])
    drafted, accepted = measures.drafted_tokens(passes)
    positions = " ".join(f"{share:.2f}" for share in measures.acceptance_by_position(passes))
    costs = measures.per_committed_token(passes)
    return [
        or_unknown(measures.spread([found.rate for found in passes])),
        or_unknown(ratio),
        or_unknown(per_device),
        or_unknown(measures.spread(measures.drift(plain))),
        number(measures.committed_per_step(passes)),
        f"{drafted if drafted or not accepted else UNKNOWN}, {accepted}",
        origin_shares(measures.accepted_by_origin(passes)) or UNKNOWN,
        positions or UNKNOWN,
        UNKNOWN if costs is None else f"{costs[0]:.2f}",
        UNKNOWN if costs is None or not entry.cost.target_flops else f"{flops_per_token(entry, passes) / 1e9:.2f}",
        str(sum((result.exactness for result in found), Exactness())),
    ]


def flops_per_token(entry: Entry, passes: Sequence[BenchPass]) -> float:
    """Floating-point operations of target and drafting per token of the answers, without prompts."""
    costs = measures.per_committed_token(passes)
    tokens = sum(found.tokens for found in passes)
    if costs is None or not tokens:
        return 0.0
    return entry.cost.target_flops * costs[1] + measures.draft_flops(entry.cost, passes) / tokens


def _label(entry: Entry, found: Sequence[CellResult]) -> str:
    return entry.name if all(result.is_lossless for result in found) else f"{entry.name} (NOT LOSSLESS)"


def _by_task(results: BenchResults, batch: int, temperature: float) -> str:
    tasks = list(dict.fromkeys(found.cell.task for found in results.cells))
    rows: list[list[str]] = []
    for entry in results.entries:
        ratios = [
            measures.spread(measures.speed_ratios(*over_tasks(found)))
            if (found := results.of(entry.name, task=task, batch=batch, temperature=temperature))
            else None
            for task in tasks
        ]
        if any(ratio is not None for ratio in ratios):
            rows.append([entry.name, *map(or_unknown, ratios)])
    return markdown_table(("competitor", *tasks), rows)


def _latency(results: BenchResults, batch: int, temperature: float) -> str:
    names = [f"{figure} p{100 * share:.0f}" for figure in ("TTFT", "TPOT") for share in measures.QUANTILES]
    rows: list[list[str]] = []
    measured = [(PLAIN, plain_passes(results, batch, temperature))]
    measured += [
        (entry.name, over_tasks(results.of(entry.name, batch=batch, temperature=temperature))[1])
        for entry in results.entries
    ]
    for name, passes in measured:
        if passes:
            values = [*measures.first_token_percentiles(passes), *measures.per_token_percentiles(passes)]
            rows.append([name, *(number(None if value is None else 1e3 * value) for value in values)])
    note = "TTFT: from the request to the first token. TPOT: per token after the first commit, a mean for each answer."
    return f"{markdown_table(('competitor', *names), rows)}\n\n{note}"


def _costs(results: BenchResults) -> str:
    rows = [
        [
            entry.name,
            "`" + " ".join(entry.assignments) + "`" if entry.assignments else UNKNOWN,
            *(
                f"{value / _MIB:.0f}" if value else UNKNOWN
                for value in (entry.cost.target_bytes, entry.cost.draft_bytes, entry.cost.resident_bytes)
            ),
        ]
        for entry in results.entries
    ]
    columns = ("competitor", "settings", "target weights, MiB", "draft weights, MiB", "growth of the process, MiB")
    note = (
        "Growth: from before the start of the competitor to after it, with its KV pool. The method `prediction` "
        "receives the user's message as the prediction. The methods of transformers run with its defaults."
    )
    return f"{markdown_table(columns, rows)}\n\n{note}"


def _plain_own(results: BenchResults) -> str:
    own = [entry.name for entry in results.entries if entry.is_plain_own]
    return f"Plain decoding was measured in the same cluster, with speculation off: {', '.join(own)}." if own else ""
