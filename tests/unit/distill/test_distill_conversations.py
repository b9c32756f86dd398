"""One process lets the target answer prompts in large batches: which are answered together, and with which texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.core.errors import ConfigurationError
from cluster.generation.text.chat_messages import Message
from deploy.distillation import dspark, single_process
from deploy.distillation.conversations import AnswerPlan, BatchedTarget, Tokens, WritingPlan
from deploy.distillation.single_process_job import distill_in_one_process
from workers.distill.answers import Answer
from workers.distill.data import collect_answers
from workers.distill.options import DistillOptions
from workers.distill.prompts import Prompt, Task, read_prompts

MOST = 150


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def render_chat(self, messages: Sequence[Message]) -> str:
        return "".join(f"<{message.role}>{message.content}" for message in messages)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.encode(self.render_chat(messages))


def answered(tasks: Sequence[Task], *, rows: int = 8) -> tuple[list[list[Answer]], list[list[str]]]:
    """Batches of answers, and the prompts of each batch that the target writes after.

    It writes their last character, again and again.
    """
    batches: list[list[str]] = []

    def write(prompts: Sequence[tuple[int, ...]], *_: object) -> list[tuple[int, ...]]:
        batches.append(["".join(map(chr, prompt)) for prompt in prompts])
        return [prompt[-1:] * MOST for prompt in prompts]

    plan = AnswerPlan(MOST, 600, rows, ())
    batched = BatchedTarget(write, Letters(), plan)  # type: ignore[arg-type]
    return list(batched.answers(tasks)), batches


def task(line: int, turn: str | None, *, turn_pass: int = 0, system: str | None = None, held_out: bool = False) -> Task:
    prompt = Prompt("some", line, () if turn is None else (turn,), system, is_template="{" in (turn or ""))
    return Task(prompt, turn_pass, 0.0, 0, held_out)


def test_so_many_prompts_are_answered_together_and_the_longest_are_left_out() -> None:
    turns = ["a", "b" * 100, "c" * 600, "d"]

    found, batches = answered([task(line, turn) for line, turn in enumerate(turns)], rows=3)

    assert [[len(prompt) for prompt in batch] for batch in batches] == [[7, 106], [7]]
    assert [answer.key for batch in found for answer in batch] == [f"some:{line}:0:0:0" for line in (0, 1, 3)]


def test_templates_get_long_answers_and_what_they_answer() -> None:
    tasks = [task(0, "Who?"), task(1, "{document} {question}"), task(2, "Held!", held_out=True)]

    _, batches = answered([*tasks, task(3, "{document} {question}", turn_pass=1)], rows=3)

    assert batches == [["<user>Who?", "<user>Held!"], [f"<user>{'?' * MOST} Who?"]]


def test_a_held_out_template_waits_for_long_answers() -> None:
    """Held-out prompts come first, and once."""
    tasks = [task(0, "{document} {question}", held_out=True), task(1, "Who?"), task(2, "When?"), task(3, "Where?")]

    found, batches = answered(tasks, rows=2)

    assert batches == [["<user>Who?"], [f"<user>{'?' * MOST} Who?", "<user>When?"], ["<user>Where?"]]
    assert [answer.key for batch in found for answer in batch if answer.held_out] == ["some:0:0:0:0"]
    assert answered(tasks[:1])[1] == []  # no text is there


@pytest.mark.parametrize("name", ["prompts", "evaluated"])
def test_a_template_that_is_only_measured_on_is_measured(
    name: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of `--evaluate`, whose prompts are answered before all others."""
    questions = [{"question": f"Who is {number}?"} for number in range(9)]
    template = {"template": "Shorten: {document}"}
    files = {"prompts": [*questions, *([template] * 9 if name == "prompts" else [])], "evaluated": [template]}
    words = ["--target", str(directory), "--out", str(tmp_path / "out"), "--most-tokens", "4000", "--rows", "8"]
    words += ["--prompts", str(tmp_path / "prompts.jsonl"), "--held-out", "1", "--seed", "1"]
    words += ["--evaluate", str(tmp_path / "evaluated.jsonl")] if name == "evaluated" else []
    for file, rows in files.items():
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(single_process, "Tokenizer", SimpleNamespace(load=lambda _: Letters()))
    run = dspark.Run(dspark.options(words), lambda _: None)
    writer: Any = SimpleNamespace(writing=lambda: lambda prompts, *_: [prompt[-1:] * MOST for prompt in prompts])
    run.writer = writer

    texts = run.texts()

    measured = texts.measured["held out" if name == "prompts" else "evaluated"]
    assert any("Shorten: ???" in "".join(map(chr, one.prompt)) for one in measured)
    assert all(one.held_out for one in measured)


def test_prompts_that_are_too_long_to_measure_on_are_named_and_start_no_target(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question_id": 1, "category": "qa", "turns": ["Who?"]}]
    rows += [{"question_id": 2 + number, "category": "rag", "turns": ["a" * 1200]} for number in range(2)]
    (tmp_path / "evaluated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"question": "What?"}) + "\n")
    words = ["--target", str(directory), "--out", str(tmp_path / "out"), "--answers", str(tmp_path / "answers.jsonl")]
    words += ["--prompts", str(tmp_path / "prompts.jsonl"), "--evaluate", str(tmp_path / "evaluated.jsonl")]
    words += ["--write-seconds", "0"]
    monkeypatch.setattr(single_process, "Tokenizer", SimpleNamespace(load=lambda _: Letters()))
    told, started = list[str](), list[int]()

    def writing() -> Any:
        started.append(1)
        return lambda prompts, *_: [prompt[-1:] * MOST for prompt in prompts]

    for _ in range(2):
        run = dspark.Run(dspark.options(words), told.append)
        run.writer = cast(Any, SimpleNamespace(writing=writing))
        texts = run.texts()
        assert [one.category for one in texts.measured["evaluated"]] == ["qa"]

    named = "--evaluate: not measured on 2 of rag: longer than --max-length less --max-tokens, 1152 tokens"
    assert sum(line.endswith(named) for line in told) == 2
    assert len(started) == 1


def test_a_question_of_the_target_is_answered_without_its_system_message_in_every_second_pass() -> None:
    _, batches = answered([task(0, None, turn_pass=number, system="S") for number in range(2)])

    question = ">" * MOST
    assert batches == [["<system>S<user>"] * 2, [f"<system>S<user>{question}", f"<user>{question}"]]


def test_a_run_that_goes_on_draws_other_numbers_than_the_one_before() -> None:
    """The target writes the same questions again for the same system message and the same random numbers."""

    def seeds_of(*passes: int) -> list[int]:
        seeds: list[int] = []

        def write(prompts: Sequence[Tokens], _: object, plan: WritingPlan) -> list[Tokens]:
            seeds.append(plan.seed)
            return [prompt[-1:] * MOST for prompt in prompts]

        batched = BatchedTarget(write, Letters(), AnswerPlan(MOST, 600, 8, ()))  # type: ignore[arg-type]
        assert list(batched.answers([task(0, None, turn_pass=number) for number in passes]))
        return seeds

    first, second = seeds_of(0, 1), seeds_of(2, 3)

    assert first == seeds_of(0, 1)
    assert len({*first, *second}) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--slots", "1"), "--slots: 1 is refused; it must be within 2 and 256"),
        (
            ("--evaluate", "other/none"),
            "--prompts and --evaluate: files of the same name, none, are refused; answers are stored under their names",
        ),
        (("--blocks", "90", "--max-length", "64"), "--blocks: 90 is refused; it must be within 1 and 64"),
    ],
)
def test_an_option_out_of_bounds_is_refused_before_a_model_is_loaded(given: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        dspark.options(["--target", "none", "--prompts", "none", "--out", "none", *given])
    assert str(refused.value) == message


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
@pytest.mark.parametrize("name", ["mix_rank", "selector_rank"])
def test_an_option_of_another_kind_is_refused(kind: str, name: str) -> None:
    options: dict[str, Any] = {"kind": kind, "prompts": (Path(__file__),), "out": Path("out"), "steps": 1, name: 8}
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')}: refused for kind {kind}"):
        distill_in_one_process(SimpleNamespace(options=DistillOptions(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["layers", "heads", "block", "eagle", "exit", "table", "eagle3", "dspark"])
@pytest.mark.parametrize("equal", ["prompts", "evaluate"])
def test_files_of_the_same_name_are_refused_for_all_kinds(kind: str, equal: str) -> None:
    """Answers and hidden states of both would have the same keys, and those of one would be left out."""
    file, same = Path(__file__), Path("elsewhere") / Path(__file__).name
    given: dict[str, Any] = {"prompts": (file, same)} if equal == "prompts" else {"prompts": (file,), "evaluate": same}
    message = f"--prompts and --evaluate: files of the same name, {file.name}, are refused"

    with pytest.raises(ConfigurationError, match=message):
        DistillOptions(kind=kind, out=Path("out"), steps=1, **given)


@pytest.mark.parametrize("option", ["prompts", "evaluate"])
def test_templates_are_refused_for_kinds_whose_answers_are_no_documents(option: str, tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text('{"question": "Who?"}\n')
    (tmp_path / "template.jsonl").write_text('{"template": "{document}"}\n')
    names = {"prompts": "plain.jsonl", "evaluate": "other.jsonl"} | {option: "template.jsonl"}
    (tmp_path / "other.jsonl").write_text('{"question": "When?"}\n')
    prompts, evaluate = (tmp_path / names[each] for each in ("prompts", "evaluate"))
    options = DistillOptions(kind="heads", prompts=(prompts,), evaluate=evaluate, out=tmp_path / "out", steps=1)
    job: Any = SimpleNamespace(options=options)
    budget: Any = None

    with pytest.raises(ConfigurationError, match=f"--{option}: templates are refused for kind heads"):
        collect_answers(job, [read_prompts(prompts)], budget, is_frozen=True)


def test_answers_that_leave_no_room_for_a_prompt_are_refused() -> None:
    options = DistillOptions(kind="dspark", prompts=(Path(__file__),), out=Path("out"), steps=1, max_length=384)
    with pytest.raises(ConfigurationError, match="--max-tokens: 384 is refused; it must be below --max-length, 384"):
        distill_in_one_process(SimpleNamespace(options=options))  # type: ignore[arg-type]
