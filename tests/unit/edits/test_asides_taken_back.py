"""Asides in a turn's messages: what the model wrote goes where the client's answer goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leyline_engine.contract import Mode
from leyline_policies import Message
from leyline_policies.stubs import address_of
from leyline_proxy.edits.materialised import Recall
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.asides import Anchor, Aside, RecallCall, RecalledTexts, tokens_in
from leyline_proxy.model.messages import fingerprint
from leyline_proxy.model.prepared import Quarantined
from leyline_proxy.request.declared import DeclaredEdit

TEXT = "001 drwxr-xr-x build\n" * 30
ADDRESS = address_of(TEXT)
SAID, THOUGHT, REST = "The door code is 4711. ", "I remember the code 4711.", "The build is done."


def aside(text: str = SAID, number: int = 0, own: tuple[str, ...] = ()) -> Aside:
    """A recall that led to the answer to the first question."""
    call = RecallCall(f"r{number}", f'{{"address":"{ADDRESS}"}}', 0, ADDRESS)
    return Aside(Anchor(fingerprint(talk()[0]), 0), (call,), text, THOUGHT, own)


def talk(answer: Any = SAID + REST, **more: Any) -> list[Message]:
    """A question, the answer as the client has it, and the next question."""
    return [
        {"role": "user", "content": "Build it."},
        {"role": "assistant", "content": answer, **more},
        {"role": "user", "content": "And now?"},
    ]


def sent(messages: list[Message], *asides: Aside, **more: Any) -> list[Message]:
    """The messages that the engine gets."""
    prints = [fingerprint(message) for message in messages]
    told = RecalledTexts({ADDRESS: TEXT})
    declared = more.pop("declared", ())
    recall = Recall(asides, told)
    done = prepare(messages, (), declared, 1, fingerprints=prints, recall=recall, **more)
    return list(done.messages)


def test_an_aside_comes_in_front_of_its_answer() -> None:
    """The answer's beginning is said in front of the call, and not again after its result."""
    first, called, result, rest, last = sent(talk(), aside())
    assert (first, last) == (talk()[0], talk()[2])
    assert (called["content"], called["reasoning_content"]) == (SAID, THOUGHT)
    assert (result["content"], rest["content"]) == (TEXT, REST)


def test_references_have_a_budget() -> None:
    """Each reference costs the tokens of its text, the latest message's first; a prompt can't grow
    beyond the limit, however often a text is referred to."""
    line = f"leyline://sha256/{ADDRESS.removeprefix('sha256:')}\n"
    messages: list[Message] = [
        {"role": "user", "content": line},
        {"role": "assistant", "content": line},
        {"role": "user", "content": [{"type": "text", "text": line * 2}, {"type": "x"}]},
    ]
    prints = [fingerprint(message) for message in messages]
    for fits in range(4):
        told = RecalledTexts({ADDRESS: TEXT}, limit_tokens=fits * tokens_in(TEXT) + 1)
        done = prepare(messages, (), (), 1, fingerprints=prints, recall=Recall(told=told))
        first, said, last = (str(message["content"]) for message in done.messages)
        head = TEXT.splitlines()[0]
        per_text = TEXT.count(head)
        assert last.count(head) == per_text * min(fits, 2)
        assert first.count(head) == per_text * (fits - min(fits, 2))
        assert (first + last).count("too long for what may be recalled") == 3 - fits
        assert said == line
    told = RecalledTexts({ADDRESS: TEXT})
    done = prepare(messages, (), (), 1, fingerprints=prints, recall=Recall(told=told))
    assert str(done.messages).count("not recalled") == 0


@pytest.mark.parametrize("annotation", [{"forget": True}, {"verdict": "quarantine"}])
def test_asides_of_a_forgotten_answer_go(annotation: dict[str, Any]) -> None:
    """A caller's demand on its answer reaches the words that the proxy moved out of it, and the
    thinking that the caller never had."""
    assert "4711" not in repr(sent(talk(leyline=annotation), aside()))


def test_asides_of_an_answer_in_quarantine_go() -> None:
    """So does a verdict of an earlier turn."""
    condemned = {1: Quarantined("verbs", "verdict")}
    assert "4711" not in repr(sent(talk(), aside(), condemned=condemned))
    assert "4711" in repr(sent(talk(), aside()))


@pytest.mark.parametrize("mode", ["amortize", "forget"])
def test_a_declared_edit_of_the_answer_holds_for_asides(mode: Any) -> None:
    """Text that an edit takes out of the answer isn't in front of it either."""
    edit = DeclaredEdit(message=1, mode=mode, chars=(0, len(SAID)), replacement="")
    messages = sent(talk(), aside(), declared=(edit,))
    assert "4711" not in repr(messages)
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize("chars", [None, (0, 3)])
@pytest.mark.parametrize("text", ["", SAID])
def test_a_declared_forget_of_the_answer_silences_its_asides(text: str, chars: Any) -> None:
    """Thinking and arguments that the caller never had may say what is to be forgotten; the text
    that was recalled isn't the model's."""
    wordy = aside(text)
    call = replace(wordy.calls[0], arguments=f'{{"address":"{ADDRESS}","why":"4711"}}')
    edit = DeclaredEdit(message=1, mode=Mode.FORGET, chars=chars, replacement="[gone]")
    answer = talk(text.replace("4711", "") + REST)
    messages = sent(answer, replace(wordy, calls=(call,)), declared=(edit,))
    assert "4711" not in repr(messages)
    assert messages[2]["content"] == TEXT


def test_a_client_that_edits_its_answer_is_obeyed() -> None:
    """Words that the client took out of its answer don't come back by the proxy's memory of them;
    the recalled text does."""
    messages = sent(talk("[redacted] " + REST), aside())
    assert "4711" not in repr(messages)
    assert messages[2]["content"] == TEXT


def test_words_of_an_earlier_answer_to_the_same_message_go() -> None:
    """Of two answers to one message, only the words of the one that the client kept are said."""
    messages = sent(talk("Second. " + REST), aside(), aside("Second. ", 1))
    assert [each.get("content") for each in messages[1:6:2]] == [None, "Second. ", REST]
    assert [each.get("reasoning_content") for each in messages[1:6:2]] == [None, THOUGHT, None]


def test_calls_of_two_asides_are_one_beginning() -> None:
    """An answer begins with the words of all its asides; one without words changes nothing."""
    messages = sent(talk("One. Two. " + REST), aside("One. "), aside("", 1), aside("Two. ", 2))
    assert [each.get("content") for each in messages[1:8:2]] == ["One. ", None, "Two. ", REST]


def test_equal_messages_have_asides_of_their_own() -> None:
    """An aside comes after the message that it answered, not after an equal one before it; without
    that message, it goes."""
    user: Message = {"role": "user", "content": "Go on."}
    messages = [user, {"role": "assistant", "content": "One."}, user, *talk("Two.")[1:]]
    second = replace(aside(""), anchor=Anchor(fingerprint(user), 1))
    roles = [each["role"] for each in sent(messages, second)]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant", "user"]
    third = replace(second, anchor=Anchor(fingerprint(user), 2))
    assert sent(messages, third) == messages
