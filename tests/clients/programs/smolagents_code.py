"""smolagents: an agent that acts in Python code, with two tools."""

from __future__ import annotations

from smolagents import CodeAgent, OpenAIServerModel, tool
from workbench import KEY, MODEL, ORIGIN, TASK, run_command, write_file

model = OpenAIServerModel(model_id=MODEL, api_base=f"{ORIGIN}/v1", api_key=KEY)
agent = CodeAgent(tools=[tool(write_file), tool(run_command)], model=model, max_steps=6)
print(agent.run(TASK))
