// mastra: an agent with two tools.
"use strict";

const { Agent } = require("@mastra/core/agent");
const { createTool } = require("@mastra/core/tools");
const { SYSTEM, TASK, TOOLS, model } = require("./workbench.cjs");

const tools = Object.fromEntries(
    Object.entries(TOOLS).map(([id, each]) => [id, createTool({ id, ...each })]),
);
const agent = new Agent({ id: "clerk", name: "Clerk", instructions: SYSTEM, model, tools });

async function main() {
    const ran = await agent.generate(TASK, { maxSteps: 10 });
    console.log(ran.text);
}

main();
