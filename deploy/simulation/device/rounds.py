"""How long a round of a target with a drafting module on its GPU takes on an H100 or H200: a prediction."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from cluster.core.config.draft_section import DraftSection
from deploy.simulation.device.drafting import DraftCount, RoundCount, count_eagle_round
from deploy.simulation.device.models import RankModel
from deploy.simulation.device.prediction import kernel_seconds, launched_seconds, new_table, predict
from deploy.simulation.device.speeds import H100, Device

ROUND_ROWS = (1, 8, 64)
_STORED = 2048


@dataclass(frozen=True, slots=True)
class PredictedRound:
    """Times of a round, in seconds."""

    target_seconds: float
    shown_seconds: float
    """Tokens and hidden states to the host, and those of accepted positions back."""
    draft_seconds: float

    @property
    def seconds(self) -> float:
        """Time of the whole round."""
        return self.target_seconds + self.shown_seconds + self.draft_seconds


def predict_round(found: RoundCount, device: Device = H100) -> PredictedRound:
    """Predict the times of a round."""
    shown = sum(launched_seconds(kernel, 1, device) for kernel in found.target.shown)
    shown += (found.target.read_bytes + found.target.shown_bytes) / device.host_bytes_per_second
    return PredictedRound(predict(found.target, device).seconds, shown, draft_seconds(found.drafts, device))


def draft_seconds(found: DraftCount, device: Device = H100) -> float:
    """Predict the time of drafts. The head's passes are CUDA graphs; what is beside them is launched by the host."""
    captured = [kernel for kernels in found.passes for kernel in kernels]
    inside = sum(kernel_seconds(kernel, device) + device.graph_launch_seconds for kernel in captured)
    return inside + sum(launched_seconds(kernel, 1, device) for kernel in found.beside)


def rounds_table(model: RankModel, device: Device = H100) -> Table:
    """One row per number of sequences, each of which verifies a draft of the default size and gets the next one.

    Passes are the head's: one over the accepted tokens, then one for each depth of the trees but the last.
    """
    draft = DraftSection()
    table = new_table()
    table.add_column("rows ×\ntokens", no_wrap=True)
    headings = (
        *("kernels\ntarget", "passes", "of a\npass", "beside", "copies", "waits"),
        *("target\nms", "states\nms", "drafts\nms", "round\nms"),
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for rows in ROUND_ROWS:
        found = count_eagle_round(model, rows, _STORED, draft)
        times = predict_round(found, device)
        table.title = f"{model.name} after {_STORED} tokens with an EAGLE head of one layer, whose passes are "
        table.title += f"{found.drafts.graphs} CUDA graphs, in bfloat16 on one {device.name}: predicted"
        counts = (
            *(found.target.launches, len(found.drafts.passes), len(found.drafts.passes[-1]), len(found.drafts.beside)),
            *(found.target.copies + found.drafts.copies, found.target.waits + found.drafts.waits),
        )
        seconds = (times.target_seconds, times.shown_seconds, times.draft_seconds, times.seconds)
        table.add_row(f"{rows} × {1 + draft.max_nodes}", *map(str, counts), *(f"{1e3 * one:.2f}" for one in seconds))
    return table
