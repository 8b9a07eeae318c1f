"""dspy: ReAct, whose every request is one user message with the whole trajectory.

Nothing but a name shows that its requests belong together.
"""

from __future__ import annotations

from uuid import uuid4

import dspy
from workbench import KEY, MODEL, ORIGIN, TASK, run_command, write_file

model = dspy.LM(
    f"openai/{MODEL}",
    api_base=f"{ORIGIN}/v1",
    api_key=KEY,
    cache=False,
    extra_headers={"x-leyline-session": uuid4().hex},
)
dspy.configure(lm=model)
agent = dspy.ReAct("task -> answer", tools=[write_file, run_command])
print(agent(task=TASK).answer)
