"""The result of a capacity simulation as JSON, Markdown and a PNG."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.simulation.capacity.capacity_run import CapacityRun
from deploy.simulation.capacity.options import CapacityOptions

_HEADINGS = (
    "",
    "GPUs",
    "tokens/s",
    "tokens/s per GPU",
    "requests/s",
    "TTFT p50 / p90 / p99, ms",
    "TPOT p50 / p90 / p99, ms",
    "tokens per step",
    "target idle",
    "drafter idle",
)


def markdown(options: CapacityOptions, runs: dict[str, CapacityRun]) -> str:
    """A table with one row per run, and the speed-up of one GPU over plain decoding."""
    load = f"{options.in_flight} requests in flight" if options.in_flight else f"{options.arrivals:g} requests/s"
    is_colocated = options.has_drafts and options.placement == "target"
    drafters = "drafts on rank 0" if is_colocated else f"{options.drafters} drafters"
    times = f"times of {options.step_times}"
    if options.is_predicted:
        times = f"steps of {options.model} predicted on {options.device}"
        times += f", drafts of {options.draft}" if "drafts" in runs else ""
    simulated = "" if options.share == 1 else f", simulated: {options.simulated_targets} of the targets, and scaled"
    lines = [
        f"{options.targets} targets × {options.ranks} GPUs, {drafters}, {load}, lengths "
        f"{options.lengths}, acceptance {options.acceptance:g}{simulated}; {times}",
        "",
        f"| {' | '.join(_HEADINGS)} |",
        f"|---{'|---:' * (len(_HEADINGS) - 1)}|",
        *(f"| {' | '.join(_row(name, run))} |" for name, run in runs.items()),
    ]
    if len(runs) == 2:
        drafted, plain = runs.values()
        ratio = drafted.per_gpu / plain.per_gpu if plain.per_gpu else 0.0
        tpot = plain.per_token["p50"] / drafted.per_token["p50"] if drafted.per_token["p50"] else 0.0
        lines += [
            "",
            f"Per GPU, drafts give {ratio:.2f} × plain decoding; tokens of one answer come {tpot:.2f} × as fast.",
        ]
    return "\n".join(lines) + "\n"


def write(directory: Path, options: CapacityOptions, runs: dict[str, CapacityRun]) -> list[Path]:
    """Write capacity.json, capacity.md and, with matplotlib, capacity.png. Returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    values = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()},
        "runs": {name: asdict(run) | {"per_gpu": run.per_gpu} for name, run in runs.items()},
    }
    files = [directory / "capacity.json", directory / "capacity.md"]
    files[0].write_text(json.dumps(values, indent=1), encoding="utf-8")
    files[1].write_text(markdown(options, runs), encoding="utf-8")
    picture = plot(runs)
    if picture is not None:
        files.append(directory / "capacity.png")
        files[-1].write_bytes(picture)
    return files


def plot(runs: dict[str, CapacityRun]) -> bytes | None:
    """Bars of throughput per GPU, time per token and idle time, as a PNG. `None` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 4)
    names = list(runs)
    found = list(runs.values())
    _bars(panels[0], "tokens/s per GPU", names, [[run.per_gpu for run in found]], [""])
    shares = ("p50", "p90", "p99")
    _bars(panels[1], "time to first token, ms", names, _percentiles([run.first_token for run in found], shares), shares)
    _bars(panels[2], "time per token, ms", names, _percentiles([run.per_token for run in found], shares), shares)
    idle = [[100 * run.target_idle for run in found], [100 * run.drafter_idle for run in found]]
    _bars(panels[3], "idle, %", names, idle, ("targets", "drafters"))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    return picture.getvalue()


def _percentiles(values: Sequence[dict[str, float]], shares: Sequence[str]) -> list[list[float]]:
    return [[1e3 * one.get(share, 0.0) for one in values] for share in shares]


def _bars(axes: Any, title: str, names: list[str], groups: Sequence[Sequence[float]], labels: Sequence[str]) -> None:
    """One bar per name and group."""
    width = 0.8 / len(groups)
    for index, (values, label) in enumerate(zip(groups, labels, strict=True)):
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(names))]
        axes.bar(places, values, width, label=label)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(names)), names)
    if any(labels):
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(labels))


def _row(name: str, run: CapacityRun) -> list[str]:
    return [
        name,
        str(run.gpus),
        f"{run.tokens_per_second:.0f}",
        f"{run.per_gpu:.0f}",
        f"{run.requests_per_second:.1f}",
        _milliseconds(run.first_token),
        _milliseconds(run.per_token),
        f"{run.tokens_per_step:.2f}",
        f"{run.target_idle:.0%}",
        f"{run.drafter_idle:.0%}" if run.drafter_idle else "",
    ]


def _milliseconds(values: dict[str, float]) -> str:
    return " / ".join(f"{1e3 * value:.1f}" for value in values.values())
