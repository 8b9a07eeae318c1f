"""The chat template of the tiny models: ChatML with tools, strictly append-only.

A longer conversation's text always starts with the shorter one's: no message is rendered
differently because of a later one, and contents are never stripped.
"""

from __future__ import annotations

TOOL_CALL_OPEN = "<tool_call>"
TOOL_CALL_CLOSE = "</tool_call>"

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is sequence and content is not mapping -%}
        {%- for part in content -%}
            {%- if part is string -%}
                {{- part -}}
            {%- elif part.text is defined -%}
                {{- part.text -}}
            {%- elif part.refusal is defined -%}
                {{- part.refusal -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro tool_list() -%}
    {{- '# Tools\\n\\nCall a function by writing one block per call:\\n' -}}
    {{- '<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>\\n\\n<tools>\\n' -}}
    {%- for tool in tools -%}
        {{- (tool | tojson) + '\\n' -}}
    {%- endfor -%}
    {{- '</tools>' -}}
{%- endmacro -%}
{%- if tools and not (messages and messages[0].role in ('system', 'developer')) -%}
    {{- '<|im_start|>system\\n' + tool_list() + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'system' if message.role == 'developer' else message.role -%}
    {{- '<|im_start|>' + role + '\\n' -}}
    {%- set content = text(message.content) -%}
    {{- content -}}
    {%- if loop.first and role == 'system' and tools -%}
        {{- ('\\n\\n' if content else '') + tool_list() -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set function = call.function if call.function is defined else call -%}
        {{- '\\n' if content or not loop.first else '' -}}
        {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
        {%- if function.arguments is string -%}
            {{- function.arguments -}}
        {%- else -%}
            {{- function.arguments | tojson -}}
        {%- endif -%}
        {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
