"""strands: an agent with two tools, over chat completions."""

from __future__ import annotations

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from workbench import KEY, MODEL, ORIGIN, SYSTEM, TASK, run_command, write_file

model = OpenAIModel(client_args={"base_url": f"{ORIGIN}/v1", "api_key": KEY}, model_id=MODEL)
agent = Agent(model, tools=[tool(write_file), tool(run_command)], system_prompt=SYSTEM)
print(agent(TASK))
