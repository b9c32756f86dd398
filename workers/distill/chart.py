"""The learning curve: loss and quality over the time of a training."""

from __future__ import annotations

import io

from workers.distill.checkpoints import Progress


def loss_curve(progress: Progress, *, is_tokens: bool = False) -> bytes | None:
    """Draw the curve as a PNG. Returns `None` where matplotlib is not installed, which is optional.

    The quality is the measured tokens per step where there are some. `is_tokens`: otherwise it is estimated in tokens
    per step, else as a share of positions.
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
        [seconds / 60 for _, seconds, _ in progress.losses],
        [value for _, _, value in progress.losses],
        ".-",
        color="tab:blue",
        markersize=4,
    )
    loss.tick_params(axis="y", labelcolor="tab:blue")
    if all(value >= 0 for _, _, value in progress.losses):  # that of dspark has a share subtracted
        loss.set_ylim(bottom=max(0.0, loss.get_ylim()[0]))
    loss.yaxis.set_visible(bool(progress.losses))
    label, points = _quality(progress, is_tokens=is_tokens)
    if points:
        quality = loss.twinx()
        quality.set_ylabel(label, color="tab:red")
        quality.plot([minutes for minutes, _ in points], [value for _, value in points], "s--", color="tab:red")
        quality.tick_params(axis="y", labelcolor="tab:red")
        quality.set_ylim(bottom=max(0.0, quality.get_ylim()[0]))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    return picture.getvalue()


def _quality(progress: Progress, *, is_tokens: bool) -> tuple[str, list[tuple[float, float]]]:
    """What the quality is, and its points (minutes, value)."""
    if progress.served:
        return "measured tokens per step, held-out prompts", [(entry[1] / 60, entry[-1]) for entry in progress.served]
    if is_tokens:
        found = "estimated tokens per step on held-out answers"
        return found, [(seconds / 60, value) for _, seconds, value in progress.agreements]
    return "agreement on held-out answers (%)", [
        (seconds / 60, 100 * value) for _, seconds, value in progress.agreements
    ]
