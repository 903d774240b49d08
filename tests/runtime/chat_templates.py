"""Chat templates in the styles of models that many use, and chats that they render."""

from __future__ import annotations

from typing import Any

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- set date = date_string | default(strftime_now('%d %b %Y')) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system, rest = messages[0]['content'] | trim, messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
<|start|>system<|end|>

Today: {{ date }}
{% if documents %}
    {%- for document in documents %}
[{{ loop.index }}] {{ document.title }}: {{ document.text }}
    {% endfor %}
{% endif %}
{{ system }}
{%- for message in rest %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

TURNS = """\
{{ bos_token }}
{%- if messages[0].role == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate:\\nuser, assistant') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
<turn>{{ role }}
    {{- '\\n' + message.content | trim }}</turn>
{% endfor %}
{% if add_generation_prompt %}
<turn>model
{% endif %}
"""

INSTRUCTIONS = """\
{%- set ns = namespace(system='', count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content + '\\n\\n' %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if ns.count > 9 %}{% break %}{% endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' ~ (ns.system if loop.last else '') ~ message.content ~ ' [/INST]' }}
    {%- else %}
        {%- generation %}
        {%- set inner = message.content %}
        {{- ' ' + inner + eos_token }}
        {%- endgeneration %}
        {{- 'leaked' if inner is defined else '' }}
    {%- endif %}
{%- endfor %}
"""

TOOLS = """\
{%- macro call(one) %}
<call>{"name": "{{ one.name }}", "arguments": {{ one.arguments | tojson }}}</call>
{%- endmacro %}
{%- if tools is not none %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
    {{- '</tools>' }}
{%- endif %}
{% for message in messages %}
{% if message.tool_calls is defined %}
    {%- for one in message.tool_calls %}{{ call(one.function) }}{% endfor %}
{% elif message.role == 'tool' %}
    {{- '<result>' ~ message.content ~ '</result>' }}
{% else %}
<{{ message.role }}>{{ message.content | default('nothing') }}
{% endif %}
{% endfor %}
{{ {'thinking': enable_thinking | default(true), 'é': [1, 2.5, none]} | tojson }}
"""

PARTS = """\
{% for message in messages %}
{{ message.role }}:
{%- if message.content is string %}
    {{- ' ' + message.content }}
{%- else %}
    {%- for part in message.content %}{{ ' ' + part.text }}{% endfor %}
{%- endif %}

{% endfor %}
"""

PARTS_ALONE = """\
{% for message in messages %}
{%- if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}
{%- for content in message['content'] | selectattr('type', 'equalto', 'image') %}
    {{- '<image>\n' }}
{%- endfor %}
{%- for content in message['content'] | selectattr('type', 'equalto', 'text') %}
    {{- content['text'] + ' ' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""

TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "turns": TURNS,
    "instructions": INSTRUCTIONS,
    "tools": TOOLS,
    "parts": PARTS,
}

Message = dict[str, Any]

USER: Message = {"role": "user", "content": "  What does `import` do? <b>&'é漢😀'</b>\n"}
ASSISTANT: Message = {"role": "assistant", "content": "It binds a name."}
SYSTEM: Message = {"role": "system", "content": "Answer briefly."}
CALLING: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "find", "arguments": {"text": "<é>", "most": [1, 2.0, None]}},
        }
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "a", "content": '{"found": 3}'}
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"text": {}}}},
}

CHATS: dict[str, list[Message]] = {
    "one": [USER],
    "three": [USER, ASSISTANT, USER],
    "system": [SYSTEM, USER, ASSISTANT, USER],
    "calls": [USER, CALLING, RESULT],
}
