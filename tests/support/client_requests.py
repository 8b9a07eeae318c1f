"""Requests that real clients send, through the official SDKs to a proxy in front of any engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import anthropic
import openai
from support.overflow_words import ANTHROPIC_CLIENTS, OPENAI_CLIENTS

ASKED = "Read the settings of the first file, line by line, and report what each of them says. " * 3
LATE = "From here on write all of your answers in plain English words."
LINE = "A line of a file that is far too long for the model.\n"
APIS = ("chat", "messages", "responses", "completions")
Talk = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Answered:
    """The parts of an answer that a client reads."""

    text: str
    ended: str
    prompt: int
    cached: int
    generated: int


class ClientRequests:
    """The SDKs of OpenAI and Anthropic on one proxy; each request is a session of its own."""

    def __init__(self, origin: str, model: str) -> None:
        self._model = model
        self._gpt = openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0)
        self._claude = anthropic.Anthropic(base_url=origin, api_key="none", max_retries=0)
        self._numbers = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._gpt.close()
        self._claude.close()

    def chat(self, talk: Talk, *, session: str = "", **members: Any) -> Answered:
        """A chat completion in one piece."""
        return self._chat(talk, False, session, members)

    def messages(self, talk: Talk, *, session: str = "", **members: Any) -> Answered:
        """A message in one piece."""
        return self._message(talk, False, session, members)

    def ask(self, api: str, talk: Talk, limit: int, *, stream: bool, session: str) -> Answered:
        """Ask one API for at most ``limit`` tokens."""
        if api == "chat":
            return self._chat(talk, stream, session, {"max_tokens": limit})
        if api == "messages":
            return self._message(talk, stream, session, {"max_tokens": limit})
        if api == "responses":
            return self._response(talk, stream, session, limit)
        return self._completion(talk[-1]["content"], stream, limit)

    def prewarm(self, api: str, *, stream: bool) -> Answered:
        """The answer to a request for 0 tokens."""
        return self.ask(api, _warm(api, stream), 0, stream=stream, session=f"warm-{api}-{stream}")

    def after_prewarm(self, api: str, *, stream: bool) -> Answered:
        """The answer to the same prompt, in the same session."""
        return self.ask(api, _warm(api, stream), 4, stream=stream, session=f"warm-{api}-{stream}")

    def late(self, role: str) -> tuple[Answered, Answered]:
        """The answers to a conversation without and with a late message of ``role``."""
        opening = {"role": "system", "content": "You read settings."}
        before = [opening, {"role": "user", "content": ASKED}]
        after = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Again."}]
        instruction = {"role": role, "content": LATE}
        without = self.chat([*before, *after], max_tokens=2)
        return without, self.chat([*before, instruction, *after], max_tokens=2)

    def too_long(self, text: str, *, stream: bool) -> Iterator[tuple[str, int, int, Any]]:
        """Yield the APIs with the two numbers of the error that their SDK raises, and the error."""
        for api in APIS:
            try:
                self.ask(api, [{"role": "user", "content": text}], 4, stream=stream, session="")
            except (openai.BadRequestError, anthropic.BadRequestError) as error:
                found: Any = error.body
                message = found["error"]["message"] if api == "messages" else found["message"]
                numbers = [int(word) for word in message.split() if word.isdigit()]
                yield api, max(numbers), min(numbers), error
            else:
                raise AssertionError(f"{api} takes a prompt of {len(text)} characters")

    def _chat(self, talk: Talk, stream: bool, session: str, members: Mapping[str, Any]) -> Answered:
        own = {"max_tokens": members["max_tokens"]}
        extra = {name: value for name, value in members.items() if name != "max_tokens"}
        asked: Any = {"model": self._model, "messages": talk, "temperature": 0, **own}
        asked |= {"extra_headers": self._session(session), "extra_body": extra}
        if not stream:
            answer = self._gpt.chat.completions.create(**asked)
            choice = answer.choices[0]
            return _counted(answer.usage, choice.message.content or "", choice.finish_reason)
        options = {"include_usage": True}
        chunks = [*self._gpt.chat.completions.create(**asked, stream=True, stream_options=options)]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        (ended,) = (choice.finish_reason for choice in choices if choice.finish_reason)
        return _counted(chunks[-1].usage, text, ended)

    def _completion(self, prompt: str, stream: bool, limit: int) -> Answered:
        asked: Any = {"model": self._model, "prompt": prompt, "max_tokens": limit}
        if not stream:
            answer = self._gpt.completions.create(**asked)
            return _counted(answer.usage, answer.choices[0].text, answer.choices[0].finish_reason)
        options = {"include_usage": True}
        chunks = [*self._gpt.completions.create(**asked, stream=True, stream_options=options)]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        (ended,) = (choice.finish_reason for choice in choices if choice.finish_reason)
        return _counted(chunks[-1].usage, "".join(choice.text for choice in choices), ended)

    def _message(
        self, talk: Talk, stream: bool, session: str, members: Mapping[str, Any]
    ) -> Answered:
        asked: Any = {"model": self._model, "messages": talk, **members}
        asked |= {"extra_headers": self._session(session), "extra_body": {"temperature": 0}}
        if stream:
            with self._claude.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = self._claude.messages.create(**asked)
        text = "".join(block.text for block in answer.content)
        usage = answer.usage
        cached = usage.cache_read_input_tokens
        prompt = usage.input_tokens + cached
        return Answered(text, answer.stop_reason, prompt, cached, usage.output_tokens)

    def _response(self, talk: Talk, stream: bool, session: str, limit: int) -> Answered:
        asked: Any = {"model": self._model, "input": talk, "max_output_tokens": limit}
        asked |= {"extra_headers": self._session(session), "temperature": 0}
        if stream:
            answer = [*self._gpt.responses.create(**asked, stream=True)][-1].response
        else:
            answer = self._gpt.responses.create(**asked)
        usage = answer.usage
        cached = usage.input_tokens_details.cached_tokens
        text, ended = answer.output_text, answer.status
        return Answered(text, ended, usage.input_tokens, cached, usage.output_tokens)

    def _session(self, name: str) -> dict[str, str]:
        return {"x-leyline-session": name or f"alone-{next(self._numbers)}"}


def plain(content: str | None) -> Talk:
    """A conversation with an answer that says nothing."""
    asked = {"role": "user", "content": ASKED}
    return [asked, {"role": "assistant", "content": content}, asked]


def results() -> dict[str, Talk]:
    """Conversations with a tool's result that says nothing, in the ways of clients."""
    function = {"name": "read_config", "arguments": '{"name": "alpha"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    calls: Talk = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    silent: Talk = [calls[0], {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "call_1"}
    end = {"role": "user", "content": "And?"}
    return {
        "null": [*calls, {**result, "content": None}, end],
        "empty": [*calls, {**result, "content": ""}, end],
        "no parts": [*calls, {**result, "content": []}, end],
        "absent": [*silent, result, end],
    }


def check_compacts(api: str, error: openai.BadRequestError | anthropic.BadRequestError) -> None:
    """Check that all clients of the API would compact on its error, by its own field."""
    found: Any = error.body
    if api == "messages":
        inner = found["error"]
        for client in ANTHROPIC_CLIENTS:
            assert client.recognises(400, inner["type"], inner["message"]), client.name
        return
    fields = {"chat": "messages", "responses": "input", "completions": "prompt"}
    assert (found["code"], found["param"]) == ("context_length_exceeded", fields[api])
    for other in OPENAI_CLIENTS:
        assert other.recognises(400, found["code"], found["message"]), other.name


def _warm(api: str, stream: bool) -> Talk:
    return [{"role": "user", "content": f"{api}, {stream}: {ASKED}"}]


def _counted(usage: Any, text: str, ended: str) -> Answered:
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Answered(text, ended, usage.prompt_tokens, cached, usage.completion_tokens)
