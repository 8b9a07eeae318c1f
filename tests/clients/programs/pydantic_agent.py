"""pydantic-ai: an agent with two tools, over chat completions."""

from __future__ import annotations

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from workbench import KEY, MODEL, ORIGIN, SYSTEM, TASK, run_command, write_file

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{ORIGIN}/v1", api_key=KEY))
agent = Agent(model, system_prompt=SYSTEM, tools=[write_file, run_command])
print(agent.run_sync(TASK).output)
