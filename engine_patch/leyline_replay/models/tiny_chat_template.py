"""The chat templates of the tiny models: ChatML with tools, one of them with thinking.

Without thinking, a longer conversation's text always starts with the shorter one's: no message is
rendered differently because of a later one, and contents are never stripped. With it, the user's
next message strips the thinking in front of it, as in the templates of Qwen3, DeepSeek and GLM.
"""

from __future__ import annotations

TOOL_CALL_OPEN = "<tool_call>"
TOOL_CALL_CLOSE = "</tool_call>"

_BEGINNING = """\
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
"""
_HEADER = """\
{%- for message in messages -%}
    {%- set role = 'system' if message.role == 'developer' else message.role -%}
    {{- '<|im_start|>' + role + '\\n' -}}
"""
_CONTENT = """\
    {%- set content = text(message.content) -%}
"""
_LAST_USER = """\
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set last.user = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
"""
_THOUGHT = """\
    {%- set content = text(message.content) -%}
    {%- if role == 'assistant' -%}
        {%- set thought = text(message.reasoning_content or message.reasoning) -%}
        {%- if not thought and '</think>' in content -%}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {%- if thought and loop.index0 > last.user -%}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
        {%- endif -%}
    {%- endif -%}
"""
_REST = """\
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

CHAT_TEMPLATE = _BEGINNING + _HEADER + _CONTENT + _REST
THINKING_CHAT_TEMPLATE = _BEGINNING + _LAST_USER + _HEADER + _THOUGHT + _REST
"""Shows the assistant's thinking after the user's last message, and no other. It is the message's
``reasoning_content`` or ``reasoning``, or lies in the content between ``<think>`` and ``</think>``.
"""
