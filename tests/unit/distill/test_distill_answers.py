"""Answers are appended to a file and read back. A partial last line is cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer, AnswerFile, Leading, read_answers, trainable


def answer(key: str, written: tuple[int, ...] = (5, 6, 2), held_out: bool = False, thoughts: bool = False) -> Answer:
    leading = None
    if thoughts:
        tokens = np.arange(len(written) * 4, dtype=np.int32).reshape(-1, 4)
        leading = Leading(tokens, -np.arange(tokens.size, dtype=np.float16).reshape(tokens.shape) / 8)
    return Answer(key, "qa", 0.7, held_out, (1, 2, 3), written, leading)


def test_appended_answers_are_read_back(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "a.jsonl") as file:
        file.append(answer("one"))
        file.append(answer("two", thoughts=True))

    one, two = read_answers(tmp_path / "a.jsonl")

    assert (one.key, one.category, one.temperature, one.held_out) == ("one", "qa", 0.7, False)
    assert (one.prompt, one.answer, one.leading) == ((1, 2, 3), (5, 6, 2), None)
    expected = answer("two", thoughts=True).leading
    assert two.leading is not None and expected is not None
    np.testing.assert_array_equal(two.leading.tokens, expected.tokens)
    np.testing.assert_array_equal(two.leading.log_probabilities, expected.log_probabilities)


def test_a_reopened_file_counts_its_answers(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "a.jsonl") as file:
        file.append(answer("one", written=(4, 5)))
        file.append(answer("kept", written=(4, 5, 6), held_out=True))

    with AnswerFile(tmp_path / "a.jsonl") as file:
        file.append(answer("two", written=(7,)))
        assert file.finished == {"one", "kept", "two"}
        assert file.answer_tokens == 3  # held-out answers are not trained on


def test_a_partial_line_is_cut_off_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with AnswerFile(path) as file:
        file.append(answer("one"))
        file.append(answer("two"))
    path.write_bytes(path.read_bytes()[:-10])

    with AnswerFile(path) as file:
        assert file.finished == {"one"}
        file.append(answer("two"))

    assert [found.key for found in read_answers(path)] == ["one", "two"]


def test_two_processes_never_write_answers_at_the_same_time(tmp_path: Path) -> None:
    """The second one would cut off what the first one has just begun to write."""
    path = tmp_path / "a.jsonl"
    with AnswerFile(path) as file:
        with pytest.raises(ConfigurationError, match=r"answers .*a\.jsonl: another process has it open"):
            AnswerFile(path).__enter__()
        file.append(answer("one"))

    with AnswerFile(path) as file:
        assert file.finished == {"one"}


def test_an_empty_answer_with_probabilities_is_read_back(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "a.jsonl") as file:
        file.append(answer("none", written=(), thoughts=True))
        file.append(answer("one"))

    assert [(found.key, found.answer) for found in read_answers(tmp_path / "a.jsonl")] == [
        ("none", ()),
        ("one", (5, 6, 2)),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"key": "a"}',
        '{"key":"a","category":"","temperature":0,"held_out":false,"prompt":1,"answer":[]}',
    ],
)
def test_a_line_that_is_not_an_answer_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    with AnswerFile(path) as file:
        file.append(answer("one"))
    with path.open("a") as stream:
        stream.write(line + "\n")

    with pytest.raises(ConfigurationError, match="line 2"):
        read_answers(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.jsonl"):
        read_answers(tmp_path / "absent.jsonl")


def test_what_is_measured_is_not_trained_on() -> None:
    """Two lines of a file may ask the same, and a file of prompts the same as that of an evaluation."""
    asked = [Answer(str(prompt), "", 0.0, prompt == 1, (prompt,), (7,)) for prompt in range(4)]
    again = [Answer(f"again {prompt}", "", 0.7, False, (prompt,), (8,)) for prompt in range(4)]
    empty = Answer("empty", "", 0.0, False, (9,), ())

    found = trainable([*asked, *again, empty], measured=[Answer("evaluated", "", 0.0, True, (2,), (7,))])

    assert [one.key for one in found] == ["0", "3", "again 0", "again 3"]
