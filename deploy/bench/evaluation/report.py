"""The tables of an evaluation, each speed with the quality beside it, and its roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.bench.evaluation.evaluation import Evaluation, Line, Quality
from deploy.bench.evaluation.tasks.task import Task
from deploy.bench.evaluation.token_costs import token_costs
from deploy.bench.measuring import measures
from deploy.bench.measuring.results import CellResult, Entry, Exactness, joined_use, over_tasks
from deploy.bench.report.charts import empty_plot, png
from deploy.bench.report.tables import UNKNOWN, machine_line, markdown_table, not_run, number, or_unknown
from deploy.draft_origins import origin_shares

_MIB = 2**20
_MEGA, _GIGA = 1e6, 1e9
_QUALITY_COLUMNS = (
    *("differ from plain", "of which rounding", "differ from the same target without drafts", "chrF to plain"),
    *("status", "tokens per answer", "cut at the limit", "tokens/s", "÷ plain"),
)
_STATUS_NOTE = (
    "Status: `equal`, `rounding` (every difference begins where logits are closer than rounding may change them), "
    "`other target` (settings of the target differ), `LOSSY`, or `WRONG`. chrF to plain: plain decoding's answers as "
    "the references. Plain decoding runs before and after every pass."
)
_PERCENTILES = " / ".join(f"p{100 * share:.0f}" for share in measures.QUANTILES)
_SPEED_COLUMNS = (
    *("competitor", "equal to plain", "tokens/s", "÷ plain", "÷ plain, per device"),
    *(f"{figure} {_PERCENTILES}, ms" for figure in ("TTFT", "TPOT")),
)
_WORK_COLUMNS = (
    *("competitor", "τ", "steps per token", "target GFLOP", "draft GFLOP", "weights, MB", "KV, MB"),
    *("CPU s", "busy s", "J", "peak, MiB", "accepted drafts from"),
)
_COST_NOTE = (
    "TPOT: per token after the first commit, a mean for each answer. τ: committed tokens per target step. Passes, "
    "GFLOP and MB are per token. Passes and GFLOP leave out prompts; GFLOP are those of the matrices, and the draft "
    "model's are estimated from the number of proposed tokens. MB (weights and KV that are read) are computed, not "
    "measured: every pass reads the target's weights once, every step the keys and values before it, and a draft "
    "model reads its weights once for each proposed token of a sequence (an upper bound for trees). CPU s, busy s "
    "(what target and drafters computed: GPU seconds on GPUs) and J (where the device reports energy) are per 1,000 "
    "tokens. Peak: the largest resident memory of one measured process. Where clusters run in this process, it holds "
    "the plain one as well, and what the system has not got back of earlier ones. Columns without a figure are left "
    "out."
)


def markdown(evaluation: Evaluation) -> str:
    """The whole report."""
    results = evaluation.results
    parts = [f"# Quality and cost by task\n\n{results.title}"]
    if results.stretch:
        parts.append(f"**{results.stretch}**")
    parts.append(machine_line(results.machine))
    for batch, temperature in evaluation.settings:
        lines = evaluation.lines(batch, temperature)
        where = f"batch {batch}, temperature {temperature:g}"
        for task in evaluation.tasks:
            within = [line.within(task.name) for line in lines]
            table = _quality_table(evaluation, task, within)
            parts.append(f"## {task.name}, {where}\n\n{table}")
            parts.append(f"### Cost of {task.name}, {where}\n\n{_cost_tables(within)}")
        if len(evaluation.tasks) > 1:
            parts.append(f"## Cost of all tasks in turn, {where}\n\n{_cost_tables(lines)}")
    parts.append(_COST_NOTE)
    parts.append(_settings(evaluation))
    parts.append(not_run(results))
    if evaluation.roofs is not None:
        parts.append(
            f"Limits of the device, measured with PyTorch: {evaluation.roofs.bytes_per_second / _GIGA:.1f} GB/s, "
            f"{evaluation.roofs.flops_per_second / _GIGA:.0f} GFLOP/s."
        )
    parts.append(f"Command:\n\n```sh\n{results.command}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _quality_table(evaluation: Evaluation, task: Task, lines: Sequence[Line]) -> str:
    qualities = [(line, evaluation.quality.of(line.name, line.cells[0].cell)) for line in lines if line.cells]
    metrics = list(dict.fromkeys(name for _, found in qualities if found for name in found.scores))
    plain = next((found for line, found in qualities if line.entry is None and found), None)
    deltas = [f"Δ {name}" for name in metrics] if plain else []
    rows = [
        [line.name, *_scores(found, plain, metrics), *_quality_figures(line, found)]
        for line, found in qualities
        if found is not None
    ]
    table = markdown_table(("competitor", *metrics, *deltas, *_QUALITY_COLUMNS), rows)
    return "\n\n".join([table, " ".join((*task.notes, _STATUS_NOTE))])


def _scores(found: Quality, plain: Quality | None, metrics: Sequence[str]) -> list[str]:
    """The scores, and by how much they are above those of plain decoding."""
    own = [number(found.scores.get(name)) for name in metrics]
    if plain is None:
        return own
    return own + [f"{found.scores[name] - plain.scores[name]:+.2f}" for name in metrics]


def _quality_figures(line: Line, found: Quality) -> list[str]:
    plain, passes = over_tasks(line.cells)
    ratios = measures.spread(measures.speed_ratios(plain, passes))
    rates = measures.spread([one.rate for one in line.passes])
    exactness = sum((cell.exactness for cell in line.cells), Exactness())
    cut = f"{found.at_limit} of {found.answers}"
    if line.entry is None:
        return [UNKNOWN] * 3 + [UNKNOWN, "", number(found.tokens, 1), cut, or_unknown(rates), "1"]
    differing = UNKNOWN if found.differing is None else f"{found.differing} of {found.answers}"
    return [
        differing,
        UNKNOWN if found.differing is None else str(exactness.explained),
        or_unknown(found.differing_from_same_target),
        number(found.chrf_to_plain, 1),
        status(line.entry, line.cells),
        number(found.tokens, 1),
        cut,
        or_unknown(rates),
        or_unknown(ratios),
    ]


def status(entry: Entry, cells: Sequence[CellResult]) -> str:
    """How the answers of a competitor relate to those of plain decoding, see `_STATUS_NOTE`; empty if unknown."""
    if not all(cell.is_lossless for cell in cells):
        return "LOSSY"
    if entry.alters_target:
        return "other target"
    total = sum((cell.exactness for cell in cells), Exactness())
    if total.wrong:
        return "WRONG"
    if total.not_compared or not (total.equal or total.explained):
        return ""
    return "rounding" if total.explained else "equal"


def _cost_tables(lines: Sequence[Line]) -> str:
    """How fast each competitor is, and what a token costs."""
    known = [line for line in lines if line.passes]
    speeds = [[line.name, *_speed_figures(line)] for line in known]
    works = [[line.name, *_work_figures(line)] for line in known]
    return "\n\n".join([_known_columns(_SPEED_COLUMNS, speeds), _known_columns(_WORK_COLUMNS, works)])


def _known_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns in which no row has a figure."""
    kept = [index for index in range(len(columns)) if any(row[index] != UNKNOWN for row in rows)]
    return markdown_table([columns[index] for index in kept], [[row[index] for index in kept] for row in rows])


def _speed_figures(line: Line) -> list[str]:
    passes = line.passes
    ratios = [] if line.entry is None else measures.speed_ratios(*over_tasks(line.cells))
    exactness = sum((cell.exactness for cell in line.cells), Exactness())
    compared = exactness.equal + exactness.explained + exactness.wrong
    return [
        f"{exactness.equal} of {compared}" if line.entry is not None and compared else UNKNOWN,
        or_unknown(measures.spread([found.rate for found in passes])),
        "1" if line.entry is None else or_unknown(measures.spread(ratios)),
        "1" if line.entry is None else or_unknown(measures.spread([one / line.cost.devices for one in ratios])),
        _milliseconds(measures.first_token_percentiles(passes)),
        _milliseconds(measures.per_token_percentiles(passes)),
    ]


def _work_figures(line: Line) -> list[str]:
    passes = line.passes
    costs = token_costs(line.cost, passes)
    return [
        number(measures.committed_per_step(passes)),
        number(costs.steps),
        _scaled(costs.target_flops, 1 / _GIGA, 3),
        _scaled(costs.draft_flops, 1 / _GIGA, 3),
        _scaled(costs.weight_bytes, 1 / _MEGA),
        _scaled(costs.kv_bytes, 1 / _MEGA),
        number(costs.cpu_seconds),
        number(costs.busy_seconds),
        number(costs.joules),
        _scaled(None if costs.peak_bytes is None else float(costs.peak_bytes), 1 / _MIB, 0),
        origin_shares(measures.accepted_by_origin(passes)) or UNKNOWN,
    ]


def _milliseconds(values: Sequence[float | None]) -> str:
    """Percentiles in one cell; a dash if none is known."""
    known = [value for value in values if value is not None]
    return " / ".join(f"{1e3 * value:.1f}" for value in known) if known else UNKNOWN


def _scaled(value: float | None, factor: float, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{factor * value:.{digits}f}"


def _settings(evaluation: Evaluation) -> str:
    rows = [
        [
            entry.name,
            " ".join(f"`{text}`" for text in entry.assignments) or UNKNOWN,
            *(f"{size / _MIB:.0f}" if size else UNKNOWN for size in (entry.cost.target_bytes, entry.cost.draft_bytes)),
            _peaks(evaluation, entry),
        ]
        for entry in evaluation.results.entries
    ]
    weights = ("target weights, MiB", "draft weights, MiB")
    columns = ("competitor", "settings", *weights, "peak of each process, MiB")
    return f"## Settings and memory\n\n{markdown_table(columns, rows)}"


def _peaks(evaluation: Evaluation, entry: Entry) -> str:
    """The largest resident memory of each measured process, the largest first."""
    uses = [found.resources for cell in evaluation.results.of(entry.name) for found in cell.passes]
    peaks = sorted(joined_use(uses).peak_bytes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name}: {most / _MIB:.0f}" for name, most in peaks) or UNKNOWN


@dataclass(frozen=True, slots=True)
class Point:
    """One competitor at one batch."""

    name: str
    intensity: float
    """Floating-point operations per byte that is read."""
    flops_per_second: float


def points(evaluation: Evaluation) -> list[Point]:
    """A point for each competitor and batch, at the first temperature: what its passes computed and read, prompts
    included. Those with unknown arithmetic have none.
    """
    found: list[Point] = []
    settings = evaluation.settings
    for batch, temperature in settings:
        if temperature != settings[0][1]:
            continue
        for line in evaluation.lines(batch, temperature):
            costs = token_costs(line.cost, line.passes)
            if costs.intensity is not None and costs.flops_per_second is not None:
                found.append(Point(f"{line.name}, batch {batch}", costs.intensity, costs.flops_per_second))
    return found


def roofline(evaluation: Evaluation) -> bytes | None:
    """The roofline as a PNG: where competitors are between reading memory and arithmetic (Williams et al. 2009).

    `None` without matplotlib, which is optional, without points or without a roof.
    """
    found, roofs = points(evaluation), evaluation.roofs
    if not found or roofs is None:
        return None
    results = evaluation.results
    plot = empty_plot((results.title, results.stretch), "arithmetic intensity and attained speed", 8.0)
    if plot is None:
        return None
    figure, axes = plot
    ridge = roofs.flops_per_second / roofs.bytes_per_second
    least = min(0.1 * ridge, *(0.5 * point.intensity for point in found))
    most = max(10 * ridge, *(2 * point.intensity for point in found))
    axes.plot(
        [least, ridge, most],
        [least * roofs.bytes_per_second / _GIGA, roofs.flops_per_second / _GIGA, roofs.flops_per_second / _GIGA],
        "k--",
        label="roof: reading memory, then multiplying matrices",
    )
    for point in found:
        axes.plot([point.intensity], [point.flops_per_second / _GIGA], "o", label=point.name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("floating-point operations per byte that is read")
    axes.set_ylabel("GFLOP/s")
    return png(figure, axes)
