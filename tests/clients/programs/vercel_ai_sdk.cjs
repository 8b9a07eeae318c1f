// Vercel's AI SDK: its agent's loop with two tools. STREAM=1 streams the answers.
"use strict";

const { generateText, stepCountIs, streamText, tool } = require("ai");
const { SYSTEM, TASK, TOOLS, model } = require("./workbench.cjs");

const tools = Object.fromEntries(Object.entries(TOOLS).map(([name, each]) => [name, tool(each)]));
const request = { model, tools, system: SYSTEM, prompt: TASK, stopWhen: stepCountIs(10) };

async function main() {
    const ran = process.env.STREAM ? streamText(request) : await generateText(request);
    console.log(await ran.text);
}

main();
