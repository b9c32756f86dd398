"""The benchmarks' and the soak's own arithmetic: figures, floors and verdicts, without measuring anything."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cluster.core.config import Configuration, DraftSection, TargetSection
from cluster.core.errors import ConfigurationError, NotReady
from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import generation_pb2
from tests.bench import clusters, options, overlap, prefix, speculation, theory
from tests.bench.__main__ import SECTIONS
from tests.bench.agreement import Agreement, agreement
from tests.bench.client import Answer, Answers
from tests.bench.decoding import Decoding
from tests.bench.machine import weight_bytes
from tests.bench.options import Options
from tests.bench.report import percentile, ratios, spread
from tests.bench.role_process import Role, living
from tests.bench.tasks import CONVERSATION, read_tasks
from tests.soak.asks import KINDS, MOST_TOKENS, Ask, Catalogue
from tests.soak.reference import Reference
from tests.soak.traffic import Findings, Traffic
from tests.soak.watch import Resident
from tests.support import tiny, tiny_tokenizer
from workers.draft.registry import create
from workers.serve.worker_server import host_draft
from workers.verify.build import build_engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("bench"), tiny.llama())


def section(directory: Path, **changes: object) -> TargetSection:
    return TargetSection.model_validate(
        {"path": str(directory), "device": "cpu", "kv": {"pool_bytes": 1 << 20}, "compile": "off"} | changes
    )


def test_a_figure_carries_its_spread() -> None:
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0–3.0)"
    assert spread([2.346]) == "2.35"


def test_a_ratio_is_of_neighbours() -> None:
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.01) == 7.0


def test_growth_is_the_exponent() -> None:
    assert prefix.growth({m: [3.0 * m**2] for m in (8, 16, 32, 64)}) == pytest.approx(2.0)


def test_gaps_lie_between_tokens() -> None:
    answer = Answer(1.0, [5, 6, 7], [1.5, 1.75, 2.5])
    assert answer.first_token_seconds == 0.5
    assert answer.gaps == [0.25, 0.75]


def test_a_step_reads_each_weight_once(directory: Path, tmp_path: Path) -> None:
    whole = weight_bytes(section(directory))
    embeddings = 4 * tiny.VOCABULARY * 48
    assert weight_bytes(section(directory), read_by_a_step=True) == whole - embeddings
    assert weight_bytes(section(directory, dtype="bfloat16")) == whole // 2
    tied = tiny.save(tmp_path, tiny.llama(tie_word_embeddings=True))
    assert weight_bytes(section(tied), read_by_a_step=True) == weight_bytes(section(tied)) == whole - embeddings


def test_int8_weights_take_a_byte_each(directory: Path) -> None:
    linear = weight_bytes(section(directory), read_by_a_step=True) // 4 - 48 * (2 * 2 + 1)  # without the norms
    assert weight_bytes(section(directory, quantization="int8"), read_by_a_step=True) == linear + 4 * 48 * (2 * 2 + 1)


def test_prompts_of_any_number_are_distinct() -> None:
    assert len(set(options.own_prompts(60))) == 60


def spec_bench(file: Path, *rows: tuple[str, str]) -> Path:
    file.write_text("\n".join(json.dumps({"category": category, "turns": [turn]}) for category, turn in rows))
    return file


def test_the_first_of_every_category_comes_before_the_second(tmp_path: Path) -> None:
    """MT-bench's categories are one task."""
    file = spec_bench(
        tmp_path / "spec.jsonl", ("writing", "w1"), ("writing", "w2"), ("qa", "q1"), ("coding", "c1"), ("qa", "q2")
    )
    assert read_tasks(file, 2) == {CONVERSATION: ["w1", "c1"], "question answering": ["q1", "q2"]}
    assert read_tasks(file, 9)[CONVERSATION] == ["w1", "c1", "w2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "needed a readable JSONL file; .*No such file"),
        ("", "at least one line"),
        ('{"turns": ["a"]}\n{', "line 2: needed JSON"),
        ('{"turns": []}', "line 1: turns: needed at least one text"),
        ("[1]", "line 1: needed an object"),
        ('{"system": "a"}', "at least one question, found system messages alone"),
    ],
)
def test_prompts_that_cannot_be_read_are_told_by_file_and_line(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "spec.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_tasks(file, 1)
    assert str(file) in str(caught.value)


def test_theory_knows_its_limits() -> None:
    assert theory.expected_tokens(0.0, 4) == 1
    assert theory.expected_tokens(1.0, 4) == 5
    assert theory.expected_tokens(0.8, 4) == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)
    assert theory.serial_speedup(0.8, 4, 0.0, 0.0) == theory.overlapped_speedup(0.8, 4, 0.0, 0.0)
    assert theory.serial_speedup(1.0, 4, 0.25, 0.5) == 5 / 2.5
    assert theory.overlapped_speedup(1.0, 4, 0.25, 0.5) == 5 / 1.5
    assert theory.overlapped_speedup(1.0, 4, 1.0, 0.5) == 5 / 4


def test_an_answers_own_time_begins_with_its_question_and_decoding_with_its_first_tokens() -> None:
    first = Answer(0.0, [1, 2, 3, 4], [1.0, 1.0, 2.0, 3.0], steps=3, first_tokens=2)
    second = Answer(1.0, [1, 2], [2.0, 4.0], steps=1, first_tokens=1)
    answers = Answers([first, second], seconds=4.0)
    assert (answers.rate, answers.committed_per_step) == (1.5, 1.5)
    assert answers.own_rate == 6 / (3 + 3)
    assert answers.decoding_rate == 3 / (2 + 2)
    assert answers.part(slice(1, 2)).own_rate == 2 / 3


def test_what_is_asked_for_is_stronger_than_what_a_section_wants(directory: Path) -> None:
    wished = [f"target.path={directory}", "draft.mode=serial"]
    _, asked = options.parse(SECTIONS, ["overlap", *(part for wish in wished for part in ("--set", wish))])
    configuration = asked.based_on("draft.mode=run_ahead", "draft.method=synthetic")
    assert (configuration.draft.mode, configuration.draft.method) == ("serial", "synthetic")


async def test_agreement_is_of_first_guesses_with_the_text_itself() -> None:
    """Prompt lookup knows a text that repeats itself, and nothing else."""
    method = create("ngram", DraftSection(), TargetSection())
    prompt, text = (5, 6, 7, 8, 5, 6), (7, 8, 5, 6, 9, 9)
    async with host_draft("127.0.0.1", method) as host:
        found = await agreement(host.address, [prompt, (3,)], [text, (4,)])
    assert found == Agreement(4, 7)


def test_a_process_tells_what_it_did_and_why_it_ended() -> None:
    configuration = Configuration(draft=DraftSection(method="ngram"))
    with clusters.draft(configuration, clusters.all_cores()[:1]) as process:
        assert process.address.startswith("127.0.0.1:")
        told = process.tell()
    assert told["busy_seconds"] == 0
    assert told["wall_seconds"] > 0
    with pytest.raises(RuntimeError, match="Invalid argument"), clusters.draft(configuration, cores=()):
        pass


def test_a_role_travels_as_it_is() -> None:
    role = Role("front", Configuration().model_dump_json(), (0, 1), 2, "a:1", ("b:2", "c:3"))
    assert Role.from_json(role.to_json()) == role


@pytest.fixture(scope="module")
def spec_bench_options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """The smallest models and prompts that a section takes."""
    target = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    tiny.save(target, tiny.llama(vocab_size=320))
    draft = tiny.blur(target, tmp_path_factory.mktemp("draft"), noise=0.05)
    prompts = spec_bench(tmp_path_factory.mktemp("prompts") / "spec.jsonl", ("qa", "hello"), ("rag", "fish swim"))
    wishes = (f"target.path={target}", "target.kv.pool_bytes=4194304", "draft.kv.pool_bytes=4194304")
    assigned = [part for wish in wishes for part in ("--set", wish)]
    return options.parse(SECTIONS, ["--quick", "--prompts", str(prompts), "--draft", str(draft), *assigned])[1]


class Thread:
    """A role's process, without the process: all live on one event loop beside the test."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, role: Role) -> None:
        self._living = living(role)

    def __enter__(self) -> Thread:
        self.address, self.tell = self._run(self._living.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._living.__aexit__(None, None, None))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Thread.loop = asyncio.new_event_loop()
    thread = threading.Thread(target=Thread.loop.run_forever)
    thread.start()
    monkeypatch.setattr(clusters, "Process", Thread)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    yield
    Thread.loop.call_soon_threadsafe(Thread.loop.stop)
    thread.join()
    Thread.loop.close()


@pytest.mark.usefixtures("threads")
def test_speculation_shows_every_table(spec_bench_options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    speculation.run(spec_bench_options)
    shown = capsys.readouterr().out
    for words in (
        "| question answering |",
        "| overall |",
        "sampled |",
        "| ngram | 4 |",
        "| draft model | 4 |",
        "once more | 4 |",
    ):
        assert words in shown
    assert "8 of 8" in shown
    assert not [line for line in shown.splitlines() if "0 of" in line]


@pytest.mark.usefixtures("threads")
def test_speculation_in_batches_alone_opens_no_house_for_one(
    spec_bench_options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    speculation.run(replace(spec_bench_options, batches=(4,)))
    shown = capsys.readouterr().out
    assert "| draft model | 4 |" in shown
    assert "batch 1" not in shown


@pytest.mark.usefixtures("threads")
def test_overlap_shows_every_table_and_what_is_not_lossless(
    spec_bench_options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    overlap.run(spec_bench_options)
    shown = capsys.readouterr().out
    for words in ("| enumerate | 1 |", "| enumerate, alternating halves | 8 |", "| 0.8 | 0.1 | 3.36 |"):
        assert words in shown
    assert shown.index("NOT LOSSLESS") < shown.index("| α | c |")


def test_sections_are_chosen_by_name() -> None:
    assert options.parse(SECTIONS, [])[0] == list(SECTIONS)
    names, asked = options.parse(SECTIONS, ["step", "--quick", "--set", "draft.method=none"])
    assert (names, asked.repeats, asked.assignments) == (["step"], 1, ("draft.method=none",))
    assert options.parse(SECTIONS, ["speculation", "--batches", "4,8,4"])[1].batches == (4, 8)
    for wrong in (["sleep"], ["--batches", "0"], ["--batches", "4;8"]):
        with pytest.raises(SystemExit):
            options.parse(SECTIONS, wrong)


def test_a_stepped_engine_says_what_the_model_says(directory: Path) -> None:
    """However many guesses ride along, and in however many chunks the prompt came."""
    texts = []
    for chunk, queries in ((64, 1), (3, 1), (64, 8)):
        engine = build_engine(section(directory))
        decoding = Decoding(engine, chunk)
        assert decoding.add("a", range(3, 20)) > 0
        while len(decoding.text("a")) < 30:
            decoding.step(queries)
        texts.append(decoding.text("a")[:30])
        decoding.clear()
        assert engine.info().kv.blocks_free == engine.info().kv.blocks_total
    assert texts == [texts[0]] * 3


def test_a_catalogue_holds_every_kind_and_is_its_seeds() -> None:
    phrases = [range(3, 12), range(20, 27)]
    first, again, other = (Catalogue(phrases, KINDS, 48, seed).asks for seed in (1, 1, 2))
    assert first == again != other
    assert Counter(asked.kind for asked in first) == {kind: 3 * share for kind, share in KINDS.items()}
    for asked in first:
        assert asked.prompt
        assert len(asked.prompt) + asked.max_tokens <= MOST_TOKENS
        assert asked.message("name").token_ids.ids == list(asked.prompt)
    assert {asked.kind for asked in Catalogue(phrases, ("short",), 9, 0).asks} == {"short"}


def test_rounding_excuses_nothing_larger_than_its_bound(directory: Path) -> None:
    """Swapping two tokens of close scores is excused; another token is not, and more tokens are not."""
    asked = Ask("short", tuple(range(5, 15)), 6, temperature=1.0, seed=3)
    strict, lenient = Reference(directory, 1e-3), Reference(directory, 200.0)
    (own,) = strict.answers(asked)
    swapped = (*own[:2], (own[2] + 1) % tiny.VOCABULARY, *own[3:])
    assert not strict.is_near(asked, 0, swapped)
    assert lenient.is_near(asked, 0, swapped)
    assert not lenient.is_near(asked, 0, (*own, 5))


def test_several_answers_are_single_ones_with_seeds_of_their_own(directory: Path) -> None:
    asked = Ask("several", tuple(range(5, 15)), 6, temperature=1.0, seed=3, n=3)
    reference = Reference(directory, 1e-3)
    singles = [reference.answers(replace(asked, n=1, seed=3 + index))[0] for index in range(3)]
    assert list(reference.answers(asked)) == singles
    assert len(set(singles)) > 1


def test_beams_are_compared_by_their_scores(directory: Path) -> None:
    asked = Ask("beams", tuple(range(5, 15)), 6, n=2, width=3)
    reference = Reference(directory, 1e-3)
    best, second = reference.answers(asked)
    assert reference.is_near(asked, 0, best)
    assert not reference.is_near(asked, 0, second)


class Scripted:
    """A client whose server answers what it is told to, a token at a time."""

    def __init__(self, answers: Sequence[Sequence[int]], error: Exception | None = None) -> None:
        self._answers = answers
        self._error = error

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for index, answer in enumerate(self._answers):
            for token in answer:
                await asyncio.sleep(0)
                delta = generation_pb2.GenerationDelta(token_ids=[token])
                yield generation_pb2.GenerateResponse(index=index, delta=delta)
        if self._error is not None:
            raise self._error

    async def abort(self, request_id: str) -> bool:
        return True


async def findings_of(client: Scripted, asked: Ask, reference: Reference, seconds: float = 0.05) -> Findings:
    traffic = Traffic(cast(GenerationClient, client), (asked,), reference, at_once=2, seed=0)
    await traffic.run(seconds, pauses=0.0)
    return traffic.findings


async def test_traffic_tells_right_answers_from_wrong_ones(directory: Path) -> None:
    reference = Reference(directory, 1e-3)
    asked = Ask("several", tuple(range(5, 15)), 6, temperature=1.0, seed=3, n=2)
    first, second = reference.answers(asked)
    right = await findings_of(Scripted((first, second)), asked, reference)
    assert right.is_clean
    assert right.ended["several"] > 0
    for answers in ((second, first), (first, second[:-1]), (first, (*second, 5))):
        wrong = await findings_of(Scripted(answers), asked, reference)
        assert wrong.wrong > 0
        assert not wrong.is_clean
        assert wrong.complaints


async def test_a_failed_request_is_a_finding(directory: Path) -> None:
    reference = Reference(directory, 1e-3)
    asked = Ask("short", tuple(range(5, 15)), 6)
    failed = await findings_of(Scripted((), NotReady("away")), asked, reference)
    assert failed.failed > 0
    assert not failed.is_clean


def test_memory_is_judged_by_its_last_two_thirds() -> None:
    warming = Resident([float(second) for second in range(90)], [min(500.0, 400 + 10.0 * s) for s in range(90)])
    assert warming.growth() == pytest.approx(0.0, abs=1e-6)
    leaking = Resident([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [100.0, 101.0, 102.0, 103.0, 104.0, 105.0])
    assert leaking.growth() == pytest.approx(3600.0)
