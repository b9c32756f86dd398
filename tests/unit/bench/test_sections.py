"""The benchmark sections that start processes, with tiny models: every table appears."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import httpx
import pytest
import torch

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.sections import Configuration
from cluster.core.config.target_section import TargetSection
from tests.bench import options
from tests.bench.__main__ import SECTIONS
from tests.bench.agreement import Agreement, agreement
from tests.bench.options import Options
from tests.bench.processes import clusters
from tests.bench.processes.role_process import Role, running_role
from tests.bench.sections import overlap, speculation
from tests.bench.sections import round as round_section
from tests.bench.sections.coordinator import loop
from tests.bench.sections.target import device
from tests.support.models import tiny, tiny_tokenizer
from tests.unit.bench.test_task_prompts import write_prompts
from workers.draft.registry import create
from workers.model import loading
from workers.serve.configuration import load_configuration
from workers.serve.worker_server import host_draft


async def test_agreement_compares_the_first_drafted_token_at_every_position() -> None:
    """Prompt lookup predicts only text that repeats itself."""
    method = create(DraftSection(method="ngram"), TargetSection())
    prompt, text = (5, 6, 7, 8, 5, 6), (7, 8, 5, 6, 9, 9)
    async with host_draft("127.0.0.1", method) as host:
        found = await agreement(host.address, [prompt, (3,)], [text, (4,)])
    assert found == Agreement(4, 7)


def test_a_process_reports_its_counters_and_its_errors() -> None:
    configuration = load_configuration({}, {"draft.method": "ngram"})
    with clusters.draft(configuration, clusters.all_cores()[:1]) as process:
        assert process.address.startswith("127.0.0.1:")
        counters = process.collect()
    assert counters["busy_seconds"] == 0
    assert counters["wall_seconds"] > 0
    with pytest.raises(RuntimeError, match="Invalid argument"), clusters.draft(configuration, cores=()):
        pass


def test_a_role_survives_the_command_line() -> None:
    role = Role("coordinator", Configuration().model_dump_json(), (0, 1), 2, "a:1", ("b:2", "c:3"))
    assert Role.from_json(role.to_json()) == role


@pytest.fixture(scope="module")
def spec_bench_options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Options with tiny models and two prompts."""
    target = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    tiny.save(target, tiny.llama(vocab_size=320))
    draft = tiny.blur(target, tmp_path_factory.mktemp("draft"), noise=0.05)
    prompts = write_prompts(tmp_path_factory.mktemp("prompts") / "spec.jsonl", ("qa", "hello"), ("rag", "fish swim"))
    assignments = (f"target.path={target}", "target.kv.pool_bytes=4194304", "draft.model.kv.pool_bytes=4194304")
    assigned = [part for assignment in assignments for part in ("--set", assignment)]
    return options.parse(SECTIONS, ["--quick", "--prompts", str(prompts), "--draft", str(draft), *assigned])[1]


class RoleThread:
    """A `RoleProcess` without the process: all roles run on one event loop in another thread."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, role: Role) -> None:
        self._living = running_role(role)

    def __enter__(self) -> RoleThread:
        self.address, self.collect = self._run(self._living.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._living.__aexit__(None, None, None))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    RoleThread.loop = asyncio.new_event_loop()
    thread = threading.Thread(target=RoleThread.loop.run_forever)
    thread.start()
    monkeypatch.setattr(clusters, "RoleProcess", RoleThread)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    yield
    RoleThread.loop.call_soon_threadsafe(RoleThread.loop.stop)
    thread.join()
    RoleThread.loop.close()


@pytest.mark.usefixtures("threads")
def test_speculation_shows_every_table(spec_bench_options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    speculation.run(spec_bench_options)
    shown = capsys.readouterr().out
    for words in ("| question answering |", "| overall |", "sampled |", "| draft and target on a core each, greedy |"):
        assert words in shown
    assert "2 of 2" in shown
    assert not [line for line in shown.splitlines() if "0 of" in line]


@pytest.mark.usefixtures("threads")
def test_overlap_shows_every_table_and_what_is_not_lossless(
    spec_bench_options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    overlap.run(spec_bench_options)
    shown = capsys.readouterr().out
    for words in ("| enumerate | 1 |", "| enumerate, alternating halves | 8 |", "| 0.8 | 0.1 | 3.36 |"):
        assert words in shown
    assert shown.index("NOT LOSSLESS") < shown.index("| α | c |")


def test_the_device_section_runs_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is left out: it takes most of the time of this section."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loading, "_compile_or_warn", lambda *_: None)
    assigned = ("target.kv.block_size=4", "target.kv.pool_bytes=1048576", "target.max_context_len=256")
    settings = [part for assignment in assigned for part in ("--set", assignment)]
    device.run(options.parse(SECTIONS, ["--quick", "--contexts", "16,1000", "--batches", "2", *settings])[1])
    shown = capsys.readouterr().out
    for words in (
        "| small | plain | 16 | 2 | 0 |",
        "| small | compiled | 16 | 2 | 4 |",
        "| small, one of 2 ranks | compiled, recorded | 16 | 2 | 4 |",
        "| small | plain | 64 |",
        "small, plain, 1000: 2 sequences do not fit",
        "FlexAttention is not used: it does not support these heads, or blocks of 4",
        "Not included: the time on the links between GPUs",
    ):
        assert words in shown
    replayed = {line.split("|")[2].strip() for line in shown.splitlines() if line.endswith("| 100% |")}
    assert replayed == {"compiled, recorded"}


def test_the_loop_section_measures_rounds_with_and_without_requests_that_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop.run(options.parse(SECTIONS, ["--quick"])[1])
    shown = capsys.readouterr().out
    for words in ("| 1 | 0 |", "| 8 | 100 |"):
        assert words in shown


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
