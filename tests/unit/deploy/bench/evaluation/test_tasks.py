"""Data files become tasks, whose answers are scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigurationError
from deploy.bench.evaluation.evaluate import read_suite, with_prompts
from deploy.bench.evaluation.tasks.arithmetic import read_arithmetic
from deploy.bench.evaluation.tasks.code import passes, program_of, read_code
from deploy.bench.evaluation.tasks.correction import read_correction
from deploy.bench.evaluation.tasks.spec_bench import read_spec_bench
from deploy.bench.evaluation.tasks.task import Task
from deploy.bench.evaluation.tasks.translation import read_translation
from deploy.bench.options import EvaluationOptions
from tests.unit.deploy.bench.evaluation.support import FUNCTION, write_jsonl


def scores(task: Task, *answers: str) -> dict[str, float]:
    return dict(task.score(task.examples, answers))


class TestTranslation:
    """Lines with a sentence in several languages."""

    rows = ({"fr": "Un homme dort.", "en": "A man is sleeping here.", "de": "Ein Mann schläft."},)

    def test_the_prompt_asks_in_a_sentence_or_is_the_source(self, tmp_path: Path) -> None:
        task = read_translation(write_jsonl(tmp_path, *self.rows), "fr-en", 8)
        (example,) = task.examples
        assert example.prompt(source_alone=True) == "Un homme dort."
        assert "from French to English" in example.prompt(source_alone=False)
        assert example.prompt(source_alone=False).endswith("\n\nUn homme dort.")
        assert scores(task, " A man is sleeping here.\n")["BLEU"] == pytest.approx(100)

    def test_the_pair_chooses_the_languages(self, tmp_path: Path) -> None:
        (example,) = read_translation(write_jsonl(tmp_path, *self.rows), "de-fr", 8).examples
        assert (example.source, example.references) == ("Ein Mann schläft.", ("Un homme dort.",))

    @pytest.mark.parametrize("pair", ["fr", "fr-fr", "fr-xx", ""])
    def test_a_wrong_pair_is_refused(self, pair: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"--languages: .* is refused"):
            read_translation(write_jsonl(tmp_path, *self.rows), pair, 8)

    def test_a_missing_field_is_named_with_its_line(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"--translation .*line 1: cs: needed a text"):
            read_translation(write_jsonl(tmp_path, *self.rows), "cs-en", 8)


class TestCorrection:
    """Lines with a sentence and corrected ones."""

    rows = (
        {"source": "He go .", "references": ["He goes .", "He went ."]},
        {"source": "I is .", "references": ["I am .", "I was ."]},
        {"source": "Left over .", "references": ["Left over ."]},
    )

    def test_exact_and_changed_answers_are_counted_in_words(self, tmp_path: Path) -> None:
        task = read_correction(write_jsonl(tmp_path, *self.rows), 1, 2)
        assert [example.prediction for example in task.examples] == ["He go .", "I is ."]
        found = scores(task, "He went.", "I is.")
        assert (found["exact, %"], found["changed, %"]) == (50, 50)
        assert found["GLEU (nltk)"] < 100
        assert scores(task, "He goes.", "I am.")["GLEU (nltk)"] == pytest.approx(100)

    def test_several_sentences_share_a_prompt_and_the_i_th_references_are_joined(self, tmp_path: Path) -> None:
        task = read_correction(write_jsonl(tmp_path, *self.rows), 2, 8)
        (example,) = task.examples  # the third sentence is left over
        assert (example.source, example.prediction) == ("He go . I is .", "He go . I is .")
        assert example.references == ("He goes . I am .", "He went . I was .")
        assert (task.name, task.max_tokens) == ("correction of 2 sentences", 128)

    def test_too_few_lines_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="needed 5 lines for one prompt, found 3"):
            read_correction(write_jsonl(tmp_path, *self.rows), 5, 1)


def test_arithmetic_compares_the_last_number(tmp_path: Path) -> None:
    row = {"question": "2 + 70?", "answer": "2+70=<<2+70=72>>72\n#### 72"}
    task = read_arithmetic(write_jsonl(tmp_path, row, row), 8)
    assert scores(task, "It is 72.0.", "72 or 73") == {"exact match, %": 50}
    with pytest.raises(ConfigurationError, match="answer: needed a number after ####"):
        read_arithmetic(write_jsonl(tmp_path, {"question": "?", "answer": "#### none"}), 8)


def test_spec_bench_has_a_task_per_category_and_scores_what_has_references(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"category": "rag", "turns": ["Who sings?"], "reference": [["James Ray", "George Harrison"]]},
        {"category": "summarization", "turns": ["Summarize."], "reference": ["Short."]},
        {"category": "qa", "turns": ["Where?"]},
        {"category": "translation", "turns": ["Translate German to English: Hallo"], "reference": ["Hello"]},
        {"category": "math_reasoning", "turns": ["How many?"], "reference": ["#### 7"]},
        {"category": "writing", "turns": ["Write."]},
    ]
    tasks = {task.name: task for task in read_spec_bench(write_jsonl(tmp_path, *rows), 8)}
    assert set(tasks) == {
        *("spec-bench retrieval", "spec-bench summarization", "spec-bench translation"),
        *("spec-bench question-answering", "spec-bench mathematics"),
    }
    assert scores(tasks["spec-bench retrieval"], "by George Harrison") == {"contains an answer, %": 100}
    assert scores(tasks["spec-bench translation"], "7")
    assert scores(tasks["spec-bench mathematics"], "so 7") == {"exact match, %": 100}
    assert scores(tasks["spec-bench summarization"], " Short.") == {"chrF": 100}
    assert 0 < scores(tasks["spec-bench summarization"], "Shorter.")["chrF"] < 100
    assert scores(tasks["spec-bench question-answering"], "There.") == {}


class TestCode:
    """Functions are run with limits."""

    def test_an_answer_passes_if_its_function_passes_the_test(self, tmp_path: Path) -> None:
        task = read_code(write_jsonl(tmp_path, FUNCTION, FUNCTION, FUNCTION), 8)
        whole = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
        assert scores(task, whole, "    return x + x", "def double(x):\n    return 3")["pass@1, %"] == pytest.approx(
            200 / 3
        )

    def test_imports_of_the_prompt_are_kept(self, tmp_path: Path) -> None:
        row = FUNCTION | {"prompt": "import math\n\ndef double(x):\n"}
        (example,) = read_code(write_jsonl(tmp_path, row), 8).examples
        assert program_of(example, "def double(x):\n    return math.fsum([x, x])").startswith("import math\n")

    @pytest.mark.parametrize("program", ["raise ValueError", "import sys; sys.exit(0)", "import os; os._exit(0)", "("])
    def test_a_program_must_reach_its_end(self, program: str) -> None:
        assert not passes(program)

    def test_time_and_memory_are_bounded(self) -> None:
        assert not passes("import time; time.sleep(60)", seconds=0.5)
        assert not passes("x = bytearray(4 << 30)")

    def test_it_sees_no_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PILOTFISH_API_KEY", "secret")
        assert passes("import os; assert 'PILOTFISH_API_KEY' not in os.environ")


class TestSuite:
    """The chosen files and tasks."""

    def options(self, tmp_path: Path, **changes: Any) -> EvaluationOptions:
        file = write_jsonl(tmp_path, {"question": "1 + 1?", "answer": "#### 2"})
        return EvaluationOptions(**({"out": tmp_path, "arithmetic": file} | changes))

    def test_code_needs_an_option_of_its_own(self, tmp_path: Path) -> None:
        code = write_jsonl(tmp_path, FUNCTION, name="code.jsonl")
        tasks, skipped = read_suite(self.options(tmp_path, code=code))
        assert [task.name for task in tasks] == ["arithmetic"]
        assert "--execute-code" in skipped[0].reason
        tasks, skipped = read_suite(self.options(tmp_path, code=code, execute_code=True, max_tokens=7))
        assert [(task.name, task.max_tokens) for task in tasks] == [("arithmetic", 7), ("code", 7)] and not skipped

    def test_an_unknown_task_is_refused_with_the_known_ones(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="--tasks: chess is not in the files; there are arithmetic"):
            read_suite(self.options(tmp_path, tasks="chess"))

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"arithmetic": None}, "needed at least one of --translation"),
            ({"examples": 0}, "--examples: 0 is refused"),
            ({"max_tokens": -1}, "--max-tokens: -1 is refused"),
            ({"batches": ()}, "--batches"),
            ({"temperatures": (3.0,)}, "--temperatures"),
            ({"languages": "fr"}, "--languages"),
            ({"url": "http://localhost"}, "--url and --model"),
            ({"plain_url": "http://localhost"}, "--plain-url: needed with --url"),
            ({"server_pid": (1,)}, "--server-pid: needed with --url"),
            ({"url": "http://localhost", "model": "m", "methods": "ngram"}, "without --methods"),
        ],
    )
    def test_an_option_out_of_bounds_is_refused(self, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigurationError, match=words):
            self.options(tmp_path, **changes)

    def test_without_a_tokenizer_prompts_are_texts(self, tmp_path: Path) -> None:
        tasks, _ = read_suite(self.options(tmp_path))
        kept, prompts = with_prompts(tasks, None, None, source_alone=False)
        assert kept == tasks and prompts["arithmetic"][0].text == "1 + 1?"


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"question": "1?", "answer": "#### 1"}) + "\n\n{\n")
    with pytest.raises(ConfigurationError, match=r"data.jsonl, line 3: needed JSON"):
        read_arithmetic(file, 8)
    file.write_text("\n")
    with pytest.raises(ConfigurationError, match="needed at least one line"):
        read_arithmetic(file, 8)


def test_a_text_may_have_any_separator_of_lines_and_has_whole_characters(tmp_path: Path) -> None:
    file, rows = tmp_path / "data.jsonl", [{"source": "He\u2028go .", "references": ["He\x85goes ."]}]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    (example,) = read_correction(file, 1, 8).examples
    assert (example.source, example.references) == ("He\u2028go .", ("He\x85goes .",))
    for line in (r'{"source": "\ud83d", "references": ["a"]}', r'{"source": "a", "references": ["b", "\ud83d"]}'):
        file.write_text(f"{line}\n")
        with pytest.raises(ConfigurationError, match=r"data.jsonl, line 1: .* needed valid Unicode, .* '\\ud83d'"):
            read_correction(file, 1, 8)
