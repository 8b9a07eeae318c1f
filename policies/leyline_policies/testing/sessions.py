"""Sessions to try a policy on: recorded ones cut into requests, and made-up ones."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from leyline_policies.policy import Message

Session = Sequence[Sequence[Message]]
"""The requests of a session in order, each the whole conversation so far.

A message that stays is best the very same object in each of them, as it is in the proxy.
"""

_PATHS = ("src/app.py", "src/store.py", "tests/test_app.py", "README.md")
_WORDS = (
    *("the", "cache", "keeps", "what", "a", "turn", "has", "read", "and", "moves", "it"),
    *("when", "history", "is", "edited", "later"),
)


def requests_of(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the requests that led to a conversation: one for each answer of the model.

    Messages after the last answer make one more.
    """
    ends = [
        index
        for index, message in enumerate(messages)
        if index and message.get("role") == "assistant"
    ]
    if not messages or messages[-1].get("role") != "assistant" or not ends:
        ends.append(len(messages))
    return [list(messages[:end]) for end in ends if end]


def synthetic_sessions(seed: int = 0, *, sessions: int = 4, turns: int = 12) -> list[Session]:
    """Return sessions of a made-up coding agent; the same ``seed`` gives the same ones.

    They hold the subjects of policies: long and repeated tool results, calls that fail and are
    tried again, several calls in one message answered out of order, reasoning, images, part lists,
    text in several scripts, and made-up keys and addresses.

    Args:
        sessions: number of sessions.
        turns: number of the model's answers in each.
    """
    return [
        requests_of(_Agent(random.Random(f"{seed}/{number}")).conversation(turns))
        for number in range(sessions)
    ]


class _Agent:
    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._calls = 0
        self._failed: tuple[str, dict[str, str]] | None = None

    def conversation(self, turns: int) -> list[Message]:
        system = {"role": "system", "content": f"You repair programs. {self._text(40)}"}
        messages: list[Message] = [system, {"role": "user", "content": self._task()}]
        for turn in range(turns):
            if turn == turns - 1 or self._dice.random() < 0.2:
                messages.append({"role": "assistant", "content": self._text(30)})
                messages.append({"role": "user", "content": self._task()})
            else:
                messages += self._step()
        return messages

    def _step(self) -> list[Message]:
        """Return an answer with one to three tool calls, and their results in any order."""
        chosen = [self._call() for _ in range(self._dice.choice((1, 1, 1, 2, 3)))]
        results = [self._result(*each) for each in chosen]
        self._dice.shuffle(results)
        message: Message = {
            "role": "assistant",
            "content": self._dice.choice((None, self._text(8))),
            "tool_calls": [_tool_call(*each) for each in chosen],
        }
        if self._dice.random() < 0.5:
            message["reasoning_content"] = self._text(25)
        return [message, *results]

    def _call(self) -> tuple[str, str, dict[str, str]]:
        self._calls += 1
        identifier = f"call_{self._calls}"
        if self._failed is not None and self._dice.random() < 0.7:
            (name, arguments), self._failed = self._failed, None
            return identifier, name, arguments
        name = self._dice.choice(("bash", "read_file", "read_file", "edit_file"))
        key, value = ("command", f"pytest -k {self._word()}")
        if name != "bash":
            key, value = ("path", self._dice.choice(_PATHS))
        return identifier, name, {key: value}

    def _result(self, identifier: str, name: str, arguments: dict[str, str]) -> Message:
        content: Any = self._text(self._dice.choice((3, 40, 40, 400, 400, 3000)))
        if self._dice.random() < 0.25:
            self._failed = (name, arguments)
            content = f"Error: {self._word()} is not what it should be"
        elif self._dice.random() < 0.15:
            content = [
                {"type": "text", "text": content},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            ]
        return {"role": "tool", "tool_call_id": identifier, "content": content}

    def _task(self) -> str:
        secret = f"sk-{self._dice.randrange(16**20):020x}"
        return self._dice.choice(
            (
                f"Please repair {self._dice.choice(_PATHS)}: {self._text(20)}",
                f"The key is {secret}, mail dev{self._dice.randrange(9)}@example.org when done.",
                f"Größe prüfen, 日本語のログ, שלום: {self._text(10)} 🙂",
            )
        )

    def _text(self, words: int) -> str:
        return " ".join(self._word() for _ in range(words))

    def _word(self) -> str:
        return self._dice.choice(_WORDS)


def _tool_call(identifier: str, name: str, arguments: dict[str, str]) -> dict[str, Any]:
    body = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": identifier, "type": "function", "function": body}
