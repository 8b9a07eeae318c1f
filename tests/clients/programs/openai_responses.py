"""The OpenAI SDK on responses: an agent's loop.

STREAM=1 streams the answers, STORED=1 sends only what is new.
"""

from __future__ import annotations

import json
import os

import openai
from workbench import KEY, MODEL, ORIGIN, SCHEMAS, SYSTEM, TASK, TOOLS

client = openai.OpenAI(base_url=f"{ORIGIN}/v1", api_key=KEY, max_retries=0)
tools = [
    {"type": "function", "name": name, "description": TOOLS[name].__doc__, "parameters": parameters}
    for name, parameters in SCHEMAS.items()
]
items = [{"role": "user", "content": TASK}]
previous = None
while True:
    request = {"model": MODEL, "instructions": SYSTEM, "input": items, "tools": tools}
    if os.environ.get("STORED"):
        request |= {"store": True, "previous_response_id": previous}
    else:
        request |= {"store": False}
    if os.environ.get("STREAM"):
        with client.responses.stream(**request) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
    else:
        response = client.responses.create(**request)
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    if os.environ.get("STORED"):
        items, previous = [], response.id
    else:
        items += [item.model_dump(exclude_none=True, mode="json") for item in response.output]
    for call in calls:
        result = TOOLS[call.name](**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
print(response.output_text)
