"""The Anthropic SDK: an agent's loop. STREAM=1 streams the answers."""

from __future__ import annotations

import os

import anthropic
from workbench import KEY, MODEL, ORIGIN, SCHEMAS, SYSTEM, TASK, TOOLS

client = anthropic.Anthropic(base_url=ORIGIN, api_key=KEY, max_retries=0)
tools = [
    {"name": name, "description": TOOLS[name].__doc__, "input_schema": parameters}
    for name, parameters in SCHEMAS.items()
]
assert [model.id for model in client.models.list()] == [MODEL]
messages = [{"role": "user", "content": TASK}]
while True:
    request = {
        "model": MODEL,
        "max_tokens": 4096,
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "tools": tools,
        "messages": messages,
    }
    counted = client.messages.count_tokens(
        **{name: value for name, value in request.items() if name != "max_tokens"}
    )
    if os.environ.get("STREAM"):
        with client.messages.stream(**request) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**request)
    used = message.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)
    messages.append({"role": "assistant", "content": message.content})
    if message.stop_reason != "tool_use":
        break
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": TOOLS[block.name](**block.input),
        }
        for block in message.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
print(message.content[-1].text)
