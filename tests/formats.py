"""Reads recorded outputs of models, whole and in every split of 1 to 7 characters, and compares what they mean.

    python -m tests.formats FILE.jsonl

A line has `family`, `output`, and what it means: `content`, `reasoning`, `calls` (`[name, arguments]` each), and
`begins`: whether the prompt ended inside the reasoning (null: as the format says).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cluster.core.answer_format import AnswerFormat
from cluster.core.answer_format_rows import call_format, reasoning_format
from cluster.ingress.openai.parsing.answer_parser import AnswerParser
from cluster.ingress.openai.parsing.call_reader import CallOptions
from cluster.ingress.openai.parsing.parts import PartKind

SPLITS = range(1, 8)
FORMATS = {
    "apertus": ("apertus", "apertus"),
    "command-r": ("cohere_command_r", None),
    "command-r7b": ("cohere_command3", "cohere_command3"),
    "deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "deepseek-v3": ("deepseek_v3", None),
    "deepseek-v3.1": ("deepseek_v31", "qwen3"),
    "deepseek-v3.2": ("deepseek_v32", "qwen3"),
    "ernie45": ("hermes", "granite"),
    "exaone4": ("hermes", "qwen3"),
    "firefunction": ("functools", None),
    "functionary3.2": ("functionary_v32", "functionary_v32"),
    "functiongemma": ("functiongemma", None),
    "gemma3": ("pythonic", None),
    "gigachat3": ("gigachat3", None),
    "glm4.5": ("glm45", "qwen3"),
    "glm4.6": ("glm45", "qwen3"),
    "gpt-oss": ("openai", "openai_gptoss"),
    "granite-20b-fc": ("granite-20b-fc", None),
    "granite3": ("granite", "granite"),
    "granite3.3": ("granite", "granite"),
    "granite4": ("hermes", None),
    "hermes": ("hermes", None),
    "internlm2": ("internlm", None),
    "jamba": ("jamba", None),
    "kimi-k2": ("kimi_k2", "qwen3"),
    "kimi-vl": ("hermes", "kimi_vl"),
    "lfm2": ("lfm2", None),
    "llama3": ("llama3_json", None),
    "llama4": ("pythonic", None),
    "longcat": ("longcat", "qwen3"),
    "magistral": ("mistral", "mistral"),
    "minimax-m1": ("minimax", "qwen3"),
    "minimax-m2": ("minimax_m2", "qwen3"),
    "mistral": ("mistral", None),
    "nemotron-super": ("nemotron_json", "qwen3"),
    "nemotron3": ("qwen3_coder", "qwen3"),
    "olmo3": ("olmo3", "qwen3"),
    "qwen3": ("hermes", "qwen3"),
    "qwen3-coder": ("qwen3_coder", None),
    "qwen3-thinking": ("hermes", "qwen3"),
    "seed-oss": ("seed_oss", "seed_oss"),
    "smollm3": ("hermes", "qwen3"),
    "solar-open": ("solar", "solar"),
    "step3.5": ("qwen3_coder", "qwen3"),
    "toolace": ("pythonic", None),
    "xlam": ("xlam", None),
}
"""The names of the formats of calls and of reasoning, by the family of models."""
_TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "get_time": {"type": "object", "properties": {}},
}
_BEGIN_INSIDE = {"qwen3-thinking"}
"""Families whose template ends inside the reasoning though the format does not say so."""

Meaning = tuple[str, str, list[Any]]
"""Content, reasoning and calls."""


def read(row: dict[str, Any], size: int) -> Meaning:
    """What the output of a row means when it comes in pieces of `size` characters; 0: whole."""
    text, (calls, reasoning) = row["output"], FORMATS[row["family"]]
    form = None if reasoning is None else reasoning_format(reasoning)
    begins = row["begins"]
    if begins is None:
        begins = row["family"] in _BEGIN_INSIDE or (form is not None and form.begins_inside)
    tools: dict[str, Any] = {name: {} for name, _ in row["calls"]} | _TOOLS
    parser = AnswerParser("call", AnswerFormat(call_format(calls), form, bool(begins)), CallOptions(tools))
    pieces = [text[first : first + size] for first in range(0, len(text), size)] if size else [text]
    parts = [part for piece in pieces for part in parser.parts(piece)] + list(parser.last_parts(stopped=True))
    texts, found = {"content": "", "reasoning": ""}, list[list[str]]()
    for part in parts:
        if part.kind is PartKind.CALL:
            found.append([part.text, ""])
        elif part.kind is PartKind.ARGUMENTS:
            found[-1][1] += part.text
        else:
            texts[part.kind.value] += part.text
    return texts["content"].strip(), texts["reasoning"].strip(), [[name, json.loads(given)] for name, given in found]


def main() -> int:
    """Read all rows. Returns 1 if one means something else."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text("utf-8").splitlines()]
    wrong = 0
    for row in rows:
        wanted = row["content"].strip(), (row["reasoning"] or "").strip(), row["calls"]
        differing = [size for size in (0, *SPLITS) if read(row, size) != wanted]
        if differing:
            wrong += 1
            sys.stdout.write(f"{row['id']}: wrong in pieces of {differing} characters: {read(row, differing[0])}\n")
    readings = len(rows) * (1 + len(SPLITS))
    sys.stdout.write(f"{len(rows) - wrong} of {len(rows)} outputs mean what they should, in {readings} readings\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
