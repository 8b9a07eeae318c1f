"""The judge of the clients' sessions notices faults."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from leyline_engine.contract import Receipt, TokenCounts
from leyline_lab.clients.cases import TASK, libraries
from leyline_lab.clients.stack import KEY, client_stack, run_client
from leyline_lab.clients.verdict import cache_problems, edit_problems, judge, session_problems
from leyline_lab.stand_ins.scripted_model import (
    Call,
    ModelTurn,
    Prompt,
    Reply,
    build_scripted,
    follow,
    follow_marks,
)


def turn(prompt: range, cached: int, session: str = "s", name: str = "m") -> ModelTurn:
    """A turn of a followed session whose answer is the token 999 and one without KV."""
    counts = TokenCounts(prompt=len(prompt), prefix=cached, prefilled=len(prompt) - cached)
    receipt = Receipt(message_id=name, session=session, tokens=counts)
    return ModelTurn(array("q", prompt), receipt, (999,), followed=True)


def test_tokens_that_were_known_must_be_cached() -> None:
    """A turn may not compute again what an earlier one had, but for the last token."""
    first = turn(range(10), 0)
    assert cache_problems([first, turn(range(20), 10)]) == []
    assert cache_problems([first, turn(range(20), 9)]) != []
    assert cache_problems([first, turn(range(10), 9)]) == []


def test_a_conversation_is_one_session_with_all_its_turns() -> None:
    """Two names, or a turn that isn't counted, are problems."""
    two = [turn(range(10), 0), turn(range(20), 10)]
    assert session_problems([{"id": "s", "turns": 2}], two) == []
    assert session_problems([{"id": "s", "turns": 1}], two) != []
    torn = [turn(range(10), 0), turn(range(20), 10, session="t")]
    assert session_problems([{"id": "s", "turns": 1}, {"id": "t", "turns": 1}], torn) != []


def test_an_appended_history_is_no_edit() -> None:
    """A turn that the proxy took for an edit is a problem, but for the first."""
    turns = [turn(range(10), 0, name="a"), turn(range(20), 10, name="b")]
    for edited, told in (("a", []), ("b", ["turn 1 was taken for an edited history"])):
        history = [
            {"receipt": {"message_id": name}, "edits": [{}] if name == edited else []}
            for name in ("a", "b")
        ]
        assert (
            edit_problems([{"history": history}, {"history": [{"receipt": None}]}], turns) == told
        )


def test_a_session_that_fails_is_told_in_full(tmp_path: Path) -> None:
    """A program that asks for another model's answer and for the world beyond is found out."""
    code = (
        "import os, urllib.request, httpx\n"
        "r = httpx.post(os.environ['ORIGIN'] + '/v1/chat/completions', json={'model': 'other',"
        " 'messages': [{'role': 'user', 'content': 'x'}]})\n"
        "urllib.request.urlopen('http://example.invalid/')\n"
    )
    files = build_scripted(tmp_path / "model")
    with client_stack(files, tmp_path / "place", follow(TASK, Reply("Done."))) as stack:
        python = str(libraries()[0].executable)
        told = {"ORIGIN": stack.place.origin, "KEY": KEY}
        ran = run_client([python, "-c", code], stack.place, told, timeout_s=60)
        problems = " ".join(judge(stack, ran, steps=1).problems)
        asks = frozenset({"example.invalid"})
        assert "example.invalid" not in " ".join(judge(stack, ran, steps=1, asks=asks).problems)
    for problem in ("exit status", "0 turns", "answered 404", "example.invalid", "notes.txt"):
        assert problem in problems


@pytest.mark.parametrize("tools", [True, False])
def test_replies_follow_the_conversation(tools: bool) -> None:
    """The replies in the prompt determine the next one; requests without the tools are aside."""
    write = Reply("Now.", (Call("write", {}),))
    script = follow("TASK", write, Reply("Done."), aside="Title")
    listed = '\n<tools>\n{"function": {"name": "write"}}\n</tools>' if tools else ""
    text = f"<|im_start|>system\nAgent.{listed}<|im_end|>\n<|im_start|>user\nTASK<|im_end|>\n"
    aside = (Reply("Title"), False)
    assert script(Prompt.of(text)) == ((write, True) if tools else aside)
    text += f"<|im_start|>assistant\n{write.spelled}<|im_end|>\n"
    assert script(Prompt.of(text)) == ((Reply("Done."), True) if tools else aside)
    assert script(Prompt.of(text.replace("TASK", "other"))) == aside


def test_a_system_prompt_may_speak_of_tools_itself() -> None:
    """The tools are those that the template lists at the end."""
    listed = '\n<tools>\n{"function": {"name": "write"}}\n</tools>'
    text = f"<|im_start|>system\nUse\n<tools>\nnone.\n</tools>{listed}<|im_end|>\n"
    assert Prompt.of(text).tools == {"write"}


def test_replies_follow_the_marks_of_a_growing_message() -> None:
    """A client with one message has come as far as the marks in it; other tasks are no steps."""
    script = follow_marks("TASK", "[seen]", Reply("One."), Reply("Two."))
    text = "<|im_start|>user\nTASK{}<|im_end|>\n"
    assert script(Prompt.of(text.format(""))) == (Reply("One."), True)
    assert script(Prompt.of(text.format(" [seen] 1"))) == (Reply("Two."), True)
    assert script(Prompt.of(text.format("").replace("TASK", "other"))) == (Reply("One."), False)
