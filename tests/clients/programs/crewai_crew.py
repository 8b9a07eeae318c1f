"""crewai: a crew of one agent with two tools."""

from __future__ import annotations

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from workbench import KEY, MODEL, ORIGIN, SYSTEM, TASK, run_command, write_file

model = LLM(model=f"openai/{MODEL}", base_url=f"{ORIGIN}/v1", api_key=KEY)
agent = Agent(
    role="Clerk",
    goal="Do what is asked.",
    backstory=SYSTEM,
    llm=model,
    tools=[tool(write_file), tool(run_command)],
)
task = Task(description=TASK, expected_output="What came of it.", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff())
