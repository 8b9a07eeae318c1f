"""The OpenAI SDK on chat completions: an agent's loop. STREAM=1 streams the answers."""

from __future__ import annotations

import json
import os

import openai
from workbench import KEY, MODEL, ORIGIN, SCHEMAS, SYSTEM, TASK, TOOLS

client = openai.OpenAI(base_url=f"{ORIGIN}/v1", api_key=KEY, max_retries=0)
tools = [
    {
        "type": "function",
        "function": {"name": name, "description": TOOLS[name].__doc__, "parameters": parameters},
    }
    for name, parameters in SCHEMAS.items()
]
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
while True:
    request = {"model": MODEL, "messages": messages, "tools": tools}
    if os.environ.get("STREAM"):
        with client.chat.completions.stream(**request) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**request).choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
