"""Rates of every replica between two looks at a cluster, and their table."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

_NONE = "–"
_MOST_CHARS = 13
"""Longest id in the table, in characters, so that the table fits into 80 columns."""
_HEADINGS = (
    "replica",
    "running",
    "waiting",
    "tokens\n/s",
    "steps\n/s",
    "accepted",
    "tokens\n/step",
    "KV\nused",
    "drafts\nby",
)
_CAPTION = "drafts by: drafters that answer, or the target itself; vN: learned version"
_LEARNING_HEADINGS = ("replica", "learned\nversion", "texts\nseen", "last training,\ntokens/step")
_OVER_TIME = "tokens/step\nsince top began"
_MOST_LOOKS, _MOST_POINTS = 3600, 16
_BARS = "▁▂▃▄▅▆▇█"
_DRAFTER_HEADINGS = ("drafter", "drafts for", "state", "sequences", "drafted\n/s", "busy")


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """What a drafter does for a replica now. Rates are over the time between two looks."""

    id: str
    is_available: bool
    """Whether the replica waits for its drafts: it has not failed."""
    sequences: int
    """Number of sequences that it drafts for."""
    drafted_per_second: float
    """Drafted tokens that it proposed."""
    busy: float
    """Average number of calls to it under way."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a replica does now. Rates are over the time between two looks; shares are `None` where nothing happened."""

    id: str
    model: str
    running: int
    """Number of sequences that run."""
    waiting: int
    """Number of sequences that wait."""
    tokens_per_second: float
    """Tokens sent to clients."""
    steps_per_second: float
    """Forward passes of the target."""
    acceptance: float | None
    """Share of drafted tokens that were accepted."""
    tokens_per_step: float | None
    """Tokens that one step added to a sequence, on average."""
    kv_usage: float
    """Used share of the KV blocks."""
    prefix_hit_rate: float | None
    """Share of the tokens of new sequences that the prefix cache had, since the start."""
    drafters: Mapping[str, int] = field(default_factory=dict)
    """Number of drafters by state; empty if drafts come from the target."""
    drafting: tuple[DrafterStatus, ...] = ()
    """The drafters that draft for it."""
    lossless: bool = True
    """Whether answers are exactly those of the target alone."""
    draft_version: int = 0
    """Highest number among the versions of the draft that were learned from served texts; 0 for none."""
    learned_texts: int = 0
    """Number of texts that were collected to learn from."""
    tokens_per_step_before: float | None = None
    """Tokens per step on held-back texts with the weights before the last training; `None` before the first one."""
    tokens_per_step_after: float | None = None
    """Tokens per step on held-back texts with the weights of the last training, which serve only if they are better."""

    def values(self) -> dict[str, Any]:
        """Return the status for JSON."""
        return asdict(self)


class TokensPerStep:
    """Tokens per step of each replica over the last 3,600 looks at most, as a line of 16 bars at most."""

    def __init__(self) -> None:
        self._found: dict[str, deque[float]] = {}

    def add(self, found: Sequence[ReplicaStatus]) -> None:
        """Add a look. A replica that decided nothing since the last one adds nothing; one that is gone is forgotten."""
        self._found = {one.id: self._found.get(one.id, deque(maxlen=_MOST_LOOKS)) for one in found}
        for one in found:
            if one.tokens_per_step is not None:
                self._found[one.id].append(one.tokens_per_step)

    def line(self, replica: str) -> str:
        """The means of equal parts of the looks, from the lowest bar to the highest, and the range of these means."""
        looks = list(self._found.get(replica, ()))
        if not looks:
            return _NONE
        count = min(len(looks), _MOST_POINTS)
        edges = [len(looks) * index // count for index in range(count + 1)]
        means = [sum(looks[low:high]) / (high - low) for low, high in pairwise(edges)]
        least, most = min(means), max(means)
        bars = (_BARS[int((len(_BARS) - 1) * (one - least) / max(1e-9, most - least))] for one in means)
        return f"{''.join(bars)} {least:.2f}–{most:.2f}"


def statuses(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]], seconds: float
) -> list[ReplicaStatus]:
    """Return the status of every replica of the second look. Both looks are answers of `GET /cluster`."""
    earlier = {replica["id"]: replica for replica in before}
    return [_status(earlier.get(replica["id"], replica), replica, seconds) for replica in after]


def tables(found: Sequence[ReplicaStatus], problem: str = "", history: TokensPerStep | None = None) -> Group:
    """Return the table of replicas, and below it who drafts for whom and what drafts have learned, where any do.

    With a `history`, what drafts have learned is beside the tokens per step over time.
    """
    shown = [status_table(found, problem)]
    if any(one.drafting for one in found):
        shown.append(drafter_table(found))
    if any(_learns(one) for one in found):
        shown.append(learning_table(found, history))
    return Group(*shown)


def learning_table(found: Sequence[ReplicaStatus], history: TokensPerStep | None = None) -> Table:
    """Return a table with one row per replica whose draft learns."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in (*_LEARNING_HEADINGS, *([] if history is None else [_OVER_TIME])):
        table.add_column(heading, justify="left" if heading == "replica" else "right", vertical="bottom")
    for one in filter(_learns, found):
        before, after = one.tokens_per_step_before, one.tokens_per_step_after
        table.add_row(
            Text(_short(one.id or one.model), "bold"),
            str(one.draft_version or _NONE),
            str(one.learned_texts),
            _NONE if before is None or after is None else f"{before:.2f} → {after:.2f}",
            *([] if history is None else [history.line(one.id)]),
        )
    return table


def _learns(one: ReplicaStatus) -> bool:
    return bool(one.draft_version or one.learned_texts)


def drafter_table(found: Sequence[ReplicaStatus]) -> Table:
    """Return a table with one row per drafter and replica that it drafts for, ordered by drafter."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in _DRAFTER_HEADINGS:
        is_text = heading in _DRAFTER_HEADINGS[:3]
        table.add_column(heading, justify="left" if is_text else "right", vertical="bottom")
    pairs = sorted(((drafter, one) for one in found for drafter in one.drafting), key=lambda pair: pair[0].id)
    before = ""
    for drafter, one in pairs:
        table.add_row(
            Text(_short(drafter.id) if drafter.id != before else "", "bold"),
            _short(one.id or one.model),
            Text("answers" if drafter.is_available else "failed", "" if drafter.is_available else "red"),
            str(drafter.sequences),
            f"{drafter.drafted_per_second:.1f}",
            _percent(drafter.busy),
        )
        before = drafter.id
    return table


def status_table(found: Sequence[ReplicaStatus], problem: str = "") -> Table:
    """Return a table with one row per replica, and with a last one of their sums if there are several."""
    table = Table(
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        title=problem or None,
        title_style="bold red",
        caption=_CAPTION,
        pad_edge=False,
    )
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "replica" else "right", vertical="bottom")
    for one in found:
        table.add_row(
            Text(_short(one.id or one.model), "bold" if one.lossless else "bold red"),
            str(one.running),
            Text(str(one.waiting), "yellow" if one.waiting else ""),
            f"{one.tokens_per_second:.1f}",
            f"{one.steps_per_second:.1f}",
            _percent(one.acceptance),
            _NONE if one.tokens_per_step is None else f"{one.tokens_per_step:.2f}",
            Text(_percent(one.kv_usage), "red" if one.kv_usage > 0.9 else ""),
            _drafted_by(one),
        )
    if len(found) > 1:
        running, waiting = sum(one.running for one in found), sum(one.waiting for one in found)
        tokens, steps = sum(one.tokens_per_second for one in found), sum(one.steps_per_second for one in found)
        table.add_section()
        table.add_row(f"{len(found)} replicas", str(running), str(waiting), f"{tokens:.1f}", f"{steps:.1f}")
    return table


def _drafters(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> Iterator[DrafterStatus]:
    """The drafters of a replica at the second look. A server of an earlier version names none."""
    earlier = {drafter["id"]: drafter for drafter in before.get("drafting", ())}
    for drafter in after.get("drafting", ()):
        first = earlier.get(drafter["id"], drafter)
        drafted, busy = (
            max(0.0, drafter[name] - first[name]) / seconds for name in ("proposed_tokens_total", "busy_seconds_total")
        )
        is_available = bool(drafter["available"])
        yield DrafterStatus(drafter["id"], is_available, int(drafter["sequences"]), drafted, busy)


def _status(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> ReplicaStatus:
    def added(name: str) -> float:
        """How much a counter has grown. One that has begun again counts from 0."""
        now = float(after[name])
        return now - float(before[name]) if now >= before[name] else now

    return ReplicaStatus(
        id=after["id"],
        model=after["model"],
        running=int(after["running"]),
        waiting=int(after["waiting"]),
        tokens_per_second=added("generation_tokens_total") / seconds,
        steps_per_second=added("steps_total") / seconds,
        acceptance=_share(added("accepted_tokens_total"), added("drafted_tokens_total")),
        tokens_per_step=_share(added("committed_tokens_total"), added("verdicts_total")),
        kv_usage=float(after["kv_usage"]),
        prefix_hit_rate=_share(after["prefix_hits_total"], after["prefix_queries_total"]),
        drafters=dict(after["drafters"]),
        drafting=tuple(_drafters(before, after, seconds)),
        lossless=bool(after["lossless"]),
        draft_version=int(after.get("draft_version", 0)),
        learned_texts=int(after.get("draft_learned_texts", 0)),
        tokens_per_step_before=after.get("draft_tokens_per_step_before") or None,
        tokens_per_step_after=after.get("draft_tokens_per_step_after") or None,
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.0f} %"


def _drafted_by(one: ReplicaStatus) -> str:
    """Who drafts for a replica: so many drafters of its own, the process of its target, or nobody."""
    available, failed = one.drafters.get("available", 0), one.drafters.get("failed", 0)
    if available or failed:
        return f"{available} of {available + failed}" if failed else str(available)
    if one.drafters:
        return _NONE
    if one.draft_version:
        return f"target v{one.draft_version}"
    return _NONE if one.acceptance is None else "target"


def _short(name: str) -> str:
    """The end of a long id, which tells replicas apart."""
    return name if len(name) <= _MOST_CHARS else f"…{name[1 - _MOST_CHARS :]}"
