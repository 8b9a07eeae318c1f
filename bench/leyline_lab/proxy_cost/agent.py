"""A made-up agent's session: calls, results of mixed sizes, and a tokenizer of source code."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from leyline_proxy.model.messages import Message
from leyline_proxy.render import ChatRenderer
from leyline_replay.models.tiny import train_bpe
from leyline_replay.text.chat import PromptEncoder

FRESH_CHARS = 600
"""Characters of a new result, the same at every size so that sizes can be compared."""
SYSTEM = "You are a careful software engineer. Read before you write, and run the tests. " * 2
TASK = "Find out why the cache loses tokens, and fix it."
_ARGUMENTS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": _ARGUMENTS}}
    for name in ("read_file", "shell")
]


def text_of_size(rng: random.Random, chars: int) -> str:
    """Return source lines, log lines and listings, of ``chars`` characters."""
    lines: list[str] = []
    for _ in range(chars // 20 + 1):
        number, word = rng.randrange(10**5), rng.choice(("cache", "token", "radix", "größe"))
        forms = (
            f'        return self._{word}["{number}"].get(value)  # see {word}.py',
            f"-rw-r--r-- 1 dev dev {number:>7} Mar 12 09:41 {word}_{number}.py",
            f"tests/test_{word}.py::test_case_{number} PASSED [{number % 100:>3}%]",
            f"src/{word}.py:{number}: error: expected {word}, found 0x{number:06x}",
        )
        lines.append(rng.choice(forms))
    return "\n".join(lines)[:chars]


def rounds(rng: random.Random, longest: int) -> Iterator[tuple[Message, Message]]:
    """Yield an assistant's call and its result of up to ``longest`` characters, without end."""
    for number in count():
        path = json.dumps({"path": f"src/module_{rng.randrange(999)}.py"})
        function = {"name": rng.choice(("read_file", "shell")), "arguments": path}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        said = f"Step {number}: " + text_of_size(rng, rng.choice((40, 150, 300)))
        chars = rng.choices((100, 400, 1500, 6000), (3, 4, 3, 1))[0]
        result = text_of_size(rng, min(chars, longest))
        yield (
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        )


def opening(task: str = TASK) -> list[Message]:
    """Return the messages with which a session begins."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]


def session_messages(renderer: ChatRenderer, tokens: int) -> list[Message]:
    """Return a session of about ``tokens`` tokens; it ends with a call, which is one too many."""
    messages = opening()
    length = len(renderer.render(messages, TOOLS).tokens)
    for said, result in rounds(random.Random(7), tokens // 5):
        length += len(renderer.encode(renderer.text([said, result], None)))
        messages.append(said)
        if length >= tokens and len(messages) > 4:
            break
        messages.append(result)
    return messages


def source_texts() -> Iterator[str]:
    """Yield source files of the standard library, in a fixed order, 3 MB in all."""
    remaining = 3_000_000
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")[:remaining]
        remaining -= len(text)
        yield text
        if remaining <= 0:
            return


def renderer_document() -> dict[str, Any]:
    """Return the shipped models' template and a tokenizer of source code, as an engine does.

    Not the shipped tokenizer, which is made for one task and cuts source code into more tokens.
    """
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = train_bpe(pieces, source_texts(), vocab_size=8192, max_context=131_072)
    return PromptEncoder(tokenizer).renderer_document()
