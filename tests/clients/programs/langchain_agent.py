"""langchain-openai: LangChain's agent over ChatOpenAI."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from workbench import KEY, MODEL, ORIGIN, SYSTEM, TASK, run_command, write_file

model = ChatOpenAI(model=MODEL, base_url=f"{ORIGIN}/v1", api_key=KEY, max_retries=0)
agent = create_agent(model, tools=[write_file, run_command], system_prompt=SYSTEM)
state = agent.invoke({"messages": [{"role": "user", "content": TASK}]})
print(state["messages"][-1].content)
