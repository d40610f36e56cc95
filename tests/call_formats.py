"""Calls as Mistral, DeepSeek and others write them, and templates like the published ones."""

import json
from dataclasses import replace
from typing import Any

from blockdraft.text.call_syntax import (
    DEEPSEEK,
    DEEPSEEK_V31,
    KIMI,
    MISTRAL,
    MISTRAL_LIST,
    JsonSyntax,
)
from blockdraft.text.python_syntax import LFM2, OLMO, PythonSyntax
from blockdraft.text.xml_syntax import GLM, GLM_47, MINIMAX

SPACED_LIST = replace(MISTRAL_LIST, section="[TOOL_CALLS] [")
FORMATS: dict[str, Any] = {
    "list": MISTRAL_LIST,
    "spaced list": SPACED_LIST,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "deepseek 3.1": DEEPSEEK_V31,
    "kimi": KIMI,
    "glm": GLM,
    "glm 4.7": GLM_47,
    "minimax": MINIMAX,
    "lfm2": LFM2,
    "olmo": OLMO,
}


def inner(syntax, call, index=0):
    if isinstance(syntax, JsonSyntax):
        aside = f":{index}" if syntax is KIMI else ""
        return f"{syntax.before}{call.name}{aside}{syntax.behind}{call.arguments}{syntax.close}"
    if isinstance(syntax, PythonSyntax):
        return replace(syntax, section="", section_end="").write(
            [(call.name, json.loads(call.arguments))]
        )
    gap, tags = syntax.gap, syntax.tags
    items = json.loads(call.arguments).items()
    key_end = f"{tags.key_end}{gap}" if tags.key_end else ""
    found = (
        f"{tags.parameter}{key}{key_end}{tags.value}"
        f"{value if isinstance(value, str) else json.dumps(value)}{tags.end_of_parameter}{gap}"
        for key, value in items
    )
    return f"{call.name}{tags.name_end}{gap}{''.join(found)}{tags.end_of_function}"


def written(syntax, *calls):
    inside = (f"{syntax.begin}{inner(syntax, c, i)}{syntax.end}" for i, c in enumerate(calls))
    return f"{syntax.section}{syntax.between.join(inside)}{syntax.section_end}"


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
TOOLS_SHOWN = "{% if tools %}TOOLS:{{ tools | tojson }}{% endif %}"
NINE = (
    "{% if id | length != 9 %}{{ raise_exception('Tool call IDs should be 9 characters') }}"
    "{% endif %}"
)
RESULTS = (
    "{% if m.role == 'tool' %}{% set id = m.tool_call_id %}"
    + NINE
    + "<{{ id }}>{% endif %}{% endfor %}"
)
LISTED = (
    TOOLS_SHOWN.replace("if tools", "if tools is not none")
    + TURNS
    + "{% if m.tool_calls is defined %}[TOOL_CALLS]GAP[{% for call in m.tool_calls %}"
    "{% set id = call.id %}"
    + NINE
    + '{{ (call.function | tojson)[:-1] }}, "id": "{{ id }}"}{{ \', \' if not loop.last }}'
    "{% endfor %}]{% endif %}" + RESULTS
)
NAMED = (
    TOOLS_SHOWN
    + TURNS
    + "{% for call in m.tool_calls or [] %}{% set id = call.id %}"
    + NINE
    + "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ id }}[ARGS]"
    "{{ call['function']['arguments'] | tojson }}{% endfor %}" + RESULTS
)
DEEPSEEK_TURNS = (
    TURNS + "{% set message = m %}{% if message['role'] == 'assistant' and message['tool_calls'] %}"
    "<｜tool▁calls▁begin｜>{% for tool in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + HEAD"
    " + tool['function']['arguments'] + 'TAIL<｜tool▁call▁end｜>' }}"
    "{{ 'BETWEEN' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}"
)
V31 = (
    DEEPSEEK_TURNS.replace("HEAD", "tool['function']['name'] + '<｜tool▁sep｜>'")
    .replace("TAIL", "")
    .replace("BETWEEN", "")
)
V3 = (
    DEEPSEEK_TURNS.replace(
        "HEAD", r"tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n'"
    )
    .replace("TAIL", r"\n```")
    .replace("BETWEEN", r"\n")
)
K2 = (
    TOOLS_SHOWN + TURNS + "{% if m.tool_calls %}<|tool_calls_section_begin|>"
    "{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}{% endif %}{% endfor %}"
)
GLM_TURNS = (
    TOOLS_SHOWN
    + TURNS
    + "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}GAP"
    "{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>GAP"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>GAP{% endfor %}</tool_call>"
    "{{ 'BETWEEN' if not loop.last }}{% endfor %}{% endfor %}"
)
M2 = (
    TOOLS_SHOWN + TURNS + "{% if m.tool_calls %}<minimax:tool_call>\n{% for call in m.tool_calls %}"
    '<invoke name="{{ call.function.name }}">\n'
    "{% for k, v in call.function.arguments.items() %}"
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}{% endfor %}"
)
IN_PYTHON = TURNS.replace("{", "{{").replace("}", "}}") + (
    "{{% if m.tool_calls %}}{begin}{{% for call in m.tool_calls %}}{{{{ call.function.name }}}}("
    "{{% for k, v in call.function.arguments.items() %}}{{{{ k }}}}={{{{ v | tojson }}}}"
    "{{{{ ', ' if not loop.last }}}}{{% endfor %}}){{{{ '{between}' if not loop.last }}}}"
    "{{% endfor %}}{end}{{% endif %}}{{% endfor %}}"
)
BARE_PYTHON = (
    TOOLS_SHOWN
    + "{# [func_name1(params_name1=params_value1), func_name2(params)] #}"
    + IN_PYTHON.format(begin="[", between=", ", end="]")
)
TEMPLATES = {
    "list": LISTED.replace("GAP", ""),
    "spaced list": LISTED.replace("GAP", " "),
    "mistral": NAMED,
    "deepseek": V3,
    "deepseek 3.1": V31,
    "kimi": K2,
    "glm": GLM_TURNS.replace("GAP", "\n").replace("BETWEEN", r"\n"),
    "glm 4.7": GLM_TURNS.replace("GAP", "").replace("BETWEEN", ""),
    "minimax": M2,
    "lfm2": TOOLS_SHOWN
    + "{# List of tools: #}"
    + IN_PYTHON.format(begin="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>"),
    "olmo": TOOLS_SHOWN
    + IN_PYTHON.format(begin="<function_calls>", between=r"\n", end="</function_calls>"),
}
"""They write calls that are sent back as the model writes them."""
