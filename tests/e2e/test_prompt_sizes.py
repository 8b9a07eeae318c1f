"""A prompt's size is that of its text, and a count answers what the request itself does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from support.stack import embedded_stack

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

RECALL = "leyline-recall"
CONTEXT = 8192
OPTIONS = {"pool_tokens": CONTEXT, "device": "cpu"}
SCREEN = "iVBORw0KGgo" + "A" * (24 * CONTEXT)
"""Data of a picture that alone is longer than any text that fits."""
NO_PICTURES = {"policy": "drop_images"}
SHORTER = {"policy": "drop_images | truncate_older_than:n=1,max_chars=80"}
LISTING = "".join(f"{number:04d} drwxr-xr-x build/module_{number}\n" for number in range(20))
Talk = list[dict[str, Any]]


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Proxy and embedded engine; policies come with the requests."""
    with embedded_stack(OPTIONS, log_level="error") as address:
        yield address


@pytest.fixture(scope="module")
def http(origin: str) -> Iterator[httpx.Client]:
    """A bare client."""
    with httpx.Client(base_url=origin, timeout=60) as client:
        yield client


def openai_of(address: str) -> openai.OpenAI:
    """OpenAI's client, without retries that would hide a failure."""
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def anthropic_of(address: str) -> anthropic.Anthropic:
    """Anthropic's client, without retries that would hide a failure."""
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


def screenshots(steps: int) -> Talk:
    """An agent's history with a picture in each result."""
    talk: Talk = [{"role": "user", "content": "Look into the folders."}]
    for step in range(steps):
        function = {"name": "look", "arguments": json.dumps({"at": step})}
        call = {"id": f"c{step}", "type": "function", "function": function}
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SCREEN}"}}
        words = {"type": "text", "text": f"{step}\n{LISTING}"}
        talk += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{step}", "content": [words, picture]},
        ]
    return talk


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_of_screenshots_goes_on_splicing(origin: str, *, stream: bool) -> None:
    """Text that a policy keeps out of the prompt doesn't count: edits splice at any size of the
    body, and the count of the same request is the number of tokens that the engine reads."""
    outcomes = []
    for steps in (2, 3):
        request: dict[str, Any] = {
            "model": RECALL,
            "messages": screenshots(steps),
            "max_tokens": 1,
            "extra_headers": {"x-leyline-session": f"screens-{stream}"},
            "extra_body": {"leyline": SHORTER},
        }
        counted = httpx.post(
            f"{origin}/v1/leyline/count_tokens",
            json={"model": RECALL, "messages": screenshots(steps), "leyline": SHORTER},
            headers=request["extra_headers"],
        ).json()
        with openai_of(origin) as sdk:
            if stream:
                chunks = [
                    *sdk.chat.completions.create(
                        **request, stream=True, stream_options={"include_usage": True}
                    )
                ]
                usage = chunks[-1].usage
                (account,) = (each.model_extra for each in chunks if each.model_extra)
            else:
                answer = sdk.chat.completions.create(**request)
                usage, account = answer.usage, answer.model_extra
        assert usage is not None
        assert account is not None
        assert counted["input_tokens"] == usage.prompt_tokens < 2000
        assert counted["context_management"]["original_input_tokens"] is None
        outcomes.append(account["leyline"]["outcome"])
    assert outcomes[1] == "spliced"


def chat(content: list[Any], **more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": RECALL, "messages": [{"role": "user", "content": content}], **more}


def messages(content: list[Any], **more: Any) -> dict[str, Any]:
    """The same for Anthropic's API."""
    return {**chat(content, **more), "max_tokens": 1}


def responses(content: list[Any], **more: Any) -> dict[str, Any]:
    """The same for the Responses API."""
    return {"model": RECALL, "input": [{"role": "user", "content": content}], **more}


IMAGE_URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SCREEN}"}}
SOUND = {"type": "input_audio", "input_audio": {"data": SCREEN, "format": "wav"}}
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": SCREEN},
}
INPUT_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{SCREEN}"}
APIS: dict[str, tuple[str, str, Callable[..., dict[str, Any]], dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", "/v1/leyline/count_tokens", chat, IMAGE_URL, "text"),
    "sound": ("/v1/chat/completions", "/v1/leyline/count_tokens", chat, SOUND, "text"),
    "messages": ("/v1/messages", "/v1/messages/count_tokens", messages, BLOCK, "text"),
    "responses": ("/v1/responses", "/v1/responses/input_tokens", responses, INPUT_IMAGE, "input"),
}


def words(api: str, text: str) -> dict[str, Any]:
    """A text in an API's form."""
    return {"type": "input_text" if api == "responses" else "text", "text": text}


def error_of(answer: httpx.Response) -> Mapping[str, Any]:
    """An answer's error, without the id of its request."""
    document: dict[str, Any] = answer.json()
    document.pop("request_id", None)
    return document


@pytest.mark.parametrize("api", APIS)
def test_a_count_is_refused_where_the_request_is(http: httpx.Client, api: str) -> None:
    """A picture or sound for an engine that reads text is no 0 in a count: the count has the status
    and the error of the request itself; without the picture, both succeed."""
    path, count_path, request, media, _ = APIS[api]
    body = request([words(api, "Hi."), media])
    ran, counted = http.post(path, json=body), http.post(count_path, json=body)
    assert ran.status_code == counted.status_code == 400, counted.text
    assert error_of(ran) == error_of(counted)
    assert "text parts only" in counted.text
    if api == "sound":
        return
    dropped = http.post(count_path, json={**body, "leyline": NO_PICTURES})
    plain = http.post(count_path, json=request([words(api, "Hi.")]))
    assert plain.json()["input_tokens"] < dropped.json()["input_tokens"] < 60


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_what_is_too_long_is_called_so(http: httpx.Client, api: str) -> None:
    """A text that no context of the engine holds gives an error with both numbers in a count, never
    an unknown template; and a request that is just too long for its window has a count."""
    _, count_path, request, _, _ = APIS[api]
    text = "word " * (4 * CONTEXT)
    answer = http.post(count_path, json=request([words(api, text)]))
    assert answer.status_code == 400, answer.text
    assert "too long" in answer.text
    assert f"{CONTEXT:,}" in answer.text
    assert f"{len(text) // 1000}," in answer.text
    code = answer.json().get("leyline", answer.json()["error"])["code"]
    assert code == "context_length_exceeded"
    longer = http.post(count_path, json=request([words(api, "word " * (CONTEXT + 10))]))
    assert longer.json()["input_tokens"] > CONTEXT


def test_the_official_clients_meet_both(origin: str) -> None:
    """Anthropic's and OpenAI's clients raise the same error for the count and the request."""
    given = messages([BLOCK, words("messages", "hi")])
    asked = responses([INPUT_IMAGE, words("responses", "hi")])
    with anthropic_of(origin) as theirs, openai_of(origin) as ours:
        found = []
        for call in (
            lambda: theirs.messages.count_tokens(model=RECALL, messages=given["messages"]),
            lambda: theirs.messages.create(**given),
            lambda: theirs.messages.create(**given, stream=True),
        ):
            with pytest.raises(anthropic.BadRequestError) as refused:
                call()
            found.append(refused.value.body["error"])  # type: ignore[index]
        assert found[0] == found[1] == found[2]
        shown = []
        for ask in (
            lambda: ours.responses.input_tokens.count(**asked),
            lambda: ours.responses.create(**asked),
            lambda: ours.responses.create(**asked, stream=True),
        ):
            with pytest.raises(openai.BadRequestError) as failed:
                ask()
            shown.append(failed.value.body)
        assert shown[0] == shown[1] == shown[2]


def test_truncation_works_beyond_any_size(http: httpx.Client) -> None:
    """``truncation: auto`` drops what no context holds, though it is too long to be counted."""
    old = {"role": "user", "content": "word " * (4 * CONTEXT)}
    body = {"model": RECALL, "input": [old, {"role": "user", "content": "Hi."}], "store": False}
    assert http.post("/v1/responses", json=body).status_code == 400
    answer = http.post("/v1/responses", json={**body, "truncation": "auto", "max_output_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] < 100


class _Seeing:
    """The embedded engine as one that takes pictures: in its tokens a picture is one word."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ("/tokenize", "/v1/chat/completions"):
            await self._engine(scope, receive, send)
            return
        body = json.loads(await Request(scope, receive).body())
        for message in body.get("messages") or ():
            if isinstance(message.get("content"), list):
                message["content"] = [
                    part if part["type"] == "text" else {"type": "text", "text": "picture "}
                    for part in message["content"]
                ]
        raw, sent = json.dumps(body).encode(), list[bytes]()

        async def changed() -> Any:
            if sent:
                return await receive()
            sent.append(raw)
            return {"type": "http.request", "body": raw}

        kept = [item for item in scope["headers"] if item[0] != b"content-length"]
        await self._engine({**scope, "headers": kept}, changed, send)


def test_pictures_that_an_engine_takes_are_never_counted_as_nothing() -> None:
    """An engine that reads pictures but does not report their tokens makes a count 501 (which
    clients don't retry), and the request is served."""
    engine = create_embedded_engine("replay", OPTIONS)
    seeing = _Seeing(engine)
    app = create_app(Settings(log_level="error"), engine_app=seeing)
    with serving(app) as address, openai_of(address) as sdk:
        body = chat([words("chat", "Hi."), IMAGE_URL])
        answer = httpx.post(f"{address}/v1/leyline/count_tokens", json=body)
        assert answer.status_code == 501, answer.text
        assert answer.headers["x-should-retry"] == "false"
        assert "pictures" in answer.json()["error"]["message"]
        served = sdk.chat.completions.create(**body, max_tokens=1)
        assert served.usage is not None
        with anthropic_of(address) as theirs, pytest.raises(anthropic.APIStatusError) as failed:
            theirs.messages.count_tokens(model=RECALL, messages=messages([BLOCK])["messages"])
        assert failed.value.status_code == 501
