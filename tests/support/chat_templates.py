"""Chat templates in the style of each family of models, written for the tests: roles, tools, reasoning and calls."""

from __future__ import annotations

ITEMS = "{%- for key, value in tool.arguments.items() %}"
VALUE = "{{ value if value is string else value | tojson }}"
PYTHON = "{{ tool.name }}(" + ITEMS + "{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{%- endfor %}{{ ')' }}"
ARGUMENTS = "{{ tool.arguments | tojson }}"
OBJECT = '{"name": "{{ tool.name }}", "arguments": ' + ARGUMENTS + "}"
PARAMETERS = '{"name": "{{ tool.name }}", "parameters": ' + ARGUMENTS + "}"
XML = ITEMS + "{{ '\n' }}<parameter={{ key }}>{{ '\n' }}" + VALUE + "{{ '\n' }}</parameter>{%- endfor %}"
BRACES = "{{ '{' }}" + ITEMS + "{{ key }}:{{ QUOTE + value + QUOTE if value is string else value | tojson }}"
BRACES += "{{ ',' if not loop.last }}{%- endfor %}{{ '}' }}"


def each(body: str, between: str = "") -> str:
    """The calls of a message, one after the other."""
    loop = "{%- for call in message.tool_calls %}{%- set tool = call.function %}"
    return f"{loop}{body}{{{{ {between!r} if not loop.last }}}}{{%- endfor %}}"


def tags(opening: str, before: str, middle: str, after: str, closing: str) -> str:
    """A call with a tag for each argument."""
    return f"{opening}{ITEMS}{before}{{{{ key }}}}{middle}{VALUE}{after}{{%- endfor %}}{closing}"


D = "｜DSML｜"
CALLS: dict[str, str] = {
    "openai": each(
        "{{ '<|start|>assistant' if not loop.first }}<|channel|>commentary to=functions.{{ tool.name }} "
        f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    )
    + "{# <|channel|>analysis #}",
    "deepseek_v32": f"<{D}function_calls>"
    + each(
        f'{{{{ "\n" }}}}<{D}invoke name="{{{{ tool.name }}}}">{ITEMS}{{{{ "\n" }}}}<{D}parameter name="{{{{ key }}}}" '
        f"string=\"{{{{ 'true' if value is string else 'false' }}}}\">{VALUE}</{D}parameter>{{%- endfor %}}"
        f'{{{{ "\n" }}}}</{D}invoke>'
    )
    + f'{{{{ "\n" }}}}</{D}function_calls>',
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + each(
        f'<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{{{ tool.name }}}}{{{{ "\n```json\n" }}}}{ARGUMENTS}'
        '{{ "\n```" }}<｜tool▁call▁end｜>',
        "\n",
    )
    + "<｜tool▁calls▁end｜>{# ```json #}",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + each(f"<｜tool▁call▁begin｜>{{{{ tool.name }}}}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + each(f"<|tool_call_begin|>{{{{ call.id }}}}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>")
    + "<|tool_calls_section_end|>",
    "glm47": "{# <tool_call>{function-name}<arg_key> #}"
    + each(tags("<tool_call>{{ tool.name }}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>")),
    "glm45": each(
        tags(
            "<tool_call>{{ tool.name }}",
            "{{ '\n' }}<arg_key>",
            "</arg_key>{{ '\n' }}<arg_value>",
            "</arg_value>",
            "{{ '\n' }}</tool_call>",
        ),
        "\n",
    ),
    "minimax_m2": "<minimax:tool_call>"
    + each(
        tags(
            "{{ '\n' }}<invoke name=\"{{ tool.name }}\">",
            "{{ '\n' }}<parameter name=\"",
            '">',
            "</parameter>",
            "{{ '\n' }}</invoke>",
        )
    )
    + "{{ '\n' }}</minimax:tool_call>",
    "seed_oss": each(
        f"<seed:tool_call>{{{{ '\n' }}}}<function={{{{ tool.name }}}}>{XML}{{{{ '\n' }}}}</function>{{{{ '\n' }}}}"
        "</seed:tool_call>",
        "\n",
    ),
    "functionary_v31": each(f"<function={{{{ tool.name }}}}>{ARGUMENTS}</function>") + "{# <|python_tag|> #}",
    "qwen3_coder": each(
        f"<tool_call>{{{{ '\n' }}}}<function={{{{ tool.name }}}}>{XML}{{{{ '\n' }}}}</function>{{{{ '\n' }}}}"
        "</tool_call>",
        "\n",
    ),
    "minicpm5": each(tags('<function name="{{ tool.name }}">', '<param name="', '">', "</param>", "</function>")),
    "step3": "<｜tool_calls_begin｜>"
    + each(
        "<｜tool_call_begin｜>function<｜tool_sep｜>"
        + tags(
            '<steptml:invoke name="{{ tool.name }}">',
            '<steptml:parameter name="',
            '">',
            "</steptml:parameter>",
            "</steptml:invoke><｜tool_call_end｜>",
        )
    )
    + "<｜tool_calls_end｜>",
    "gemma4": each("<|tool_call>call:{{ tool.name }}" + BRACES.replace("QUOTE", "'<|\"|>'") + "<tool_call|>"),
    "functiongemma": each(
        "<start_function_call>call:{{ tool.name }}" + BRACES.replace("QUOTE", "'<escape>'") + "<end_function_call>"
    ),
    "mistral_v11": each(f"[TOOL_CALLS]{{{{ tool.name }}}}[CALL_ID]{{{{ call.id }}}}[ARGS]{ARGUMENTS}"),
    "mistral": each(f"[TOOL_CALLS]{{{{ tool.name }}}}[ARGS]{ARGUMENTS}"),
    "mistral_v3": "[TOOL_CALLS][" + each(OBJECT[:-1] + ', "id": "{{ call.id }}"}', ", ") + "]",
    "cohere_command3": "<|START_ACTION|>[{{ '\n    ' }}"
    + each(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ tool.name }}", "parameters": ' + ARGUMENTS + "}",
        ",\n    ",
    )
    + "{{ '\n' }}]<|END_ACTION|>",
    "cohere_command_r": "Action: ```json{{ '\n[\n' }}"
    + each('    {"tool_name": "{{ tool.name }}", "parameters": ' + ARGUMENTS + "}", ",\n")
    + "{{ '\n]\n```' }}",
    "apertus": "<|tools_prefix|>[" + each('{"{{ tool.name }}": ' + ARGUMENTS + "}", ", ") + "]<|tools_suffix|>",
    "nemotron_json": "<TOOLCALL>[" + each(OBJECT, ", ") + "]</TOOLCALL>",
    "solar": "<|tool_calls|>"
    + each(
        "<|tool_call:begin|>{{ call.id }}<|tool_call:name|>{{ tool.name }}<|tool_call:args|>"
        f"{ARGUMENTS}<|tool_call:end|>"
    )
    + "<|calls|>",
    "functools": " functools[" + each(OBJECT, ", ") + "]",
    "phi4_mini_json": "<|tool_call|>[" + each(OBJECT, ", ") + "]<|/tool_call|>",
    "granite": "<|tool_call|>[" + each(OBJECT, ", ") + "]",
    "granite-20b-fc": each("<function_call> " + OBJECT, "\n"),
    "gigachat3": each("function call<|role_sep|>{{ '\n' }}" + OBJECT, "\n"),
    "internlm": each("<|action_start|><|plugin|>{{ '\n' }}" + PARAMETERS + "<|action_end|>"),
    "longcat": each("<longcat_tool_call>{{ '\n' }}" + OBJECT + "{{ '\n' }}</longcat_tool_call>", "\n"),
    "minimax": "<tool_calls>{{ '\n' }}" + each(OBJECT, "\n") + "{{ '\n' }}</tool_calls>{# <tool_calls>\n{\"name\" #}",
    "jamba": "<tool_calls>[{{ '\n    ' }}" + each(OBJECT, ",\n    ") + "{{ '\n' }}]</tool_calls>",
    "lfm2": "<|tool_call_start|>[" + each(PYTHON, ", ") + "]<|tool_call_end|>",
    "olmo3": "<function_calls>{{ '\n' }}" + each(PYTHON, "\n") + "{{ '\n' }}</function_calls>",
    "functionary_v32": each("{{ '>>>' if not loop.first }}{{ tool.name }}{{ '\n' }}" + ARGUMENTS),
    "pythonic": "[" + each(PYTHON, ", ") + "]{# [func_name1( #}",
    "hermes": each("<tool_call>{{ '\n' }}" + OBJECT + "{{ '\n' }}</tool_call>", "\n"),
    "xlam": "[" + each(OBJECT, ", ") + ']{# [{"name" #}',
    "llama3_json": each(PARAMETERS, "; ") + "{# <|python_tag|> #}",
}
"""How each format writes the calls of a message of the assistant, in Jinja."""

STYLES: dict[str, tuple[str, str]] = {
    "chatml": ("<|im_start|>ROLE{{ '\n' }}", "<|im_end|>{{ '\n' }}"),
    "headers": ("<|start_header_id|>ROLE<|end_header_id|>{{ '\n\n' }}", "<|eot_id|>"),
    "turns": ("<start_of_turn>ROLE{{ '\n' }}", "<end_of_turn>{{ '\n' }}"),
    "brackets": ("[ROLE]", "[/ROLE]"),
}
"""What surrounds a message of a role."""


def template(calls: str, style: str = "chatml", *, parts: str = "text", knows_developer: bool = False) -> str:
    """A whole chat template: tools first, then the messages. `parts`: contents are read as text, list or either."""
    opening, closing = (text.replace("ROLE", "{{ message.role }}") for text in STYLES[style])
    content = {
        "text": "{{ message.content }}",
        "list": "{%- for part in message.content %}{{ part.text }}{%- endfor %}",
        "either": "{%- if message.content is string %}{{ message.content }}{%- else %}"
        "{%- for part in message['content'] %}{{ part['text'] }}{%- endfor %}{%- endif %}",
    }[parts]
    roles = "['system', 'user', 'assistant', 'tool'" + (", 'developer']" if knows_developer else "]")
    return (
        "{{ bos_token }}{%- if tools %}{{ tools | tojson(indent=2, ensure_ascii=True) }}{{ '\n' }}{%- endif %}"
        "{%- for message in messages %}"
        f"{{%- if message.role not in {roles} %}}{{{{ raise_exception('unknown role') }}}}{{%- endif %}}"
        f"{opening}{{%- if message.reasoning_content %}}"
        "<think>{{ '\n' + message.reasoning_content + '\n' }}</think>"
        "{{ '\n\n' }}{%- endif %}"
        + content
        + f"{{%- if message.tool_calls %}}{calls}{{%- endif %}}{closing}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{STYLES[style][0].replace('ROLE', 'assistant')}{{%- endif %}}"
    )
