"""Sessions of real clients that end on other gateways: the SDKs and the real engine, with a chat
template that is as strict as those of current models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from starlette.applications import Starlette

from leyline_lab.stand_ins.random_models import RandomKind, build_random
from leyline_lab.stand_ins.serving import check_clean, engine_tokenizer, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_replay.factory import create_engine_app

TEMPLATE = """
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('Late.') }}{% endif %}
{%- if message.role in ('system', 'user', 'assistant', 'tool') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Refuses instructions after the first message, and leaves out roles that it doesn't know."""

MODEL = "strict"
LATE = "From now on, answer in one word."
USER = {"role": "user", "content": "What is in the folder?"}
ANSWER = {"role": "assistant", "content": "A parser."}


class Stack(NamedTuple):
    """A proxy and its engine."""

    origin: str
    engine: Starlette

    def size(self, text: str) -> int:
        """The tokens of a text."""
        return len(engine_tokenizer(self.engine)(text)["input_ids"])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A proxy before an engine with this template."""
    files = build_random(RandomKind.LLAMA, tmp_path_factory.mktemp("strict"))
    (files / "chat_template.jinja").write_text(TEMPLATE.strip())
    engine = create_engine_app(
        model=str(files), served_name=MODEL, device="cpu", pool_tokens=16_384
    )
    with serving(create_app(Settings(log_level="error"), engine_app=engine)) as origin:
        yield Stack(origin, engine)
    check_clean(engine)


@pytest.fixture(scope="module")
def messages(stack: Stack) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client."""
    with anthropic.Anthropic(api_key="none", base_url=stack.origin, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def chat(stack: Stack) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    address = f"{stack.origin}/v1"
    with openai.OpenAI(api_key="none", base_url=address, max_retries=0) as client:
        yield client


def reminded(stack: Stack) -> int:
    """Tokens of the late instruction, as a user's message."""
    text = f"<system-reminder>\n{LATE}\n</system-reminder>"
    return stack.size(f"<|im_start|>user\n{text}<|im_end|>\n")


@pytest.mark.parametrize("stream", [False, True])
def test_instructions_within_a_conversation_of_messages(
    stack: Stack, messages: anthropic.Anthropic, stream: bool
) -> None:
    """They reach the model in their place, and what comes before them is still in the cache."""
    talk: list[Any] = [USER, ANSWER, {"role": "user", "content": "Go on."}]
    late: list[Any] = [*talk, {"role": "system", "content": LATE}]
    asked = {"model": MODEL, "max_tokens": 4, "system": f"Be brief. {stream}"}
    messages.messages.create(messages=talk, **asked)
    if stream:
        with messages.messages.stream(messages=late, **asked) as events:
            usage = events.get_final_message().usage
    else:
        usage = messages.messages.create(messages=late, **asked).usage
    sizes = [
        messages.messages.count_tokens(
            messages=each, model=MODEL, system=asked["system"]
        ).input_tokens
        for each in (talk, late)
    ]
    assert sizes[1] - sizes[0] == reminded(stack)
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == sizes[1]
    assert (usage.cache_read_input_tokens or 0) > sizes[0] - 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_developer_reaches_the_model(stack: Stack, chat: openai.OpenAI, stream: bool) -> None:
    """A template may leave a developer's message out: it is a system message first, and a reminder
    later, in chat completions and responses alike."""
    first, late = ({"role": "developer", "content": text} for text in ("Be brief.", LATE))
    talk: list[Any] = [first, USER, ANSWER, late, USER]
    shown = [{**first, "role": "system"}, USER, ANSWER, USER]
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in shown)
    size = stack.size(f"{text}<|im_start|>assistant\n") + reminded(stack)
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    answer: Any = chat.chat.completions.create(
        model=MODEL, messages=talk, max_tokens=4, stream=stream, **options
    )
    usage = [chunk.usage for chunk in answer][-1] if stream else answer.usage
    assert usage.prompt_tokens == size
    response: Any = chat.responses.create(
        model=MODEL, input=talk, max_output_tokens=4, stream=stream
    )
    ended = list(response)[-1].response if stream else response
    assert ended.usage.input_tokens == size


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_goes_on_where_it_was_begun(
    stack: Stack, messages: anthropic.Anthropic, stream: bool
) -> None:
    """The prompt ends with the beginning, without an end of the message or another one after it."""
    begun: list[Any] = [USER, {"role": "assistant", "content": "The folder holds"}]
    if stream:
        with messages.messages.stream(model=MODEL, max_tokens=4, messages=begun) as events:
            usage = events.get_final_message().usage
    else:
        usage = messages.messages.create(model=MODEL, max_tokens=4, messages=begun).usage
    prompt = (
        f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\nThe folder holds"
    )
    read = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert read == stack.size(prompt)
    assert read == messages.messages.count_tokens(model=MODEL, messages=begun).input_tokens


def test_characters_of_a_framed_text_cannot_be_named(
    chat: openai.OpenAI, messages: anthropic.Anthropic
) -> None:
    """An edit by characters of a message that is sent in a frame is refused by its field: it would
    concern others than the caller's. One of another message is carried out."""
    talk: list[Any] = [USER, ANSWER, {"role": "system", "content": LATE}, USER]
    for index, status in ((2, 400), (0, 200)):
        edit = {"message": index, "chars": [0, 4], "replacement": "", "mode": "forget"}
        asked: dict[str, Any] = {"model": MODEL, "messages": talk, "max_tokens": 2}
        asked["extra_body"] = {"leyline": {"edits": [edit]}}
        for create in (chat.chat.completions.create, messages.messages.create):
            if status == 200:
                create(**asked)
                continue
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
                create(**asked)
            assert "leyline.edits[0].chars" in str(refused.value)


def test_an_edit_of_no_message_is_refused_beside_a_framed_text(chat: openai.OpenAI) -> None:
    """An edit by characters whose message is no number is the caller's mistake, not a failure."""
    talk: list[Any] = [USER, ANSWER, {"role": "system", "content": LATE}, USER]
    edit = {"message": [2], "chars": [0, 4], "replacement": "", "mode": "forget"}
    with pytest.raises(openai.BadRequestError, match=r"leyline\.edits\[0\]\.message"):
        chat.chat.completions.create(
            model=MODEL, messages=talk, max_tokens=2, extra_body={"leyline": {"edits": [edit]}}
        )
