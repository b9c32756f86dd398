"""Prompts are read from files and scheduled."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigurationError
from workers.distill.prompts import Prompt, by_task, read_prompts, schedule


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def some(source: str, count: int) -> list[Prompt]:
    return [Prompt(source, line, (f"{source} {line}",)) for line in range(1, count + 1)]


FORMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Spec-Bench": ({"question_id": 1, "category": "qa", "turns": ["One?", "Two?"]}, ("One?", "Two?")),
    "GSM8K": ({"question": "How many?", "answer": "#### 7"}, ("How many?",)),
    "Self-Instruct": (
        {"instruction": "Translate.", "instances": [{"input": "Haus", "output": "house"}]},
        ("Translate.\n\nHaus",),
    ),
    "Self-Instruct without input": ({"instruction": "Sing.", "instances": [{"input": "", "output": "La"}]}, ("Sing.",)),
    "Self-Instruct with null": ({"instruction": "Sing.", "instances": [{"input": None}]}, ("Sing.",)),
    "chat": (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]},
        ("Hi",),
    ),
    "ShareGPT": (
        {"id": "a", "conversations": [{"from": "gpt", "value": "I"}, {"from": "human", "value": "Hi"}] * 2},
        ("Hi", "Hi"),
    ),
    "plain": ({"prompt": "Go on."}, ("Go on.",)),
    "Multi30k": ({"de": "Ein Haus.", "en": "A house."}, ("Translate German to English: Ein Haus.",)),
    "template": ({"template": "Summarize: {document}"}, ("Summarize: {document}",)),
    "a system message alone": ({"system": "Be brief."}, ()),
    "nothing at all": ({"system": None}, ()),
}


class TestReading:
    @pytest.mark.parametrize("form", FORMS)
    def test_the_keys_of_a_line_determine_its_format(self, tmp_path: Path, form: str) -> None:
        row, turns = FORMS[form]

        (prompt,) = read_prompts(write(tmp_path / "some.jsonl", row))

        assert prompt.turns == turns
        assert (prompt.source, prompt.line) == ("some.jsonl", 1)

    def test_one_file_may_mix_formats_and_have_empty_lines(self, tmp_path: Path) -> None:
        file = tmp_path / "mixed.jsonl"
        file.write_text('{"prompt": "a"}\n\n{"question": "b"}\n', encoding="utf-8")

        assert [(prompt.line, prompt.turns) for prompt in read_prompts(file)] == [(1, ("a",)), (3, ("b",))]

    def test_every_instance_is_a_separate_prompt_and_its_output_is_not_read(self, tmp_path: Path) -> None:
        row = {"instruction": "Say.", "instances": [{"input": "a", "output": "x"}, {"input": "b", "output": "y"}]}

        found = read_prompts(write(tmp_path / "p.jsonl", row))

        assert [(prompt.part, prompt.turns) for prompt in found] == [(0, ("Say.\n\na",)), (1, ("Say.\n\nb",))]

    def test_a_system_message_is_kept(self, tmp_path: Path) -> None:
        row = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}

        (prompt,) = read_prompts(write(tmp_path / "p.jsonl", row))

        assert (prompt.system, prompt.turns) == ("Be brief.", ("Hi",))

    def test_a_system_message_may_stand_beside_a_question(self, tmp_path: Path) -> None:
        (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"system": "Be brief.", "question": "Why?"}))

        assert (prompt.system, prompt.turns) == ("Be brief.", ("Why?",))

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("{", "needed JSON"),
            ("[1]", "needed an object, found [1]"),
            (
                '{"body": "a"}',
                "one of the keys turns, messages, conversations, instruction, question, entry_point, prompt, template, "
                "en, text, system; found ['body']",
            ),
            ('{"en": "A house."}', "needed de or fr beside en, found ['en']"),
            ('{"template": "Summarize."}', "template: needed {document}, found 'Summarize.'"),
            ('{"system": 7}', "system: needed a text that is not empty, found 7"),
            (
                '{"system": "a", "messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]}',
                "needed one system message, found two",
            ),
            ('{"system": "a", "dialogue": []}', "a system message and nothing else, found ['dialogue']"),
            ('{"conversations": ["hi"]}', "conversations: needed a list of objects, found ['hi']"),
            ('{"conversations": [{"from": "gpt", "value": "a"}]}', "needed at least one text, found []"),
            ('{"turns": []}', "turns: needed at least one text, found []"),
            ('{"question": 7}', "question: needed a text that is not empty, found 7"),
            ('{"prompt": " "}', "prompt: needed a text that is not empty, found ' '"),
            ('{"text": 7}', "text: needed a text that is not empty, found 7"),
            ('{"messages": "hi"}', "messages: needed a list of objects, found 'hi'"),
            ('{"messages": [{"role": "assistant", "content": "a"}]}', "role user: needed at least one text, found []"),
            ('{"instruction": "a", "instances": 3}', "instances: needed a list of objects, found 3"),
            (
                '{"instruction": "a", "instances": [{"input": 5}]}',
                "instances: input: needed a text that is not empty, found 5",
            ),
            (r'{"prompt": "\ud83d"}', r"prompt: needed valid Unicode, without half of a surrogate pair, found '\ud"),
            pytest.param("[" * 100_000, "needed JSON", id="deep"),
        ],
    )
    def test_an_error_names_the_file_the_line_and_what_was_found(self, tmp_path: Path, line: str, found: str) -> None:
        file = tmp_path / "broken.jsonl"
        file.write_text(f'{{"prompt": "fine"}}\n{line}\n', encoding="utf-8")

        with pytest.raises(ConfigurationError) as refused:
            read_prompts(file)

        assert f"{file}, line 2" in str(refused.value)
        assert found in str(refused.value)

    def test_empty_conversations_of_sharegpt_are_left_out_and_its_system_message_is_kept(self, tmp_path: Path) -> None:
        turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}]

        (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"conversations": []}, {"conversations": turns}))

        assert (prompt.line, prompt.system, prompt.turns) == (2, "Be brief.", ("Hi",))

    def test_a_conversation_that_another_one_continues_is_left_out(self, tmp_path: Path) -> None:
        rows = [
            {"turns": ["a"]},
            {"turns": ["a", "b"]},
            {"turns": ["a"], "system": "Be brief."},
            {"turns": ["a", "c"]},
            {"turns": ["a"]},
            {"turns": ["b"]},
            {"turns": ["b"]},
        ]

        found = read_prompts(write(tmp_path / "p.jsonl", *rows))

        assert [(prompt.line, prompt.turns) for prompt in found] == [
            (2, ("a", "b")),
            (3, ("a",)),
            (4, ("a", "c")),
            (6, ("b",)),
            (7, ("b",)),
        ]

    @pytest.mark.parametrize("end", ["{", '{"prompt": "a', '{"messages": [{"role": "user", "content": "a"}'])
    def test_a_file_may_end_within_an_object_but_not_go_on_after_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str
    ) -> None:
        file = tmp_path / "p.jsonl"
        file.write_text(f'{{"prompt": "fine"}}\n{end}')

        assert [prompt.turns for prompt in read_prompts(file)] == [("fine",)]
        assert f"{file}, line 2 is left out: the file ends within it" in caplog.text
        file.write_text(f'{{"prompt": "fine"}}\n{end}\n')
        with pytest.raises(ConfigurationError, match="line 2: needed JSON"):
            read_prompts(file)

    def test_a_last_line_that_is_no_object_is_refused_also_without_its_end(self, tmp_path: Path) -> None:
        file = tmp_path / "p.jsonl"
        file.write_text('{"prompt": "fine"}\nfine')

        with pytest.raises(ConfigurationError, match="line 2: needed JSON"):
            read_prompts(file)

    def test_every_line_of_a_text_file_is_a_prompt(self, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text('One?\n\n  {"prompt": "Two"}\r\n', encoding="utf-8")

        found = read_prompts(tmp_path / "p.txt")

        assert [(prompt.line, prompt.turns) for prompt in found] == [(1, ("One?",)), (3, ('{"prompt": "Two"}',))]

    @pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
    def test_a_text_may_have_any_separator_of_lines(self, tmp_path: Path, separator: str) -> None:
        """JSON may have them as they are, line feeds alone are escaped."""
        file, text = tmp_path / "p.jsonl", f"One.{separator}Two."
        file.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")

        assert [prompt.turns for prompt in read_prompts(file)] == [(text,)]

    def test_a_missing_or_empty_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").write_text("\n")

        for name in ("absent.jsonl", "empty.jsonl"):
            with pytest.raises(ConfigurationError, match=name):
                read_prompts(tmp_path / name)


class TestDataSets:
    """Directories as `datasets.Dataset.save_to_disk` and `datasets.DatasetDict.save_to_disk` write them."""

    @staticmethod
    def save(directory: Path, *files: list[dict[str, Any]]) -> Path:
        import pyarrow
        from pyarrow import ipc

        directory.mkdir(parents=True)
        names = [f"data-{number:05}-of-{len(files):05}.arrow" for number in range(len(files))]
        for name, rows in zip(names, files, strict=True):
            table = pyarrow.Table.from_pylist(rows)
            with pyarrow.OSFile(str(directory / name), "wb") as file, ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, max_chunksize=2)
        state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "a", "_split": "train"}
        (directory / "state.json").write_text(json.dumps(state))
        (directory / "dataset_info.json").write_text("{}")
        return directory

    def test_columns_have_the_names_of_keys_and_missing_values_are_no_keys(self, tmp_path: Path) -> None:
        shared = [{"from": "human", "value": "Hi"}]
        rows: list[dict[str, Any]] = [{"question": f"{number}?", "conversations": None} for number in range(3)]

        found = read_prompts(self.save(tmp_path / "asked", rows, [{"question": None, "conversations": shared}]))

        assert [prompt.turns for prompt in found] == [("0?",), ("1?",), ("2?",), ("Hi",)]
        assert [(prompt.source, prompt.line) for prompt in found] == [("asked", line) for line in (1, 2, 3, 4)]

    def test_a_column_of_texts_has_prompts_where_no_other_one_does(self, tmp_path: Path) -> None:
        """`datasets.load_dataset("text", …)` names its only column so."""
        plain = read_prompts(self.save(tmp_path / "plain", [{"text": "Hi."}, {"text": "Why?"}]))
        asked = read_prompts(self.save(tmp_path / "asked", [{"question": "Why?", "text": "Question: Why?"}]))

        assert [prompt.turns for prompt in plain] == [("Hi.",), ("Why?",)]
        assert [prompt.turns for prompt in asked] == [("Why?",)]

    def test_of_several_splits_the_one_to_train_on_is_read(self, tmp_path: Path) -> None:
        for name in ("train", "test"):
            self.save(tmp_path / "asked" / name, [{"prompt": name}])
        (tmp_path / "asked" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')

        assert [prompt.turns for prompt in read_prompts(tmp_path / "asked")] == [("train",)]
        (tmp_path / "asked" / "dataset_dict.json").write_text('{"splits": ["test"]}')
        with pytest.raises(ConfigurationError, match=r"needed the split train, found \['test'\]"):
            read_prompts(tmp_path / "asked")

    def test_what_is_no_data_set_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=f"prompts {tmp_path}: needed a file, or a directory that `save"):
            read_prompts(tmp_path)
        broken = self.save(tmp_path / "broken", [{"prompt": "a"}])
        (broken / "data-00000-of-00001.arrow").write_bytes(b"x" * 64)
        with pytest.raises(ConfigurationError, match=r"data-00000-of-00001.arrow: needed a stream of Arrow"):
            read_prompts(broken)
        (broken / "state.json").write_text("{}")
        with pytest.raises(ConfigurationError, match=r"state.json: needed _data_files"):
            read_prompts(broken)

    def test_a_row_that_is_no_prompt_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"bad, row 2: needed one of the keys .*; found \['label'\]"):
            read_prompts(self.save(tmp_path / "bad", [{"prompt": "a", "label": "b"}, {"prompt": None, "label": "b"}]))


class TestSchedule:
    def test_a_short_file_is_repeated_while_a_long_one_is_read_once(self) -> None:
        tasks = list(islice(schedule([some("long", 100), some("short", 10)], (0.0, 1.0), 0, 0), 100))

        asked = Counter(task.prompt.source for task in tasks)
        assert asked == {"long": 50, "short": 50}
        assert {task.turn_pass for task in tasks if task.prompt.source == "long"} == {0}
        assert Counter(task.turn_pass for task in tasks if task.prompt.source == "short") == dict.fromkeys(range(5), 10)

    def test_only_the_first_pass_is_greedy(self) -> None:
        tasks = list(islice(schedule([some("only", 2)], (0.0, 0.5, 1.0), 0, 9), 12))

        assert [task.temperature for task in tasks[::2]] == [0.0, 0.5, 1.0, 1.0, 0.5, 1.0]
        assert [task.seed for task in tasks[::2]] == [9, 10, 11, 12, 13, 14]

    def test_questions_of_the_target_are_new_in_each_pass_and_answered_greedily(self) -> None:
        lines = [Prompt("own", line, ()) for line in (1, 2)]

        tasks = list(islice(schedule([lines], (0.0, 0.7), 0, 9), 8))

        assert [task.temperature for task in tasks[::2]] == [0.0, 0.7, 0.0, 0.7]
        assert len({task.key for task in tasks}) == 8

    def test_with_greedy_decoding_only_there_is_one_pass(self) -> None:
        tasks = list(schedule([some("a", 3), some("b", 5)], (0.0,), 0, 0))

        assert len(tasks) == len({task.key for task in tasks}) == 8

    def test_held_out_prompts_come_first_and_are_never_used_for_training(self) -> None:
        tasks = list(schedule([some("a", 40), some("b", 100)], (0.0,), 6, 0))

        held_out = [task.prompt for task in tasks if task.held_out]
        assert Counter(prompt.source for prompt in held_out) == {"a": 4, "b": 6}  # at most a tenth of a file
        assert all(task.held_out for task in tasks[:10])
        assert not {task.prompt for task in tasks[10:]} & set(held_out)

    def test_a_line_of_which_a_prompt_is_held_out_is_not_trained_on(self) -> None:
        """A sentence in two languages has the same translation into the third."""
        prompts = [Prompt("a", line, (f"{line} {part}",), part=part) for line in range(20) for part in range(2)]

        tasks = list(schedule([prompts], (0.0,), 4, 0))

        held_out = {task.prompt.line for task in tasks if task.held_out}
        assert sum(task.held_out for task in tasks) == 4
        assert not held_out & {task.prompt.line for task in tasks if not task.held_out}

    @pytest.mark.parametrize(("lines", "parts"), [(1, 20), (2, 10), (3, 40), (10, 20)])
    def test_long_lines_leave_prompts_to_train_on(self, lines: int, parts: int) -> None:
        """No more lines are held out than the held-out prompts need, and never all of them."""
        prompts = [Prompt("a", line, (f"{line} {part}",), part=part) for line in range(lines) for part in range(parts)]

        tasks = list(schedule([prompts], (0.0,), 6, 0))

        held_out = [task.prompt for task in tasks if task.held_out]
        assert len(held_out) == (0 if lines == 1 else min(6, lines * parts // 10))
        assert len({prompt.line for prompt in held_out}) == (0 if lines == 1 else 1)
        assert len(tasks) - len(held_out) == max(1, lines - 1) * parts

    def test_the_seed_decides_the_order(self) -> None:
        def order(seed: int) -> list[str]:
            return [task.key for task in schedule([some("a", 30)], (0.0,), 3, seed)]

        assert order(1) == order(1)
        assert order(1) != order(2)

    @pytest.mark.parametrize("temperatures", [(), (-0.1,), (11.0,), (float("nan"),)])
    def test_temperatures_out_of_bounds_are_refused(self, temperatures: tuple[float, ...]) -> None:
        with pytest.raises(ConfigurationError, match="temperatures"):
            next(schedule([some("a", 3)], temperatures, 0, 0))


def test_a_task_with_many_categories_has_prompts_of_each() -> None:
    prompts = [
        Prompt("s", line, ("?",), category=category)
        for line, category in enumerate(["writing", "writing", "math", "math", "qa"])
    ]

    tasks = by_task(prompts)

    assert [prompt.line for prompt in tasks["mt_bench"]] == [0, 2, 1, 3]
    assert [prompt.line for prompt in tasks["qa"]] == [4]
    assert {prompt.category for prompt in tasks["mt_bench"]} == {"mt_bench"}
