"""Prompts for the target, from files and data sets. The keys of each row determine its format.

The formats are Spec-Bench (`turns`), GSM8K (`question`), Self-Instruct (`instruction` with `instances`), conversations
(`messages`), those of ShareGPT (`conversations`), HumanEval (`entry_point` with `prompt`), Multi30k (`en` with `de` or
`fr`, to translate into English) and plain prompts (`prompt`, or `text`, as a data set of plain text has them). Answers
in the files are ignored, because the target writes its own. For a line with a system message alone (`system`, null for
none), the target writes the question as well: a model that was tuned on conversations writes questions like those that
it was tuned on (Magpie, Xu et al. 2024). A `template` is a prompt in which `{document}` stands for a longer answer of
the target, each time another one, and `{question}` for what one of these answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigurationError, shorten
from cluster.core.json_text import WHOLE, has_half
from workers.distill.prompt_files import read_rows

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
DOCUMENT, QUESTION = "{document}", "{question}"
"""Placeholders of a template."""
_TASKS = dict.fromkeys(_MT_BENCH, "mt_bench")
"""Spec-Bench's categories that belong to one task."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation: the user's messages, turn by turn."""

    source: str
    """The file's name, without its directory."""
    line: int
    """Line number in the file, from 1."""
    turns: tuple[str, ...]
    """Empty where the target writes the user's message as well."""
    system: str | None = None
    """A system message before the first turn."""
    category: str = ""
    """The category that the line names, as in Spec-Bench."""
    part: int = 0
    """Index of the prompt among those of its line."""
    is_template: bool = False
    """Whether `DOCUMENT` and `QUESTION` in its turn stand for texts of the target."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt that the target answers, with temperature and seed."""

    prompt: Prompt
    turn_pass: int
    """Number of earlier tasks with the same prompt."""
    temperature: float
    seed: int
    held_out: bool
    """Whether the answer is not trained on, but agreement is measured on it."""

    @property
    def key(self) -> str:
        """Identifies the task among all tasks of the same files."""
        return f"{self.prompt.source}:{self.prompt.line}:{self.prompt.part}:{self.turn_pass}"


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read all prompts of a file, in order, but conversations that another one of the file continues.

    A log of requests has a conversation once for each of its turns, and the target answers all turns of the longest.
    Raises `ConfigurationError`, which names the file, the line and what was found.
    """
    prompts = tuple(
        prompt
        for number, where, row in read_rows(path)
        for prompt in _prompts_of(row, where, source=path.name, number=number)
    )
    if not prompts:
        raise ConfigurationError(f"prompts {path}: needed at least one prompt, found none")
    continued = {(one.system, one.turns[:count]) for one in prompts for count in range(1, len(one.turns))}
    return tuple(one for one in prompts if (one.system, one.turns) not in continued)


def by_task(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts by task. A task of several categories takes one prompt of each category in turn."""
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    tasks: dict[str, list[list[Prompt]]] = {}
    for category, members in categories.items():
        tasks.setdefault(_TASKS.get(category, category), []).append(members)
    return {
        task: [replace(prompt, category=task) for row in zip_longest(*groups) for prompt in row if prompt is not None]
        for task, groups in tasks.items()
    }


def evaluation_tasks(path: Path, count: int, seed: int) -> list[Task]:
    """The first turns of `count` prompts of each task of a file, to be answered greedily and never trained on.

    Raises `ConfigurationError` as `read_prompts` does.
    """
    return [
        Task(replace(prompt, turns=prompt.turns[:1]), 0, 0.0, seed, held_out=True)
        for prompts in by_task(read_prompts(path)).values()
        for prompt in prompts[:count]
    ]


def schedule(
    files: Sequence[Sequence[Prompt]], temperatures: Sequence[float], held_out: int, seed: int
) -> Iterator[Task]:
    """Yield all tasks in order: first the held-out ones, then one prompt of each file in turn.

    A short file is repeated while a long one is read once. The first pass over a file uses the first temperature, the
    second pass the second, and so on in a cycle. A prompt is used greedily (temperature 0) only once, unless the target
    writes a part of it, which is new at every pass. Of each file, `held_out` prompts or a tenth of them, whichever is
    less, are held out and used once, at the first temperature. Whole lines are held out until there are enough prompts;
    those beyond are not used. A line is not held out if no other prompt of the file would remain. The tasks end only
    where no temperature is above 0 and the target writes no part of a prompt that is not held out. Raises
    `ConfigurationError` for temperatures outside 0 and 10.
    """
    if not temperatures or any(not 0 <= temperature <= 10 for temperature in temperatures):
        raise ConfigurationError(
            f"temperatures: {shorten(list(temperatures))} is refused; each must be within 0 and 10"
        )
    parted = [_parted(_shuffled(prompts, seed), held_out) for prompts in files]
    for measured, _ in parted:
        for prompt in measured:
            yield Task(prompt, 0, temperatures[0], seed, held_out=True)
    passes = [_passes(trained, temperatures, seed) for _, trained in parted]
    while passes:
        running = []
        for tasks in passes:
            task = next(tasks, None)
            if task is not None:
                yield task
                running.append(tasks)
        passes = running


def _parted(prompts: Sequence[Prompt], held_out: int) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of a file that are held out, and those to train on, which are of other lines."""
    lines: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        lines.setdefault(prompt.line, []).append(prompt)
    most, left = min(held_out, len(prompts) // 10), len(prompts)
    measured: list[Prompt] = []
    chosen: set[int] = set()
    for number, line in lines.items():
        if len(measured) < most and len(line) < left:
            measured += line
            left -= len(line)
            chosen.add(number)
    return measured[:most], [prompt for prompt in prompts if prompt.line not in chosen]


def _is_open(prompt: Prompt) -> bool:
    """Whether a prompt is another one at every pass: the target writes parts of it."""
    return not prompt.turns or prompt.is_template


def _passes(prompts: Sequence[Prompt], temperatures: Sequence[float], seed: int) -> Iterator[Task]:
    sampled = [temperature for temperature in temperatures if temperature > 0]
    for number in count():
        remaining = [prompt for prompt in prompts if number < len(temperatures) or sampled or _is_open(prompt)]
        if not remaining:
            return
        for prompt in remaining:
            cycle = temperatures if number < len(temperatures) or _is_open(prompt) else sampled
            yield Task(prompt, number, cycle[number % len(cycle)], seed + number, held_out=False)


def _shuffled(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    order = list(prompts)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, not a secret
    return order


def _prompts_of(row: Mapping[str, Any], where: str, *, source: str, number: int) -> list[Prompt]:
    for key, read in _FORMS.items():
        if key in row:
            category = row.get("category", "")
            line_system, parts = _system(row, where), read(row, where)
            if line_system is not None and any(system is not None for system, _ in parts):
                raise ConfigurationError(f"{where}: needed one system message, found two")
            return [
                Prompt(
                    source,
                    number,
                    tuple(turns),
                    line_system if system is None else system,
                    category if isinstance(category, str) else "",
                    part,
                    key == "template",
                )
                for part, (system, turns) in enumerate(parts)
            ]
    raise ConfigurationError(f"{where}: needed one of the keys {', '.join(_FORMS)}; found {shorten(sorted(row))}")


_Turns = tuple[str | None, list[str]]


def _turns(row: Mapping[str, Any], where: str) -> list[_Turns]:
    return [(None, _texts(row["turns"], f"{where}: turns"))]


def _question(row: Mapping[str, Any], where: str) -> list[_Turns]:
    return [(None, [_text(row["question"], f"{where}: question")])]


def _plain(row: Mapping[str, Any], where: str) -> list[_Turns]:
    return [(None, [_text(row["prompt"], f"{where}: prompt")])]


def _text_column(row: Mapping[str, Any], where: str) -> list[_Turns]:
    return [(None, [_text(row["text"], f"{where}: text")])]


def _translation(row: Mapping[str, Any], where: str) -> list[_Turns]:
    found: list[_Turns] = [
        (None, [f"Translate {language} to English: {_text(row[key], f'{where}: {key}')}"])
        for language, key in (("German", "de"), ("French", "fr"))
        if key in row
    ]
    if not found:
        raise ConfigurationError(f"{where}: needed de or fr beside en, found {shorten(sorted(row))}")
    return found


def _template(row: Mapping[str, Any], where: str) -> list[_Turns]:
    text = _text(row["template"], f"{where}: template")
    if DOCUMENT not in text:
        raise ConfigurationError(f"{where}: template: needed {DOCUMENT}, found {shorten(text)}")
    return [(None, [text])]


def _function(row: Mapping[str, Any], where: str) -> list[_Turns]:
    beginning = _text(row.get("prompt"), f"{where}: prompt").strip("\n")
    return [(None, [f"Complete this Python function. Write the whole function.\n\n```python\n{beginning}\n```"])]


def _instruction(row: Mapping[str, Any], where: str) -> list[_Turns]:
    instruction = _text(row["instruction"], f"{where}: instruction")
    instances = row.get("instances", [])
    if not isinstance(instances, list) or not all(isinstance(instance, dict) for instance in instances):
        raise ConfigurationError(f"{where}: instances: needed a list of objects, found {shorten(instances)}")
    inputs = list(dict.fromkeys(_input(instance, where) for instance in instances)) or [""]
    return [(None, [f"{instruction}\n\n{text}" if text else instruction]) for text in inputs]


def _input(instance: Mapping[str, Any], where: str) -> str:
    """The input of an instance; empty where it has none."""
    value = instance.get("input")
    is_empty = value is None or (isinstance(value, str) and not value.strip())
    return "" if is_empty else _text(value, f"{where}: instances: input").strip()


def _messages(row: Mapping[str, Any], where: str) -> list[_Turns]:
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigurationError(f"{where}: messages: needed a list of objects, found {shorten(messages)}")
    pairs = [(message.get("role"), message.get("content")) for message in messages]
    system = next((content for role, content in pairs if role == "system"), None)
    turns = [content for role, content in pairs if role == "user"]
    checked = _texts(turns, f"{where}: messages with the role user")
    return [(None if system is None else _text(system, f"{where}: the system message"), checked)]


def _shared(row: Mapping[str, Any], where: str) -> list[_Turns]:
    """A conversation as ShareGPT has it. Data sets of this form have many that are empty: nothing is asked there."""
    found = row["conversations"]
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigurationError(f"{where}: conversations: needed a list of objects, found {shorten(found)}")
    roles = {"human": "user"}
    messages = [{"role": roles.get(one.get("from"), one.get("from")), "content": one.get("value")} for one in found]
    return _messages({"messages": messages}, where) if messages else []


def _system_only(row: Mapping[str, Any], where: str) -> list[_Turns]:
    others = row.keys() - _BESIDE_SYSTEM
    if others:
        raise ConfigurationError(f"{where}: needed a system message and nothing else, found {shorten(sorted(others))}")
    return [(None, [])]


def _system(row: Mapping[str, Any], where: str) -> str | None:
    system = row.get("system")
    return None if system is None else _text(system, f"{where}: system")


def _texts(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ConfigurationError(f"{where}: needed at least one text, found {shorten(value)}")
    return [_text(text, where) for text in value]


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{where}: needed a text that is not empty, found {shorten(value)}")
    if has_half(value):
        raise ConfigurationError(f"{where}: needed {WHOLE}, found {shorten(value)}")
    return value


_BESIDE_SYSTEM = {"system", "category", "question_id", "id"}
"""Keys that a line with only a system message may have. Others are refused, since they may hold a conversation."""

_FORMS: dict[str, Callable[[Mapping[str, Any], str], list[_Turns]]] = {
    "turns": _turns,
    "messages": _messages,
    "conversations": _shared,
    "instruction": _instruction,
    "question": _question,
    "entry_point": _function,
    "prompt": _plain,
    "template": _template,
    "en": _translation,
    "text": _text_column,
    "system": _system_only,
}
