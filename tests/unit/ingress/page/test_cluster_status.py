"""`GET /cluster` and `pilotfish top`: what replicas do, from their metrics."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rich.console import Console

from cluster.coordinator.metrics import DrafterStatus, Metrics
from cluster.core.errors import WorkerUnavailable
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.request import Commit
from cluster.core.tree import TokenTree
from cluster.core.verification import LearningStatus, StepResult, Verdict, VerifyRow
from cluster.ingress.endpoints.cluster_status import read_replicas
from cluster.ingress.router.metrics_text import merged
from cluster.speculation.observation import DraftTime, RoundDrafts, RoundRecord, RoundTimes
from deploy.commands.client.cluster_table import TokensPerStep, learning_table, status_table, statuses, tables
from deploy.commands.client.top import print_statuses, watch

ROUND = RoundRecord(
    (VerifyRow(SequenceId("a"), 9, (1,), TokenTree.chain((2, 3, 4, 5, 6))),),
    StepResult((Verdict(SequenceId("a"), 9, (2, 3, 9), 5),), KvOccupancy(9, 9), 0.1),
    RoundDrafts(),
    DraftTime(),
    RoundTimes(0.0, 0.0, 0.0, 0.1, 0.1),
)


def coordinator(running: int = 2, waiting: int = 1, verdicts: int = 4) -> Metrics:
    """Metrics of a coordinator whose verdicts each commit three tokens, two of five drafted ones among them."""
    metrics = Metrics()
    metrics.begin("tiny", True, lambda: running, lambda: waiting, lambda: 0.25)
    metrics.watch_drafters(
        lambda: {
            "draft-0123456789abcdef": DrafterStatus(True, 2, 10 * verdicts, 0.5 * verdicts),
            "draft-b": DrafterStatus(False),
            "draft-c": DrafterStatus(False),
        }
    )
    for _ in range(verdicts):
        metrics.decided([Commit(tokens=(1, 2, 3), drafted=5, accepted=2)])
        metrics.sent(3)
        metrics.round(ROUND)
    return metrics


EMPTY = read_replicas('vllm:num_requests_running{model_name="tiny"} 0\n')[0]
"""A replica that has done nothing."""


def test_the_version_of_a_draft_that_learns_is_shown() -> None:
    metrics = Metrics()
    metrics.begin("tiny", True, lambda: 2, lambda: 1, lambda: 0.25)  # without drafters: the target drafts
    learned = LearningStatus(version=3, clients=2, texts=70, taken=4, tokens_per_step_before=2.25, tokens_per_step=2.5)
    step = replace(ROUND.step, learning=learned)
    before = read_replicas(metrics.exposition()[0].decode())
    metrics.decided([Commit(tokens=(1, 2, 3), drafted=5, accepted=2)])
    metrics.round(replace(ROUND, step=step))
    exposition = metrics.exposition()[0].decode()
    (replica,) = found = read_replicas(exposition)
    assert (replica["draft_version"], replica["draft_learned_clients"], replica["draft_learned_texts"]) == (3, 2, 70)
    assert 'pilotfish:draft_trainings{engine="0",model_name="tiny",result="taken"} 4.0' in exposition
    assert 'pilotfish:draft_tokens_per_step{engine="0",model_name="tiny",weights="after"} 2.5' in exposition
    assert (replica["draft_tokens_per_step_before"], replica["draft_tokens_per_step_after"]) == (2.25, 2.5)
    (status,) = statuses(before, found, 1.0)
    assert (status.draft_version, status.learned_texts) == (3, 70)
    assert (status.tokens_per_step_before, status.tokens_per_step_after) == (2.25, 2.5)
    console = Console(file=io.StringIO(), width=80)
    console.print(tables([status]))
    row = console.file.getvalue().splitlines()[-2]  # type: ignore[attr-defined]
    assert row.split() == ["tiny", "3", "70", "2.25", "→", "2.50"]
    for one in (status, *statuses(found, found, 1.0)):  # while it drafts, and while nothing runs
        console = Console(file=io.StringIO(), width=80)
        console.print(status_table([one]))
        assert "target v3" in console.file.getvalue()  # type: ignore[attr-defined]


class TestTokensPerStepOverTime:
    """The line beside what a draft has learned, in `pilotfish top`."""

    def test_it_rises_from_the_lowest_bar_to_the_highest_whatever_the_number_of_looks(self) -> None:
        history, rising = TokensPerStep(), statuses([EMPTY], [EMPTY], 1.0)[0]
        for look in range(1000):
            history.add([replace(rising, tokens_per_step=1 + look / 1000)])
        bars, span = history.line("").split()
        assert (bars[0], bars[-1], len(bars)) == ("▁", "█", 16)
        assert bars == "".join(sorted(bars))
        assert span == "1.03–1.97"  # means of 62 or 63 looks

    def test_looks_without_a_decision_count_for_nothing_and_a_replica_that_left_is_forgotten(self) -> None:
        history, (one,) = TokensPerStep(), statuses([EMPTY], [EMPTY], 1.0)
        history.add([one])
        assert one.tokens_per_step is None and history.line("") == "–"
        history.add([replace(one, tokens_per_step=2.0)])
        assert history.line("") == "▁ 2.00–2.00"
        history.add([replace(one, id="another")])
        assert history.line("") == "–"

    def test_the_table_with_it_fits_into_eighty_columns(self) -> None:
        history, (one,) = TokensPerStep(), statuses([EMPTY], [EMPTY], 1.0)
        learned = replace(
            one, id="0a1b2c3d:target-0123456789", draft_version=120, learned_texts=123456, tokens_per_step=2.5,
            tokens_per_step_before=12.25, tokens_per_step_after=13.5,
        )  # fmt: skip
        for look in range(50):
            history.add([replace(learned, tokens_per_step=10.0 + look)])
        console = Console(file=io.StringIO(), width=80)
        console.print(learning_table([learned], history))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, text.splitlines())) <= 80
        assert "since top began" in text and history.line(learned.id) in text


def test_the_status_of_one_coordinator() -> None:
    (replica,) = read_replicas(coordinator().exposition()[0].decode())
    assert (replica["id"], replica["model"]) == ("", "tiny")
    assert (replica["running"], replica["waiting"], replica["kv_usage"]) == (2, 1, 0.25)
    assert (replica["drafted_tokens_total"], replica["accepted_tokens_total"]) == (20, 8)
    assert (replica["committed_tokens_total"], replica["verdicts_total"], replica["steps_total"]) == (12, 4, 4)
    assert replica["generation_tokens_total"] == 12
    assert replica["drafters"] == {"available": 1, "failed": 2}
    first, second, _ = replica["drafting"]
    assert first == {
        "id": "draft-0123456789abcdef",
        "available": 1,
        "sequences": 2,
        "proposed_tokens_total": 40,
        "busy_seconds_total": 2.0,
    }
    assert (second["id"], second["available"]) == ("draft-b", 0)


def test_a_drafter_that_has_left_is_not_shown() -> None:
    metrics, present = coordinator(), {"a": DrafterStatus(True, 1), "b": DrafterStatus(True, 3)}
    metrics.watch_drafters(lambda: present)
    assert len(read_replicas(metrics.exposition()[0].decode())[0]["drafting"]) == 2
    del present["a"]
    (replica,) = read_replicas(metrics.exposition()[0].decode())
    assert [(drafter["id"], drafter["sequences"]) for drafter in replica["drafting"]] == [("b", 3)]
    assert replica["drafters"] == {"available": 1, "failed": 0}


def test_the_status_of_several_coordinators() -> None:
    texts = {name: coordinator(running).exposition()[0] for name, running in (("a", 1), ("b", 5))}
    found = read_replicas(merged(texts).decode())
    assert {replica["id"]: replica["running"] for replica in found} == {"a": 1, "b": 5}


def test_a_text_without_known_series_has_no_replicas() -> None:
    assert read_replicas("answers_total 1\n") == []


def test_rates_are_those_between_two_looks() -> None:
    before = read_replicas(coordinator(verdicts=4).exposition()[0].decode())
    after = read_replicas(coordinator(verdicts=10).exposition()[0].decode())
    (status,) = statuses(before, after, 2.0)
    assert (status.tokens_per_second, status.steps_per_second) == (9.0, 3.0)
    assert (status.acceptance, status.tokens_per_step) == (0.4, 3.0)
    (idle,) = statuses(after, after, 2.0)
    assert (idle.tokens_per_second, idle.acceptance, idle.tokens_per_step) == (0.0, None, None)
    (restarted,) = statuses(after, before, 2.0)
    assert restarted.tokens_per_second == 6.0


def test_the_table_fits_into_eighty_columns() -> None:
    names = ("0a1b2c3d:target-0123456789", "second")
    found = read_replicas(merged({name: coordinator(99, 99).exposition()[0] for name in names}).decode())
    console = Console(file=io.StringIO(), width=80)
    console.print(status_table(statuses(found, found, 1.0)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("0123456789") == 1
    for word in ("running", "waiting", "accepted", "tokens", "/step", "drafts", "1 of 3", "2 replicas", "25 %"):
        assert word in text


def test_who_drafts_for_whom_is_a_row_for_each_pair_in_eighty_columns() -> None:
    names = ("0a1b2c3d:target-0123456789", "second")
    before, after = (
        read_replicas(merged({name: coordinator(verdicts=verdicts).exposition()[0] for name in names}).decode())
        for verdicts in (2, 4)
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(tables(statuses(before, after, 2.0)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    first = next(index for index, line in enumerate(lines) if "56789abcdef" in line)
    # 20 more drafted tokens and 1 second of calls in 2 seconds, for each of two replicas
    assert lines[first].split()[-5:] == ["answers", "2", "10.0", "50", "%"]
    assert "second" in lines[first + 1] and "abcdef" not in lines[first + 1]
    assert sum("failed" in line for line in lines) == 4


@pytest.mark.parametrize(("is_on_target", "shown"), [(True, "target"), (False, "–")])
def test_the_target_drafts_only_where_no_drafters_could(is_on_target: bool, shown: str) -> None:
    """A server without drafts has no drafter, and one may have lost all of its drafters."""
    metrics = Metrics()
    metrics.begin("tiny", True, lambda: 1, lambda: 0, lambda: 0.0)
    if not is_on_target:
        metrics.watch_drafters(dict)
    before = read_replicas(metrics.exposition()[0].decode())
    metrics.decided([Commit(tokens=(1, 2, 3), drafted=5, accepted=2)])
    metrics.round(ROUND)
    (status,) = statuses(before, read_replicas(metrics.exposition()[0].decode()), 1.0)
    assert status.acceptance == 0.4
    console = Console(file=io.StringIO(), width=80)
    console.print(status_table([status]))
    row = next(line for line in console.file.getvalue().splitlines() if "40 %" in line)  # type: ignore[attr-defined]
    assert row.split()[-1] == shown


def test_without_drafters_there_is_one_table() -> None:
    metrics = Metrics()
    metrics.begin("tiny", True, lambda: 0, lambda: 0, lambda: 0.0)
    found = read_replicas(metrics.exposition()[0].decode())
    console = Console(file=io.StringIO(), width=80)
    console.print(tables(statuses(found, found, 1.0)))
    assert "drafts for" not in console.file.getvalue()  # type: ignore[attr-defined]


async def test_q_ends_the_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = pty.openpty()
    looks = [read_replicas(coordinator().exposition()[0].decode()) for _ in range(2)]
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        async with answering(looks) as client, asyncio.timeout(10):
            watching = asyncio.create_task(watch(client, 60.0, Console(file=io.StringIO(), width=80)))
            await asyncio.sleep(0.1)
            os.write(controller, b"q")
            await watching
    os.close(controller)


async def test_q_ends_the_live_table_while_the_server_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = pty.openpty()
    silent, looks = asyncio.Event(), 0

    async def answer(_: httpx.Request) -> httpx.Response:
        nonlocal looks
        looks += 1
        if looks > 1:
            silent.set()
            await asyncio.Event().wait()
        return httpx.Response(200, json={"replicas": []})

    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        async with (
            httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://pilotfish") as client,
            asyncio.timeout(10),
        ):
            watching = asyncio.create_task(watch(client, 0.01, Console(file=io.StringIO(), width=80)))
            await silent.wait()
            os.write(controller, b"q")
            await watching
    os.close(controller)
    assert looks == 2


def answering(looks: list[list[dict[str, Any]]]) -> httpx.AsyncClient:
    """A client of a server that gives these answers to `GET /cluster`, one after the other."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/cluster"
        if not looks:
            return httpx.Response(403, json={"error": {"message": "needs the key of an operator"}})
        return httpx.Response(200, json={"replicas": looks.pop(0)})

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://pilotfish")


async def test_top_prints_json_once() -> None:
    looks = [read_replicas(coordinator(verdicts=count).exposition()[0].decode()) for count in (1, 7)]
    console = Console(file=io.StringIO(), width=40)
    async with answering(looks) as client:
        await print_statuses(client, 0.001, console, once=True, as_json=True)
    (replica,) = json.loads(console.file.getvalue())["replicas"]  # type: ignore[attr-defined]
    assert replica["acceptance"] == 0.4
    assert replica["tokens_per_second"] > 0
    assert replica["running"] == 2
    assert replica["drafting"][0]["drafted_per_second"] > 0


async def test_a_refusal_names_its_reason() -> None:
    async with answering([]) as client:
        with pytest.raises(WorkerUnavailable, match="403: needs the key of an operator"):
            await print_statuses(client, 0.001, Console(file=io.StringIO()), once=True, as_json=False)
