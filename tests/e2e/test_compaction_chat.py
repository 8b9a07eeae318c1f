"""``leyline.compact``: a summary in place of a long chat, by the OpenAI SDK and a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from compaction_kit import ANSWER, SUMMARY, SYSTEM, TASK, chat, compacting_stack, prompts

from leyline_lab.stand_ins.scripted_model import SCRIPTED, ScriptedModel, build_scripted

Stack = tuple[openai.OpenAI, ScriptedModel]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The SDK's client of a proxy, and the model behind it."""
    files = build_scripted(tmp_path_factory.mktemp("model") / "scripted")
    options = {"policy": "redact:pattern=zebra-[0-9]+"}
    with (
        compacting_stack(Path(files), **options) as (origin, model),
        openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0) as sdk,
    ):
        yield sdk, model


def ask(
    sdk: openai.OpenAI, messages: list[Any], *, stream: bool = False, **options: Any
) -> tuple[str, dict[str, Any]]:
    """One turn: its text, and its account."""
    session = options.pop("session", None)
    answer: Any = sdk.chat.completions.create(
        model=SCRIPTED,
        messages=messages,
        max_tokens=60,
        stream=stream,
        extra_headers={"x-leyline-session": session} if session else {},
        extra_body={"leyline": options},
    )
    if not stream:
        return answer.choices[0].message.content, answer.model_extra["leyline"]
    chunks = list(answer)
    (account,) = [c.model_extra["leyline"] for c in chunks if "leyline" in c.model_extra]
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), account


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_chat_is_answered_from_its_summary(stack: Stack, stream: bool) -> None:
    """The model gets the whole chat once, for the summary, and then only what stands in its place;
    the client sends that back, and the session goes on."""
    sdk, model = stack
    before = len(model.admitted)
    text, account = ask(
        sdk, chat(task=f"{TASK} {stream}"), stream=stream, compact={"threshold_tokens": 500}
    )
    asked, compacted = prompts(model)[before:]
    told = account["compaction"]
    assert text == ANSWER
    assert (told["compacted"], told["reason"], told["paused"]) == (True, None, False)
    assert [role for role, _ in asked.messages].count("tool") == 3
    standing = told["messages"]
    assert standing[0] == {"role": "user", "content": f"{TASK} {stream}"}
    assert standing[1]["content"].endswith(f"\n\n{SUMMARY}")
    assert compacted.messages == (
        ("system", SYSTEM),
        *((each["role"], each["content"]) for each in standing),
    )
    assert told["prompt_tokens"] > 500 > account["tokens"]["prompt"]
    told_of = [{"role": "system", "content": SYSTEM}, *standing]
    spoken = [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    _, later = ask(sdk, [*told_of, *spoken], compact={"threshold_tokens": 500})
    assert later["session"] == account["session"]
    assert later["turn_index"] == account["turn_index"] + 1 == 2
    assert later["tokens"]["prefix"] >= account["tokens"]["prompt"]
    assert later["compaction"] == {
        "compacted": False,
        "reason": "below_threshold",
        "prompt_tokens": later["tokens"]["prompt"],
    }


def test_the_summary_is_written_on_the_sessions_own_cache(stack: Stack) -> None:
    """The question comes after the conversation as it stands, of which the engine prefills nothing
    again; the answer's turn is in the same session."""
    sdk, _ = stack
    messages = chat(task="Share the cache.")
    _, first = ask(sdk, messages, session="shared")
    messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "More."}]
    _, account = ask(sdk, messages, session="shared", compact={"threshold_tokens": 500})
    usage = account["compaction"]["usage"]
    assert usage["cached_tokens"] >= first["tokens"]["prompt"]
    assert account["session"] == first["session"] == "shared"
    assert (first["turn_index"], account["turn_index"]) == (0, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_pause_ends_the_answer_after_the_summary(stack: Stack, stream: bool) -> None:
    """The answer has no words, and nothing else was asked of the model."""
    sdk, model = stack
    before = len(model.admitted)
    text, account = ask(
        sdk,
        chat(task=f"Pause {stream}."),
        stream=stream,
        compact={"threshold_tokens": 500, "pause": True, "instructions": "Name the zoo."},
    )
    (asked,) = prompts(model)[before:]
    assert text == ""
    assert account["compaction"]["paused"]
    assert account["compaction"]["messages"][-1]["content"].endswith(SUMMARY)
    assert asked.messages[-1][1].endswith("Write the summary alone.\n\nName the zoo.")


def test_what_a_policy_takes_out_is_in_no_summary(stack: Stack) -> None:
    """Policies run before: neither the summary's prompt nor what is kept has a redacted text."""
    sdk, model = stack
    before = len(model.admitted)
    messages = chat(task="The code is zebra-4711.")
    _, account = ask(sdk, messages, compact={"threshold_tokens": 500})
    assert account["compaction"]["compacted"]
    for prompt in prompts(model)[before:]:
        assert "zebra-4711" not in str(prompt.messages)
        assert "The code is " in str(prompt.messages)
    assert "zebra" not in str(account)


def test_a_forgotten_message_and_one_in_quarantine_are_in_no_summary(stack: Stack) -> None:
    """Neither the prompt of the summary nor what is kept has them."""
    sdk, model = stack
    messages = [
        *chat(task="Forget giraffe."),
        {"role": "user", "content": "Isolate elephant."},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Keep tiger."},
    ]
    ask(sdk, messages, session="zoo")
    place = str(sdk.base_url).rstrip("/") + "/leyline/sessions/zoo/quarantine"
    demand = {"messages": [len(messages) - 3], "reason": "other"}
    assert httpx.post(place, json=demand, timeout=30).status_code == 200
    messages[1] = {**messages[1], "leyline": {"forget": True}}
    before = len(model.admitted)
    _, account = ask(sdk, messages, session="zoo", compact={"threshold_tokens": 500})
    ran = [str(prompt.messages) for prompt in prompts(model)[before:]]
    asked, compacted = (prompt for prompt in ran if SYSTEM in prompt)  # not the forget's own
    for word in ("giraffe", "elephant"):
        assert word not in str(ran) + str(account)
    assert "tiger" in asked
    assert "tiger" in compacted
    assert account["compaction"]["messages"][-2]["content"] == "Keep tiger."


def test_a_summary_alone_is_not_compacted_again(stack: Stack) -> None:
    """Above the threshold, too, a lone message or summary isn't worth another turn."""
    sdk, model = stack
    before = len(model.admitted)
    messages = [{"role": "user", "content": "Look. " * 200}]
    text, account = ask(sdk, messages, compact={"threshold_tokens": 100})
    assert text == ANSWER
    assert account["compaction"]["reason"] == "nothing_to_compact"
    assert len(model.admitted) == before + 1


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ({"threshold_tokens": 0}, "leyline.compact.threshold_tokens"),
        ({"threshold_tokens": -5}, "leyline.compact.threshold_tokens"),
        ({"threshold_tokens": "9"}, "leyline.compact.threshold_tokens"),
        ({"threshold": 9}, "leyline.compact"),
        ({"pause": 1}, "leyline.compact.pause"),
        ({"instructions": "x" * 20_000}, "leyline.compact.instructions"),
        ([], "leyline.compact"),
    ],
)
def test_mistakes_in_the_option_name_the_field(stack: Stack, option: Any, field: str) -> None:
    """A 400, and nothing runs."""
    sdk, model = stack
    before = len(model.admitted)
    with pytest.raises(openai.BadRequestError) as raised:
        ask(sdk, chat(), compact=option)
    assert raised.value.param == field
    assert field in str(raised.value)
    assert len(model.admitted) == before


def test_two_wishes_are_one_too_many(stack: Stack) -> None:
    """The option and ``context_management`` can't both ask for it."""
    sdk, _ = stack
    with pytest.raises(openai.BadRequestError, match="both ask for a compaction"):
        sdk.chat.completions.create(
            model=SCRIPTED,
            messages=[{"role": "user", "content": "Hello."}],
            extra_body={
                "leyline": {"compact": {"threshold_tokens": 5}},
                "context_management": {"edits": [{"type": "compact_20260112"}]},
            },
        )
