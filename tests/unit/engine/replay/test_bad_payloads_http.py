"""Bad edits over HTTP: a named reason, an ordinary prefill, and nothing left of the edit.

Each case goes to one engine; a twin gets the same prompt and learns at most which turn it is.
Afterwards both hold the same, byte for byte, and both give the same answer to an honest edit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from support.engine_http import client_of, record_of
from support.replay_engine import (
    SCOPE,
    VOCAB,
    contents,
    edit,
    held,
    random_tokens,
    register,
    tiny_model,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Reason,
    SourceRef,
    edit_envelope,
    sealed_digest,
    sign_envelope,
    token_digest,
)
from leyline_lab.stand_ins.serving import check_clean
from leyline_replay.factory import serve_model
from leyline_replay.http.app import ServingOptions
from leyline_replay.models.loader import LoadedModel

pytestmark = pytest.mark.usefixtures("one_salt")

SECRET = "shared with the proxy"
FIRST_CUTS = (Directive(40, 50, (3,)), Directive(70, 75))
SECOND_CUT = Directive(35, 37)
TOO_MANY = 10_000


def words() -> PreTrainedTokenizerFast:
    """A tokenizer with one word per token."""
    vocabulary = {f"w{token}": token for token in range(VOCAB)}
    model = WordLevel(vocabulary, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


def signed(payload: EditPayload, message: str, secret: str = SECRET) -> Any:
    """An envelope as a request carries it."""
    return msgspec.to_builtins(sign_envelope(edit_envelope(message, payload), secret))


@dataclass(slots=True)
class Session:
    """A session against an engine of its own, over HTTP."""

    app: Starlette
    turns: dict[str, list[int]] = field(default_factory=dict)
    """Tokens by turn, prompt and answer."""
    envelopes: dict[str, Any] = field(default_factory=dict)
    """The envelope sent with each turn."""

    def kept(self) -> object:
        """The engine's content: tree, free slots, registry, stored bytes."""
        engine = self.app.state.service._engine
        engine.check_integrity()
        return held(engine), contents(engine), engine.stats()

    async def send(self, prompt: list[int], kv_hints: Any) -> list[Any]:
        """One completion of a single token, which is never refused; its choices."""
        options = {"max_tokens": 1, "temperature": 0, "logprobs": 5}
        params = {} if kv_hints is None else {"custom_params": {"kv_hints": kv_hints}}
        async with client_of(self.app) as client:
            response = await client.post(
                "/v1/completions", json={"prompt": prompt} | options | params
            )
        assert response.status_code == 200, response.text
        choices: list[Any] = response.json()["choices"]
        return choices

    async def turn(self, prompt: list[int], payload: EditPayload) -> tuple[list[Any], Any]:
        """An honest turn; the answer's choices, and the receipt."""
        message = f"message-{payload.turn}"
        self.envelopes[payload.turn] = signed(payload, message)
        choices = await self.send(prompt, self.envelopes[payload.turn])
        record = await record_of(self.app, message)
        self.turns[payload.turn] = [*prompt, *record["output_ids"]]
        return choices, record["receipt"]

    def edited(
        self, source: str, turn: str, directives: tuple[Directive, ...], tail: list[int]
    ) -> tuple[list[int], EditPayload]:
        """Prompt and payload of an honest edit of a turn."""
        tokens = self.turns[source]
        prompt, payload = edit(tokens, directives, tail=tail, source_turn=source, turn=turn)
        digest = sealed_digest(token_digest(tokens), SECRET)
        sources = (SourceRef(source, len(tokens), digest),)
        return prompt, msgspec.structs.replace(payload, sources=sources)

    def next_turn(self) -> tuple[list[int], EditPayload]:
        """The honest edit that every case spoils."""
        return self.edited("t2", "t3", (SECOND_CUT,), [7, 8])

    def another_turn(self) -> tuple[list[int], EditPayload]:
        """Another honest edit of the same turn, which parts from it earlier."""
        return self.edited("t2", "t4", (Directive(34, 39),), [9])


@asynccontextmanager
async def began() -> AsyncIterator[Session]:
    """A fresh engine whose session has had two turns, the second of them spliced."""
    loaded = LoadedModel("tiny", tiny_model(), words(), "f" * 32, "")
    app = serve_model(
        loaded, pool_tokens=1500, chunk_tokens=64, options=ServingOptions(hints_secret=SECRET)
    )
    try:
        session = Session(app)
        await session.turn(random_tokens(120, 1), register("t1"))
        _, receipt = await session.turn(*session.edited("t1", "t2", FIRST_CUTS, [5, 6]))
        assert receipt["outcome"] == "spliced"
        yield session
    finally:
        app.state.shutdown()
        check_clean(app)


def with_directives(*directives: Directive) -> Callable[[EditPayload], EditPayload]:
    """The honest edit with other directives, which the engine is to lower itself."""
    return lambda honest: msgspec.structs.replace(honest, directives=directives, segments=())


def but(**changes: Any) -> Callable[[EditPayload], EditPayload]:
    """The honest edit with fields exchanged."""
    return lambda honest: msgspec.structs.replace(honest, **changes)


def with_source(turn: str = "", length: int = 0, digest: str = "") -> Any:
    """The honest edit with a source that is named otherwise."""

    def spoil(honest: EditPayload) -> EditPayload:
        (source,) = honest.sources
        lie = SourceRef(turn or source.turn, source.length + length, digest or source.digest)
        return msgspec.structs.replace(honest, sources=(lie,))

    return spoil


SPOILT: dict[str, tuple[Callable[[EditPayload], EditPayload], Reason]] = {
    "out of order": (
        with_directives(Directive(70, 75), Directive(35, 37)),
        Reason.INVALID_DIRECTIVE,
    ),
    "overlapping": (
        with_directives(Directive(35, 45), Directive(44, 50)),
        Reason.INVALID_DIRECTIVE,
    ),
    "one inside another": (
        with_directives(Directive(35, 60), Directive(40, 50)),
        Reason.INVALID_DIRECTIVE,
    ),
    "out of range": (with_directives(Directive(35, 10_000)), Reason.INVALID_DIRECTIVE),
    "wholly out of range": (with_directives(Directive(9_000, 9_001)), Reason.INVALID_DIRECTIVE),
    "beyond 64 bits": (with_directives(Directive(35, 2**80)), Reason.INVALID_DIRECTIVE),
    "negative": (with_directives(Directive(-3, 2)), Reason.INVALID_DIRECTIVE),
    "negative length": (with_directives(Directive(37, 35)), Reason.INVALID_DIRECTIVE),
    "ten thousand of them": (
        with_directives(*(Directive(at, at, (1,)) for at in range(TOO_MANY))),
        Reason.INVALID_DIRECTIVE,
    ),
    "ten thousand in range": (
        with_directives(*(Directive(at % 100, at % 100) for at in range(TOO_MANY))),
        Reason.INVALID_DIRECTIVE,
    ),
    "negative replacement": (
        with_directives(Directive(35, 37, (-1,))),
        Reason.TOKEN_MISMATCH,
    ),
    "of a source that isn't there": (
        with_directives(Directive(35, 37, source=3)),
        Reason.INVALID_DIRECTIVE,
    ),
    "of a source below zero": (
        with_directives(Directive(35, 37, source=-1)),
        Reason.INVALID_DIRECTIVE,
    ),
    "an unknown session": (but(session="nobody"), Reason.MISSING_SOURCE),
    "another tenant's session": (but(scope="another tenant"), Reason.MISSING_SOURCE),
    "an unknown turn": (with_source(turn="t99"), Reason.MISSING_SOURCE),
    "a lying digest": (with_source(digest="0" * 16), Reason.TOKEN_MISMATCH),
    "a lying length": (with_source(length=-1), Reason.TOKEN_MISMATCH),
    "an older turn's source": (with_source(turn="t1"), Reason.TOKEN_MISMATCH),
}
"""The fault of the honest edit, and the reason that is to be named."""


@pytest.mark.parametrize("name", SPOILT)
async def test_a_bad_edit_is_named_and_leaves_nothing_behind(name: str) -> None:
    """Served as if it only said which turn it is; the next honest edit is none the worse."""
    spoil, reason = SPOILT[name]
    async with began() as session, began() as twin:
        prompt, honest = session.next_turn()
        bad = spoil(honest)
        choices = await session.send(prompt, signed(bad, "bad"))
        receipt = (await record_of(session.app, "bad"))["receipt"]
        assert (receipt["outcome"], receipt["reason"]) == ("reprefilled", reason)
        assert receipt["tokens"]["spliced"] == 0
        assert receipt["lineage"] == []
        only_named = EditPayload(session=bad.session, scope=bad.scope, turn=bad.turn)
        expected = await twin.send(prompt, signed(only_named, "plain"))
        assert choices == expected
        assert session.kept() == twin.kept()
        await check_next(session, twin)


async def check_next(session: Session, twin: Session) -> None:
    """An honest edit of the second turn is spliced, and answered alike."""
    choices, receipt = await session.turn(*session.another_turn())
    expected, _ = await twin.turn(*twin.another_turn())
    assert receipt["reason"] == "spliced"
    assert choices == expected
    assert session.kept() == twin.kept()


def unsigned(honest: EditPayload) -> Any:
    """An envelope without a signature."""
    return msgspec.to_builtins(edit_envelope("bad", honest))


def tampered(honest: EditPayload) -> Any:
    """A signed envelope with a position changed."""
    envelope = signed(honest, "bad")
    envelope["actions"][0]["payload"]["directives"][0]["end"] += 1
    return envelope


def retyped(honest: EditPayload) -> Any:
    """A payload that doesn't follow the contract, though the signature is right."""
    envelope = edit_envelope("bad", honest)
    payload = msgspec.to_builtins(honest) | {"sources": "all"}
    (action,) = envelope.actions
    wrong = msgspec.structs.replace(
        envelope, actions=(msgspec.structs.replace(action, payload=payload),)
    )
    return msgspec.to_builtins(sign_envelope(wrong, SECRET))


UNTRUSTED: dict[str, Callable[[EditPayload], Any]] = {
    "unsigned": unsigned,
    "signed with another secret": lambda honest: signed(honest, "bad", "a guess"),
    "tampered with": tampered,
}


@pytest.mark.parametrize("name", UNTRUSTED)
async def test_an_envelope_that_is_not_the_proxys_leaves_no_trace(name: str) -> None:
    """Its turn and KV aren't kept, as no forget would find them; the answer is a plain
    prefill's."""
    async with began() as session, began() as twin:
        prompt, honest = session.next_turn()
        before = session.kept()
        choices = await session.send(prompt, UNTRUSTED[name](honest))
        receipt = (await record_of(session.app, "bad"))["receipt"]
        assert (receipt["outcome"], receipt["reason"]) == ("reprefilled", "invalid_edit")
        assert (receipt["turn"], receipt["session"]) == ("", "")
        assert session.kept() == before
        assert choices == await twin.send(prompt, None)
        assert twin.kept() != before, "control: a plain request's KV is kept"


async def test_an_edit_of_the_wrong_types_still_says_whose_it_is() -> None:
    """Only the edit is refused: the turn is noted, so that a later forget finds its KV."""
    async with began() as session, began() as twin:
        prompt, honest = session.next_turn()
        choices = await session.send(prompt, retyped(honest))
        receipt = (await record_of(session.app, "bad"))["receipt"]
        assert (receipt["outcome"], receipt["reason"]) == ("reprefilled", "invalid_edit")
        assert (receipt["turn"], receipt["session"]) == (honest.turn, honest.session)
        only_named = EditPayload(session=honest.session, scope=honest.scope, turn=honest.turn)
        assert choices == await twin.send(prompt, signed(only_named, "plain"))
        assert session.kept() == twin.kept()
        await check_next(session, twin)


async def test_an_envelope_replayed_from_an_older_turn_is_refused() -> None:
    """Its copies aren't this prompt: an ordinary prefill."""
    async with began() as session, began() as twin:
        prompt, _ = session.next_turn()
        choices = await session.send(prompt, session.envelopes["t2"])
        receipt = (await record_of(session.app, "message-t2"))["receipt"]
        assert (receipt["outcome"], receipt["reason"]) == ("reprefilled", "token_mismatch")
        assert (receipt["tokens"]["spliced"], receipt["lineage"]) == (0, [])
        only_named = EditPayload(session="s", scope=SCOPE, turn="t2")
        assert choices == await twin.send(prompt, signed(only_named, "plain"))
        assert session.kept() == twin.kept()


async def test_a_replayed_envelope_leaves_the_turn_that_it_names_alone() -> None:
    """The next honest edit of that turn is spliced as if nothing had come between."""
    async with began() as session, began() as twin:
        prompt, _ = session.next_turn()
        await session.send(prompt, session.envelopes["t2"])
        await twin.send(prompt, None)
        choices, receipt = await session.turn(*session.another_turn())
        expected, _ = await twin.turn(*twin.another_turn())
        assert receipt["reason"] == "spliced"
        assert choices == expected


async def test_the_honest_edit_is_spliced() -> None:
    """Control: what every case spoils is accepted unspoilt."""
    async with began() as session:
        _, receipt = await session.turn(*session.next_turn())
        assert (receipt["outcome"], receipt["reason"]) == ("spliced", "spliced")
        assert receipt["tokens"]["spliced"] > 60
        assert receipt["session"] == "s"
        assert session.envelopes["t3"]["actions"][0]["payload"]["scope"] == SCOPE
