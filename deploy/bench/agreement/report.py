"""The tables of `pilotfish bench agreement`, and the τ and speed-up that they predict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from deploy.bench.agreement.positions import Agreement
from deploy.bench.report.tables import UNKNOWN, markdown_table, number


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A draft tree with the same number of children below every node."""

    width: int
    """Children of a node; 1 is a chain."""
    depth: int

    @property
    def nodes(self) -> int:
        """Number of drafted tokens."""
        return sum(self.width**level for level in range(1, self.depth + 1))

    def __str__(self) -> str:
        """For tables."""
        return f"chain of {self.depth}" if self.width == 1 else f"{self.width} children, {self.depth} deep"


def tau_on_texts(ranks: Sequence[Sequence[int]], tree: TreeShape) -> float:
    """τ of greedy decoding when the texts are the target's own: its rounds are repeated position by position.

    A drafted token is accepted where the target's token has a rank below the width of the tree.
    """
    rounds = sum(_rounds(row, tree) for row in ranks)
    return sum(map(len, ranks)) / rounds if rounds else 0.0


def tau_with_prompts(ranks: Sequence[Sequence[int]], tree: TreeShape) -> float:
    """Committed tokens per target step, if the step that reads the prompt decides each text's first token undrafted."""
    rounds = sum(1 + _rounds(row[1:], tree) for row in ranks)
    return sum(map(len, ranks)) / rounds if rounds else 0.0


def _rounds(row: Sequence[int], tree: TreeShape) -> int:
    position = rounds = 0
    while position < len(row):
        accepted = 0
        while accepted < tree.depth and position + accepted < len(row) and row[position + accepted] < tree.width:
            accepted += 1
        position += accepted + 1
        rounds += 1
    return rounds


def tau_of_rate(rate: float, depth: int) -> float:
    """τ of a chain whose tokens are accepted independently: (1 − α^(γ+1)) ÷ (1 − α) (Leviathan et al. 2023)."""
    return sum(rate**length for length in range(depth + 1))


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Mean times of rounds after the prompt, in seconds."""

    plain: float
    """A round of plain decoding: a step of the target and the rest."""
    drafted: float
    """A round with a draft tree."""
    waiting: float
    """The part of a round with a draft tree in which the coordinator waits for drafts."""

    def speedup(self, tau: float) -> float:
        """The predicted speed ÷ that of plain decoding, without prompts."""
        return tau * self.plain / self.drafted if self.drafted else 0.0


_WIDTHS = (1, 2, 4, 8)
_TREES = (
    *(TreeShape(1, depth) for depth in (1, 2, 4, 7)),
    *(TreeShape(2, depth) for depth in (1, 2, 3)),
    *(TreeShape(4, depth) for depth in (1, 2)),
)
_AGREEMENT_NOTE = (
    "Within k: the share of positions where the target's most probable token is among the draft's k most probable ones "
    "(within 1: both agree). Perplexities are per token of the text, the draft's without tokens that it cannot propose."
)
_PREDICTION_NOTE = (
    "τ, rounds: the rounds of greedy decoding, repeated on the text position by position; exact for such trees on the "
    "target's own greedy answers. τ, independent: (1 − α^(γ+1)) ÷ (1 − α) with the share within the tree's width as α. "
    "Speed-up: τ × a plain round ÷ a round with drafts, both without prompts and as measured with the configured "
    "tree; smaller trees take less time."
)
_MEASURED_NOTE = (
    "Predicted: the best of the trees above that fit, on the target's answers. τ counts the prompt's step, which "
    "decides the first token without drafts; the speed-up without prompts does not. The measured tree has no fixed "
    "shape."
)
ANSWERS = "the target's answers"
"""The name of what the target wrote, among the sources."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a cluster with the draft model measured, one answer at a time."""

    times: RoundTimes
    tau: float
    speedup: float
    """Tokens per second ÷ those of plain decoding before and after, prompts included."""
    token_speedup: float
    """Time per token after the first commit of plain decoding ÷ that with drafts."""
    exactness: str
    """Answers that are equal to plain decoding's, explained by rounding, and wrong."""


@dataclass(slots=True)
class AgreementReport:
    """A comparison of two models."""

    title: str
    max_nodes: int
    """Largest tree of the configuration."""
    max_depth: int
    temperature: float
    sources: dict[str, Agreement] = field(default_factory=dict)
    """The comparison by what was read: the texts of the file, the target's answers."""
    measured: Measured | None = None

    def to_json(self) -> str:
        """All figures."""
        return json.dumps(asdict(self), ensure_ascii=False)


def markdown(report: AgreementReport) -> str:
    """The whole report."""
    parts = [f"# Agreement of two models\n\n{report.title}", _agreement_table(report), _AGREEMENT_NOTE]
    parts += [_prediction_table(report), _PREDICTION_NOTE]
    if report.measured is not None:
        parts += [_measured_table(report, report.measured), _MEASURED_NOTE]
    return "\n\n".join(parts) + "\n"


def _agreement_table(report: AgreementReport) -> str:
    columns = (
        *("on", "positions", "perplexity of the target", "of the draft", "outside of the draft's vocabulary, %"),
        *(f"within {width}, %" for width in _WIDTHS),
        f"Σ min(p, q) at temperature {report.temperature:g}",
    )
    rows = [
        [
            name,
            str(found.positions),
            number(found.target_perplexity),
            number(found.draft_perplexity),
            number(100 * found.share_outside, 1),
            *(number(100 * found.share_within(width), 1) for width in _WIDTHS),
            number(found.overlap, 3),
        ]
        for name, found in report.sources.items()
    ]
    return markdown_table(columns, rows)


def _fits(report: AgreementReport, tree: TreeShape) -> bool:
    return tree.nodes <= report.max_nodes and tree.depth <= report.max_depth


def _prediction_table(report: AgreementReport) -> str:
    times = None if report.measured is None else report.measured.times
    rows: list[list[str]] = []
    for name, found in report.sources.items():
        for tree in _TREES:
            tau = tau_on_texts(found.ranks, tree)
            independent = tau_of_rate(found.share_within(tree.width), tree.depth)
            speedup = number(times.speedup(tau)) if times is not None and _fits(report, tree) else UNKNOWN
            rows.append([name, str(tree), str(tree.nodes), number(tau), number(independent), speedup])
    return markdown_table(("on", "tree", "nodes", "τ, rounds", "τ, independent", "predicted speed-up"), rows)


def _measured_table(report: AgreementReport, found: Measured) -> str:
    times, answers = found.times, report.sources.get(ANSWERS)
    ranks = () if answers is None else answers.ranks
    fitting = [tree for tree in _TREES if _fits(report, tree)] if ranks else []
    predicted = max((tau_with_prompts(ranks, tree) for tree in fitting), default=None)
    later = max((tau_on_texts([row[1:] for row in ranks], tree) for tree in fitting), default=None)
    rows = [
        [
            f"at most {report.max_nodes} nodes, {report.max_depth} deep",
            number(predicted),
            number(found.tau),
            number(None if later is None else times.speedup(later)),
            number(found.token_speedup),
            number(found.speedup),
            found.exactness,
            *(number(1e3 * value) for value in (times.plain, times.drafted, times.waiting)),
        ]
    ]
    columns = (
        *("tree", "predicted τ", "measured τ", "predicted speed-up", "measured speed-up without prompts"),
        *("measured speed-up with prompts", "equal / explained / wrong"),
        *("plain round, ms", "round with drafts, ms", "of which wait for drafts, ms"),
    )
    return markdown_table(columns, rows)
