"""The loss curve: loss and agreement over the time of a training."""

from __future__ import annotations

import io

from workers.distill.checkpoints import Progress


def loss_curve(progress: Progress, *, is_tokens: bool = False) -> bytes | None:
    """Draw the curve as a PNG. Returns `None` where matplotlib is not installed, which is optional.

    `is_tokens`: quality is measured in tokens per step, otherwise as a share of positions.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss = figure.add_subplot()
    loss.set_xlabel("minutes of training")
    loss.set_ylabel("divergence (nats per token)", color="tab:blue")
    loss.plot(
        [seconds / 60 for _, seconds, _ in progress.losses], [value for _, _, value in progress.losses], "tab:blue"
    )
    if progress.agreements:
        share = loss.twinx()
        label = "estimated tokens per step on held-out answers" if is_tokens else "agreement on held-out answers (%)"
        share.set_ylabel(label, color="tab:red")
        minutes = [seconds / 60 for _, seconds, _ in progress.agreements]
        share.plot(
            minutes, [value if is_tokens else 100 * value for _, _, value in progress.agreements], "o-", color="tab:red"
        )
        share.set_ylim(bottom=0)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    return picture.getvalue()
