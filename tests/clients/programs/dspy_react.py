"""dspy: ReAct, whose every request is one user message with the whole trajectory."""

from __future__ import annotations

import dspy
from workbench import KEY, MODEL, ORIGIN, TASK, run_command, write_file

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=f"{ORIGIN}/v1", api_key=KEY, cache=False))
agent = dspy.ReAct("task -> answer", tools=[write_file, run_command])
print(agent(task=TASK).answer)
