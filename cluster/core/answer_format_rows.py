"""The formats of calls and of reasoning that models are trained to write: one row each, and their detection.

Names are those of vLLM's tool and reasoning parsers where it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from cluster.core.answer_format import CallFormat, Field, ReasoningFormat, Tags, also, maybe

NAME, ID, ARGUMENTS, CALL, LIST, TAGS, PYTHON, BRACES = Field
_PARAMETERS = '{"name": NAME, "parameters": ARGUMENTS}'
_XML = Tags("\n<parameter=", ">\n", "", "\n</parameter>")
_DSML = "｜DSML｜"
_MISTRAL_LIST = ("[TOOL_CALLS]", LIST)
_HERMES = CallFormat(
    "hermes",
    ("<tool_call>\n", CALL, maybe("\n</tool_call>")),
    detect=(("<tool_call>",),),
    names=("ernie45", "granite4"),
    between="\n",
)
_GLM = CallFormat(
    "glm45",
    ("<tool_call>", NAME, TAGS, "\n</tool_call>"),
    detect=(("<arg_key>",),),
    between="\n",
    tags=Tags("\n<arg_key>", "</arg_key>", "\n<arg_value>", "</arg_value>"),
)
_MISTRAL = CallFormat(
    "mistral",
    ("[TOOL_CALLS]", NAME, also("[CALL_ID]"), ID, maybe("[ARGS]"), ARGUMENTS),
    detect=(("[TOOL_CALLS]", "[ARGS]"),),
    also_read=(_MISTRAL_LIST,),
    ids="",
    history_ids="alphanumeric",
)
_QWEN3 = ReasoningFormat(
    "qwen3",
    "<think>",
    "</think>",
    detect=(("</think>", "<think>"),),
    names=(
        "deepseek_v3",
        "glm45",
        "holo2",
        "kimi_k2",
        "minimax_m2",
        "nemotron_v3",
        "olmo3",
        "step3",
        "step3p5",
    ),
)

CALL_FORMATS: tuple[CallFormat, ...] = (
    CallFormat(
        "openai",
        (
            maybe("<|channel|>commentary "),
            also("<|channel|>analysis"),
            "to=functions.",
            NAME,
            also("<|channel|>commentary"),
            also("<|channel|>analysis"),
            maybe(" <|constrain|>"),
            maybe("json"),
            "<|message|>",
            ARGUMENTS,
            also("<|call|>"),
        ),
        detect=(("<|channel|>analysis",),),
        names=("harmony", "gpt_oss"),
        between=None,
    ),
    CallFormat(
        "deepseek_v32",
        (f'\n<{_DSML}invoke name="', NAME, '">', TAGS, f"\n</{_DSML}invoke>"),
        detect=(("DSML",),),
        section=(f"<{_DSML}function_calls>", f"\n</{_DSML}function_calls>"),
        tags=Tags(
            f'\n<{_DSML}parameter name="',
            '" string="true">',
            "",
            f"</{_DSML}parameter>",
            json_key_end='" string="false">',
        ),
    ),
    CallFormat(
        "deepseek_v3",
        (
            "<｜tool▁call▁begin｜>",
            maybe("function"),
            "<｜tool▁sep｜>",
            NAME,
            "\n```json\n",
            ARGUMENTS,
            "\n```",
            "<｜tool▁call▁end｜>",
        ),
        detect=(("tool▁sep", "```json"),),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        between="\n",
    ),
    CallFormat(
        "deepseek_v31",
        ("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>"),
        detect=(("tool▁sep",),),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallFormat(
        "kimi_k2",
        (
            "<|tool_call_begin|>",
            maybe("functions."),
            NAME,
            maybe(":"),
            ID,
            "<|tool_call_argument_begin|>",
            ARGUMENTS,
            "<|tool_call_end|>",
        ),
        detect=(("tool_calls_section_begin",),),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ids="[0-9]{1,3}",
        history_ids="functions.NAME:NUMBER",
    ),
    replace(
        _GLM,
        name="glm47",
        call=("<tool_call>", NAME, TAGS, "</tool_call>"),
        detect=(("<tool_call>{function-name}<arg_key>",),),
        between="",
        tags=Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    _GLM,
    CallFormat(
        "minimax_m2",
        ('\n<invoke name="', NAME, '">', TAGS, "\n</invoke>"),
        detect=(("minimax:tool_call",),),
        section=("<minimax:tool_call>", "\n</minimax:tool_call>"),
        tags=Tags('\n<parameter name="', '">', "", "</parameter>"),
    ),
    CallFormat(
        "seed_oss",
        ("<seed:tool_call>\n", "<function=", NAME, ">", TAGS, "\n</function>\n", "</seed:tool_call>"),
        detect=(("seed:tool_call",),),
        between="\n",
        tags=_XML,
    ),
    CallFormat(
        "functionary_v31",
        ("<function=", NAME, ">", ARGUMENTS, "</function>"),
        detect=(("<function=", "<|python_tag|>"),),
    ),
    CallFormat(
        "qwen3_coder",
        (maybe("<tool_call>\n"), "<function=", NAME, ">", TAGS, "\n</function>", maybe("\n</tool_call>")),
        detect=(("<function=",),),
        names=("qwen3_xml", "step3p5", "nemotron_v3"),
        between="\n",
        tags=_XML,
    ),
    CallFormat(
        "minicpm5",
        ('<function name="', NAME, '">', TAGS, "</function>"),
        detect=(("<function", "<param "), ("<function", "<param name")),
        tags=Tags('<param name="', '">', "", "</param>"),
    ),
    CallFormat(
        "step3",
        (
            "<｜tool_call_begin｜>function<｜tool_sep｜>",
            '<steptml:invoke name="',
            NAME,
            '">',
            TAGS,
            "</steptml:invoke>",
            maybe("<｜tool_call_end｜>"),
        ),
        detect=(("steptml",),),
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        tags=Tags('<steptml:parameter name="', '">', "", "</steptml:parameter>"),
    ),
    CallFormat(
        "gemma4",
        ("<|tool_call>call:", NAME, BRACES, maybe("<tool_call|>")),
        detect=(("<|tool_call>",),),
        quote='<|"|>',
    ),
    CallFormat(
        "functiongemma",
        ("<start_function_call>call:", NAME, BRACES, maybe("<end_function_call>")),
        detect=(("start_function_call",),),
        quote="<escape>",
    ),
    replace(
        _MISTRAL,
        name="mistral_v11",
        call=("[TOOL_CALLS]", NAME, maybe("[CALL_ID]"), ID, maybe("[ARGS]"), ARGUMENTS),
        detect=(("[TOOL_CALLS]", "[CALL_ID]"),),
        names=("mistral",),
        ids="[a-zA-Z0-9]{9}",
    ),
    _MISTRAL,
    replace(
        _MISTRAL,
        name="mistral_v3",
        call=_MISTRAL_LIST,
        also_read=(_MISTRAL.call,),
        detect=(("[TOOL_CALLS]",),),
        names=("mistral",),
    ),
    CallFormat(
        "cohere_command3",
        ("<|START_ACTION|>", LIST, "<|END_ACTION|>"),
        detect=(("START_ACTION",), ("|>ACTION",), ("_ACTION|>",)),
        names=("cohere_command_a",),
        object='{"tool_call_id": "ID", "tool_name": NAME, "parameters": ARGUMENTS}',
        list=("[\n    ", ",\n    ", "\n]"),
        ids="[0-9]",
    ),
    CallFormat(
        "cohere_command_r",
        ("Action:", maybe(" ```json\n"), LIST, maybe("\n```")),
        detect=(("Action: ```json",), ("Action:",)),
        object='{\n        "tool_name": NAME,\n        "parameters": ARGUMENTS\n    }',
        list=("[\n    ", ",\n    ", "\n]"),
    ),
    CallFormat(
        "apertus",
        ("<|tools_prefix|>", LIST, "<|tools_suffix|>"),
        detect=(("tools_prefix",),),
        object="{NAME: ARGUMENTS}",
    ),
    CallFormat("nemotron_json", ("<TOOLCALL>", LIST, "</TOOLCALL>"), detect=(("<TOOLCALL>",),)),
    CallFormat(
        "solar",
        (
            "<|tool_call:begin|>",
            ID,
            "<|tool_call:name|>",
            NAME,
            "<|tool_call:args|>",
            ARGUMENTS,
            "<|tool_call:end|>",
        ),
        detect=(("tool_call:name",),),
        section=("<|tool_calls|>", "<|calls|>"),
        ids="[a-z0-9]{6,10}",
    ),
    CallFormat("functools", (" functools", LIST), detect=(("functools",),), names=("firefunction",)),
    CallFormat("phi4_mini_json", ("<|tool_call|>", LIST, maybe("<|/tool_call|>")), detect=(("<|/tool_call|>",),)),
    CallFormat("granite", ("<|tool_call|>", LIST), detect=(("<|tool_call|>",),)),
    CallFormat("granite-20b-fc", ("<function_call> ", CALL), detect=(("<function_call>",),), between="\n"),
    CallFormat(
        "gigachat3",
        (maybe("function call"), also("<|function_call|>"), maybe("<|role_sep|>\n"), CALL),
        detect=(("function call<|role_sep|>",), ("<|function_call|>",)),
        between=None,
    ),
    CallFormat(
        "internlm",
        ("<|action_start|><|plugin|>\n", CALL, maybe("<|action_end|>")),
        detect=(("<|plugin|>",),),
        object=_PARAMETERS,
        between=None,
    ),
    CallFormat(
        "longcat",
        ("<longcat_tool_call>\n", CALL, "\n</longcat_tool_call>"),
        detect=(("longcat_tool_call",),),
        between="\n",
    ),
    CallFormat(
        "minimax",
        (CALL,),
        detect=(('<tool_calls>\n{"name"',), ('<tool_calls>\\n{"name"',)),
        section=("<tool_calls>\n", "\n</tool_calls>"),
        between="\n",
    ),
    CallFormat(
        "jamba",
        ("<tool_calls>", LIST, "</tool_calls>"),
        detect=(("<tool_calls>",),),
        names=("hunyuan_a13b",),
        list=("[\n    ", ",\n    ", "\n]"),
    ),
    CallFormat(
        "lfm2",
        (maybe("<|tool_call_start|>"), PYTHON, maybe("<|tool_call_end|>")),
        detect=(("tool_call_start",), ("<|tool_list_start|>",)),
    ),
    CallFormat(
        "olmo3",
        ("<function_calls>\n", PYTHON, "\n</function_calls>"),
        detect=(("<function_calls>",),),
        list=("", "\n", ""),
    ),
    CallFormat(
        "functionary_v32",
        (also(">>>"), NAME, "\n", ARGUMENTS),
        detect=((">>>",),),
        between=">>>",
    ),
    CallFormat(
        "pythonic",
        (also("```tool_code"), also("<|python_start|>"), PYTHON, also("<|python_end|>"), also("```")),
        detect=(("python_start",), ("[func_name1(",), ("func_name(",), ("func_name1(",)),
        names=("llama4_pythonic",),
    ),
    _HERMES,
    CallFormat(
        "xlam", (LIST,), detect=(('[{"name"',), ('{"name": "func_name1"',), ('[\n{"name"',)), names=("json_list",)
    ),
    CallFormat(
        "llama3_json",
        (also("<|python_tag|>"), CALL),
        detect=(("<|python_tag|>",), ("<|start_header_id|>", "tools"), ("<|header_start|>", "tools")),
        names=("llama", "llama4_json"),
        object=_PARAMETERS,
        between=None,
    ),
)
"""Detection takes the first row that fits, and `hermes` where none does."""

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        "openai_gptoss",
        "<|channel|>analysis*<|message|>",
        "<|end|>",
        detect=(("<|channel|>analysis",),),
        names=("harmony", "gpt_oss"),
        repeats=True,
        markers_left_out=(
            "<|start|>assistant",
            "<|channel|>final*<|message|>",
            "<|channel|>commentary*<|message|>",
            "<|return|>",
            "<|end|>",
            "<|call|>",
        ),
        after_closing="<|start|>assistant",
        answer_opening="<|channel|>final<|message|>",
    ),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", detect=(("</seed:think>",),)),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", detect=(("[/THINK]",), ("[THINK]",))),
    ReasoningFormat("kimi_vl", "◁think▷", "◁/think▷", detect=(("◁/think▷",), ("◁think▷",))),
    ReasoningFormat(
        "cohere_command3",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        detect=(("<|START_THINKING|>",),),
        names=("cohere_command_a",),
        markers_left_out=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>", detect=(("<|inner_prefix|>",),), repeats=True),
    ReasoningFormat(
        "solar",
        "<|think|>",
        "<|end|>",
        detect=(("<|think|>", "<|begin|>assistant"), ("<|think|>", "tool_call:name")),
        repeats=True,
        markers_left_out=("<|begin|>assistant", "<|content|>", "<|tool_calls|>", "<|calls|>", "<|end|>", "<|flush|>"),
        after_closing="<|begin|>assistant",
        answer_opening="<|content|>",
    ),
    ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>", detect=(("<channel|>",),), repeats=True),
    ReasoningFormat(
        "granite",
        "<think>",
        "</think>",
        detect=(("</think>", "<response>"),),
        names=("ernie45",),
        frame=("<response>", "</response>"),
    ),
    ReasoningFormat(
        "hunyuan_a13b", "<think>", "</think>", detect=(("</think>", "<answer>"),), frame=("<answer>", "</answer>")
    ),
    _QWEN3,
    ReasoningFormat(
        "deepseek_r1", "<think>", "</think>", detect=(("</think>", "<｜Assistant｜>"),), begins_inside=True
    ),
    replace(_QWEN3, detect=(("</think>",),)),
    ReasoningFormat("functionary_v32", detect=((">>>all",),), frame=("all\n", ""), markers_left_out=(">>>all\n",)),
    ReasoningFormat(
        "apriel", detect=(("[BEGIN FINAL RESPONSE]",),), frame=("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")
    ),
)

_Row = TypeVar("_Row", CallFormat, ReasoningFormat)


def call_format_of(source: str) -> CallFormat:
    """Return how models with this chat template write calls of tools."""
    return _detected(CALL_FORMATS, source) or _HERMES


def reasoning_format_of(source: str) -> ReasoningFormat | None:
    """Return how models with this chat template write what they think; `None` if they do not."""
    return _detected(REASONING_FORMATS, source)


def call_format(name: str) -> CallFormat | None:
    """Return the format with a name of the setting `tool_parser`; `None` if there is none."""
    return _named(CALL_FORMATS, name)


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Return the format with a name of the setting `reasoning_parser`; `None` if there is none."""
    return _named(REASONING_FORMATS, name)


def call_format_names() -> tuple[str, ...]:
    """Return the values of the setting `tool_parser`, sorted."""
    return _names(CALL_FORMATS)


def reasoning_format_names() -> tuple[str, ...]:
    """Return the values of the setting `reasoning_parser`, sorted."""
    return _names(REASONING_FORMATS)


def _names(rows: Sequence[CallFormat] | Sequence[ReasoningFormat]) -> tuple[str, ...]:
    return tuple(sorted({name for row in rows for name in (row.name, *row.names)}))


def _detected(rows: Sequence[_Row], source: str) -> _Row | None:
    fits = (row for row in rows if any(all(text in source for text in texts) for texts in row.detect))
    return next(fits, None)


def _named(rows: Sequence[_Row], name: str) -> _Row | None:
    return next((row for row in rows if row.name == name), None) or next(
        (row for row in rows if name in row.names), None
    )
