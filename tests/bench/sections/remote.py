"""Drafting on the target's rank 0 against a drafter elsewhere, by the target's cost and the delay of the network.

Target and drafter are processes with a core each. On rank 0 the same drafts take the target's core; elsewhere they take
messages, which a coordinator delays. The crossing point is the delay up to which the drafter elsewhere is faster.
The bytes that reach a drafter are counted on a socket: where its first matrix is applied to the hidden states on rank
0, one feature of each token crosses, and otherwise the states of all taps.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftRow, Evidence, HiddenStates
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from deploy.implied_settings import with_implied_settings
from deploy.settings import load_settings
from tests.bench import drafting
from tests.bench.drafting import Passes
from tests.bench.options import Options
from tests.bench.processes import clusters
from tests.bench.report import heading, ratios, spread, table, write
from tests.support.clusters.drafter_bytes import BUDGET, sent_bytes, shown_rows

METHODS = ("model", "block")
"""A draft model drafts ahead while the target verifies; a block takes one pass when it is asked."""
FACTORS, QUICK_FACTORS = (1, 3, 10), (1,)
"""Costs of the target, in units of the model's own."""
DELAYS, QUICK_DELAYS = (0.0, 0.002, 0.01), (0.0, 0.01)
"""Delays of a message, in seconds."""
PROMPTS = 4
SHOWN = 16
"""Tokens after the prompt whose bytes are counted."""
WIDTH_8B, TAPS_8B = 4096, 5
"""Hidden size of Llama-3.1-8B and of Qwen3-8B, and the taps of a DFlash drafter."""
ROOM = (
    "target.kv.prefix_cache=false",
    "target.kv.pool_bytes=268435456",
    "draft.model.kv.pool_bytes=134217728",
    "scheduler.max_sequences=4",
)


def run(options: Options) -> None:
    """Measure and report."""
    heading("Remote: drafting on rank 0 against a drafter elsewhere")
    delays = QUICK_DELAYS if options.quick else DELAYS
    rows = [
        _row(options, method, factor, delays)
        for factor in (QUICK_FACTORS if options.quick else FACTORS)
        for method in options.variants or METHODS
    ]
    shown = [f"elsewhere ÷ rank 0, {1e3 * delay:g} ms" for delay in delays]
    table(("drafts, target's cost", "cost ratio", "rank 0 ÷ plain", *shown, "crossing, ms", "equal to plain's"), rows)
    write(f"batch 1, greedy, {PROMPTS} prompts of {options.answer_tokens} tokens, without the time of the prompts;")
    write("cost ratio: time of a proposal on rank 0 ÷ a plain round; crossing: see `crossing`")
    _report_bytes(options)


def _report_bytes(options: Options) -> None:
    """Count the bytes that a token costs on the way to a drafter, for the shipped EAGLE head and in an 8B shape."""
    settings = ("draft.method=eagle", "draft.placement=drafter", "target.kv.pool_bytes=67108864")
    target = with_implied_settings(options.configuration(*settings)).target
    evidence = target.evidence
    apart = target.model_copy(update={"evidence": evidence.model_copy(update={"fusion": None})})
    prompt = options.prompts(1)[0]
    shown = {
        "EAGLE head, features": shown_rows(target, prompt, SHOWN),
        f"EAGLE head, {len(evidence.taps)} taps": shown_rows(apart, prompt, SHOWN),
        "8B, features": _shaped_rows(WIDTH_8B),
        f"8B, {TAPS_8B} taps": _shaped_rows(TAPS_8B * WIDTH_8B),
    }
    table(("of each token", "bytes of states", "bytes sent"), [_byte_row(name, rows) for name, rows in shown.items()])
    write("one token in a call over gRPC, mean of the calls after the prompt's; no draft is verified")


def _shaped_rows(width: int) -> list[DraftRow]:
    """Rows of one token each, after the first, with hidden states of `width` values."""
    rows = [DraftRow(SequenceId("a"), 1, (1,), BUDGET, SequenceStart(1, SamplingParameters()))]
    for length in range(2, 2 + SHOWN):
        hidden = HiddenStates(length - 2, width, bytes(2 * width))
        rows.append(DraftRow(SequenceId("a"), length, (1,), BUDGET, evidence=(Evidence(length - 1, hidden=hidden),)))
    return rows


def _byte_row(name: str, rows: Sequence[DraftRow]) -> list[str]:
    sent = asyncio.run(sent_bytes(rows))[1:]
    states = [2 * hidden.width * len(hidden) for row in rows[1:] for one in row.evidence if (hidden := one.hidden)]
    return [name, f"{statistics.mean(states):,.0f}", f"{statistics.mean(sent):,.0f}"]


def crossing(delays: tuple[float, ...], seconds: list[float], bound: float) -> float | None:
    """The delay at which times that grow with the delay reach `bound`, in the unit of `delays`.

    It is interpolated between two delays, and beyond the last one extended by the line of the last two. `None` if the
    first time is above the bound already; infinite if the times do not grow. There must be two delays or more.
    """
    if seconds[0] >= bound:
        return None
    points = list(pairwise(zip(delays, seconds, strict=True)))
    ends = next((pair for pair in points if pair[1][1] >= bound), points[-1])
    (first, before), (last, after) = ends
    return first + (last - first) * (bound - before) / (after - before) if after > before else float("inf")


def as_text(delay: float | None) -> str:
    """A crossing point in milliseconds, for a table."""
    return "never faster" if delay is None else f"{1e3 * delay:.1f}"


def _row(options: Options, method: str, factor: int, delays: tuple[float, ...]) -> list[str]:
    """Measure plain decoding, drafts on rank 0 and drafts elsewhere in turn."""
    beside, apart = (_configuration(options, method, factor, place) for place in ("target", "drafter"))
    plain, local, remote = Passes(), Passes(), {delay: Passes() for delay in delays}
    prompts, cores = options.prompts(PROMPTS), clusters.all_cores()
    with ExitStack() as stack:
        drafter = stack.enter_context(clusters.draft(apart, cores[-1:]))
        targets = [stack.enter_context(clusters.target(one, cores[:1])) for one in (beside, apart)]
        on_rank_0 = clusters.start_cluster(stack, beside, targets[0], drafter)
        elsewhere = {delay: clusters.start_cluster(stack, apart, targets[1], drafter, delay) for delay in delays}
        for cluster in (on_rank_0, *elsewhere.values()):
            drafting.warm(cluster, prompts, options.answer_tokens, (1,))
        for _ in range(options.repeats):
            drafting.measure(on_rank_0, prompts, options.answer_tokens, plain, max_draft_tokens=0)
            drafting.measure(on_rank_0, prompts, options.answer_tokens, local)
            for delay, cluster in elsewhere.items():
                drafting.measure(cluster, prompts, options.answer_tokens, remote[delay])
    rates = {delay: _rates(passes) for delay, passes in remote.items()}
    times = [1 / statistics.median(found) for found in rates.values()]
    found = crossing(delays, times, 1 / statistics.median(_rates(local)))
    write(f"{method}, {factor} times the cost: τ {spread(local.committed)} on rank 0, {spread(remote[0.0].committed)}")
    return [
        f"{method}, × {factor}",
        spread(_cost_ratios(local, plain)),
        spread(ratios(_rates(local), _rates(plain))),
        *(spread(ratios(rate, _rates(local))) for rate in rates.values()),
        as_text(found),
        ", ".join(dict.fromkeys(passes.equal(plain) for passes in (local, *remote.values()))),
    ]


def _configuration(options: Options, method: str, factor: int, place: str) -> Configuration:
    path = load_settings(options.config, options.assignments).configuration.target.path
    return options.configuration(
        *ROOM,
        f"target.path={path}@x{factor}" if factor > 1 else f"target.path={path}",
        f"draft.method={method}",
        f"draft.placement={place}",
        "draft.controller=off",
        "draft.timeout_seconds=60",
    )


def _rates(passes: Passes) -> list[float]:
    return [answers.decoding_rate for answers in passes.answers]


def _cost_ratios(local: Passes, plain: Passes) -> list[float]:
    """Time of a proposal on rank 0 in units of a plain round, per repetition."""
    rounds = [sum(answer.steps for answer in answers.each) for answers in local.answers]
    drafted = zip(local.target_draft_seconds, rounds, _rates(plain), strict=True)
    return [seconds / count * rate for seconds, count, rate in drafted]
