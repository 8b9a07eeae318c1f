"""deepagents: an agent with the library's own tools."""

from __future__ import annotations

from deepagents import create_deep_agent
from deepagents.backends import LocalShellBackend
from langchain_openai import ChatOpenAI
from workbench import KEY, MODEL, ORIGIN, SYSTEM, TASK

model = ChatOpenAI(model=MODEL, base_url=f"{ORIGIN}/v1", api_key=KEY, max_retries=0)
agent = create_deep_agent(
    model, backend=LocalShellBackend(virtual_mode=False, inherit_env=True), system_prompt=SYSTEM
)
state = agent.invoke({"messages": [{"role": "user", "content": TASK}]})
print(state["messages"][-1].content)
