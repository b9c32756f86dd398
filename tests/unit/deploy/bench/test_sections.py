"""What the benchmark sections measure with, and the processes that they start."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftRow, Proposal
from deploy.signals import SIGNALLED
from tests.bench import __main__ as command
from tests.bench import drafting
from tests.bench.drafting import Passes
from tests.bench.processes import clusters
from tests.bench.processes.role_process import Distant, Role
from tests.bench.sections import round as round_section
from tests.bench.sections.prefix import new_prompts
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.configuration import load_configuration


def test_sigterm_ends_what_a_section_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section starts processes inside `with`, so that an exception ends them."""
    ended: list[bool] = []

    def run(_: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            ended.append(True)
            raise

    monkeypatch.setattr(sys, "argv", ["bench", "start"])
    monkeypatch.setattr(command, "describe", lambda: "a machine")
    monkeypatch.setattr(command.importlib, "import_module", lambda _: SimpleNamespace(run=run))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit, match=str(SIGNALLED)):
            command.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended


@pytest.mark.slow
def test_a_process_reports_its_drafting_and_its_errors() -> None:
    configuration = load_configuration({}, {"draft.method": "ngram"})
    with clusters.draft(configuration, clusters.all_cores()[:1]) as process:
        assert process.address.startswith("127.0.0.1:")
        assert process.draft_seconds() == 0
    with pytest.raises(RuntimeError, match="Invalid argument"), clusters.draft(configuration, cores=()):
        pass


@pytest.mark.slow
def test_a_target_drafts_on_a_core_of_its_own_and_reports_for_how_long(tmp_path: Path) -> None:
    directory = tiny_tokenizer.byte_level(tiny.save(tmp_path, tiny.llama(vocab_size=320)))
    target = {"path": str(directory), "device": "cpu", "compile": "off"}
    configuration = load_configuration(
        {
            "target": target | {"compile_directory": str(KEPT), "kv": {"pool_bytes": 1 << 20}},
            "draft": {"method": "ngram", "placement": "target", "controller": "off"},
            "server": {"grpc_port": 0, "http_port": 0},
        }
    )
    passes = Passes()
    with ExitStack() as stack:
        on_core = stack.enter_context(clusters.target(configuration, clusters.all_cores()[:1]))
        cluster = clusters.start_cluster(stack, configuration, on_core)
        drafting.measure(cluster, [(5, 6, 7, 8) * 4], 24, passes)
    assert passes.target_draft_seconds[0] > 0


async def test_a_distant_drafter_answers_later_by_two_messages() -> None:
    class Near:
        async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
            return ()

    near: Any = Near()
    begun = time.perf_counter()
    assert await Distant(near, 0.01).propose((), 1.0) == ()
    assert time.perf_counter() - begun >= 0.02


def test_a_role_survives_the_command_line() -> None:
    role = Role("coordinator", Configuration().model_dump_json(), (0, 1), 2, "a:1", ("b:2", "c:3"))
    assert Role.from_json(role.to_json()) == role


def test_the_parts_of_a_prompts_way_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The histograms hold sums over all rounds, so those of one prompt are the differences."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        body = json.loads(request.content)
        assert (body["model"], body["prompt"], body["max_tokens"]) == ("tiny", [5, 6, 7], 1)
        return httpx.Response(200, text="id: 1\ndata: {}\n\n")

    states = iter(
        [
            {"target_step": (1.0, 4), "round_overhead": (0.5, 4)},
            {"target_step": (1.25, 6), "round_overhead": (0.625, 6)},
        ]
    )
    monkeypatch.setattr(round_section, "histograms", lambda _: next(states))
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server") as client:
        times = round_section.first_token(client, "http://server", (5, 6, 7))
    assert (times["steps"], times["loop"]) == (250.0, 125.0)
    assert times["first"] == pytest.approx(times["steps"] + times["loop"] + times["rest"])


def test_no_prompt_that_is_asked_for_the_first_time_begins_like_an_earlier_one() -> None:
    """The prefix cache would have the beginning of a long one that a short one was before."""
    options: Any = SimpleNamespace(long_prompt=lambda length, which: (which,) * length)
    asked = [prompt for repeat in range(3) for prompt in new_prompts(options, (2, 5), repeat).values()]
    assert [len(prompt) for prompt in asked] == [2, 5] * 3
    assert len({prompt[0] for prompt in asked}) == len(asked)
