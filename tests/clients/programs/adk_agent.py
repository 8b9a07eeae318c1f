"""google-adk: an agent with two tools, over LiteLLM."""

from __future__ import annotations

import asyncio

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from workbench import KEY, MODEL, ORIGIN, SYSTEM, TASK, run_command, write_file

model = LiteLlm(model=f"openai/{MODEL}", api_base=f"{ORIGIN}/v1", api_key=KEY)
agent = Agent(name="clerk", model=model, instruction=SYSTEM, tools=[write_file, run_command])


async def main() -> None:
    """One task."""
    runner = InMemoryRunner(agent=agent)
    said = types.Content(role="user", parts=[types.Part(text=TASK)])
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="me")
    async for event in runner.run_async(user_id="me", session_id=session.id, new_message=said):
        for part in event.content.parts if event.content else ():
            print(part.text or "")


asyncio.run(main())
