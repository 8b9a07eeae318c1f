// The common part of all programs in JavaScript: two tools that really act, and the server's address.
"use strict";

const { spawnSync } = require("node:child_process");
const { writeFileSync } = require("node:fs");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const { ORIGIN, MODEL, TASK, KEY } = process.env;
const SYSTEM =
    "You are a careful agent in a folder of a user. You write files and run commands, one after " +
    "the other, and look at what came of them before you go on.";

const provider = createOpenAICompatible({ name: "leyline", baseURL: `${ORIGIN}/v1`, apiKey: KEY });

const TOOLS = {
    write_file: {
        description: "Write a text file.",
        inputSchema: z.object({ path: z.string(), content: z.string() }),
        execute: async ({ path, content }) => {
            writeFileSync(path, content);
            return `${content.length} characters written to ${path}`;
        },
    },
    run_command: {
        description: "Run a shell command and give what it prints.",
        inputSchema: z.object({ command: z.string() }),
        execute: async ({ command }) => {
            const ran = spawnSync("sh", ["-c", command], { encoding: "utf8", timeout: 30000 });
            return `exit status ${ran.status}\n${ran.stdout}${ran.stderr}`;
        },
    },
};

module.exports = { SYSTEM, TASK, TOOLS, model: provider.chatModel(MODEL) };
