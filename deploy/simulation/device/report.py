"""The table of predicted steps."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.table import Table

from deploy.simulation.device.models import RankModel
from deploy.simulation.device.prediction import predict
from deploy.simulation.device.step import Rows, count_step

STEPS: dict[str, tuple[Rows, ...]] = {
    "decode 1 × 2k": (Rows(1, 2048),),
    "decode 8 × 2k": (Rows(8, 2048),),
    "decode 64 × 2k, top-p": (Rows(64, 2048, top_p=True),),
    "verify 64 × 8 at 2k": (Rows(64, 2048, nodes=7),),
    "prompt of 2k": (Rows(1, 0, fresh=2048),),
    "prompt of 16k": (Rows(1, 0, fresh=16384),),
    "decode 32 × 2k and a prompt chunk of 1k": (Rows(32, 2048), Rows(1, 1024, fresh=1024)),
}
"""The steps that are predicted, by name."""


def prediction_table(model: RankModel) -> Table:
    """One row per step of one rank of the model."""
    part = f", one rank of {model.ranks}" if model.ranks > 1 else ""
    table = Table(title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("step")
    for heading in ("kernels", "per\nlayer", "GB", "TFLOP", "predicted\nms", "floor\nms", "ratio", "sampling\nms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, rows in STEPS.items():
        step = count_step(model, rows)
        found = predict(step)
        kind = "bfloat16, experts in MXFP4" if model.has_mxfp4 else "bfloat16"
        compiled = "" if step.is_fused else ", layers compiled"
        table.title = f"{model.name}{part} in {kind} on H100{compiled}: predicted"
        table.add_row(
            name,
            str(len(step.kernels)),
            str(step.layer_kernels),
            f"{step.bytes / 1e9:.1f}",
            f"{step.flops / 1e12:.2f}",
            f"{1e3 * found.seconds:.2f}",
            f"{1e3 * found.floor_seconds:.2f}",
            f"{found.seconds / found.floor_seconds:.2f}",
            f"{1e3 * found.sampling_seconds:.2f}",
        )
    return table
