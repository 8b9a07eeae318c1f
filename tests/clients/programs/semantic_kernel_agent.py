"""semantic-kernel: a chat completion agent with a plugin of two functions."""

from __future__ import annotations

import asyncio

import openai
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
from workbench import KEY, MODEL, ORIGIN, SYSTEM, TASK, run_command, write_file


class Workbench:
    """A plugin of the two tools."""

    write_file = staticmethod(kernel_function(write_file))
    run_command = staticmethod(kernel_function(run_command))


async def main() -> None:
    """One task."""
    client = openai.AsyncOpenAI(base_url=f"{ORIGIN}/v1", api_key=KEY, max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
    agent = ChatCompletionAgent(service=service, instructions=SYSTEM, plugins=[Workbench()])
    print(await agent.get_response(messages=TASK))


asyncio.run(main())
