"""openai-agents: a runner with two function tools. API=responses or chat."""

from __future__ import annotations

import asyncio
import os

import agents
import openai
from workbench import KEY, MODEL, ORIGIN, SYSTEM, TASK, run_command, write_file

API = {
    "chat": agents.OpenAIChatCompletionsModel,
    "responses": agents.OpenAIResponsesModel,
}


async def main() -> None:
    """One run, streamed."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{ORIGIN}/v1", api_key=KEY, max_retries=0)
    agent = agents.Agent(
        name="worker",
        instructions=SYSTEM,
        tools=[agents.function_tool(write_file), agents.function_tool(run_command)],
        model=API[os.environ["API"]](model=MODEL, openai_client=client),
    )
    result = agents.Runner.run_streamed(agent, TASK)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
