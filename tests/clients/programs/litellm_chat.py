"""LiteLLM's SDK: an agent's loop over ``completion``, streamed."""

from __future__ import annotations

import json

import litellm
from workbench import KEY, MODEL, ORIGIN, SCHEMAS, SYSTEM, TASK, TOOLS

litellm.telemetry = False
tools = [
    {
        "type": "function",
        "function": {"name": name, "description": TOOLS[name].__doc__, "parameters": parameters},
    }
    for name, parameters in SCHEMAS.items()
]
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
while True:
    chunks = litellm.completion(
        model=f"openai/{MODEL}",
        api_base=f"{ORIGIN}/v1",
        api_key=KEY,
        messages=messages,
        tools=tools,
        stream=True,
        num_retries=0,
    )
    message = litellm.stream_chunk_builder(list(chunks)).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
