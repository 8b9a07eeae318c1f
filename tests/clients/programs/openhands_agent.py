"""openhands-sdk: its agent with the terminal and the file editor."""

from __future__ import annotations

from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from workbench import KEY, MODEL, ORIGIN, TASK

model = LLM(model=f"openai/{MODEL}", base_url=f"{ORIGIN}/v1", api_key=KEY)
agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
conversation = Conversation(agent=agent, workspace=Path.cwd())
conversation.send_message(TASK)
conversation.run()
