"""The conversations under a harness's name: an agent's work, requests for titles, transcripts."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from identify_kit import asked
from support.character_turns import turn_of
from support.repair_talks import SYSTEM, TOOLS, words

from leyline_proxy.model.sentences import sentences_of
from leyline_proxy.model.session import Session
from leyline_proxy.model.verdicts import Verdict
from leyline_proxy.request.identify import NAMED, Identity, Openings, identify
from leyline_proxy.request.recall_tool import with_recall_tool
from leyline_proxy.request.resemblance import offers_tools
from leyline_proxy.sessions import MemorySessionStore

Messages = list[dict[str, Any]]

TENANT = "default"
NAME = {"x-session-id": "run"}
TITLE: Messages = [
    {"role": "system", "content": "You give titles."},
    {"role": "user", "content": "Give a title to what follows."},
    {"role": "user", "content": words(1, 4)},
]
TASK = {"role": "user", "content": words(1, 4)}
SAID = words(2, 4)
LAST = words(3, 4)
WORK: Messages = [
    SYSTEM,
    TASK,
    {"role": "assistant", "content": SAID},
    {"role": "user", "content": words(4, 2)},
]
OTHER_WORK: Messages = [SYSTEM, {"role": "user", "content": words(9, 4)}]


def transcript(*texts: str) -> Messages:
    """A request to summarise a conversation that is written out."""
    told = "\n\n".join(f"[Somebody]: {text}" for text in texts)
    return [
        {"role": "system", "content": "You summarise conversations."},
        {"role": "user", "content": f"The conversation:\n{told}\nSummarise it."},
    ]


WHOLE = transcript(words(1, 4), SAID, words(4, 2), LAST)


class Proxy:
    """A store, and the turns under way, as one tenant sees them."""

    def __init__(self) -> None:
        self.store = MemorySessionStore(max_sessions=10, ttl_s=100)
        self.openings = Openings()
        self.tenant = TENANT

    def of(self, tenant: str) -> Proxy:
        """The same proxy as another tenant sees it."""
        other = copy(self)
        other.tenant = tenant
        return other

    async def begin(
        self, messages: Messages, headers: dict[str, str] = NAME, *, tools: bool = False
    ) -> Identity:
        """The identity of a request whose turn is under way."""
        members = {"tools": TOOLS} if tools else {}
        request = asked(messages, headers, **members)
        request = replace(request, tenant=replace(request.tenant, name=self.tenant))
        return await identify(self.store, request, openings=self.openings)

    async def settle(
        self, found: Identity, messages: Messages, *, tools: bool = False, **facts: Any
    ) -> None:
        """Keep a turn, as an answered one would be; `facts` replace some of the session's."""
        turn = replace(
            turn_of(messages),
            offers_tools=tools,
            retells=found.retells,
            sentences=sentences_of(LAST) if tools else (),
        )

        def change(known: Session | None) -> Session:
            turns = (*(known.turns if known is not None else ()), turn)
            session = Session(found.session_id, self.tenant, found.key, turns, (), 0, 0.0)
            return replace(session, **facts)

        await self.store.update(self.tenant, found.session_id, change, found.chain)
        self.openings.leave(found.hold)

    async def ask(self, messages: Messages, *, tools: bool = False, **facts: Any) -> Identity:
        """A whole turn."""
        found = await self.begin(messages, tools=tools)
        await self.settle(found, messages, tools=tools, **facts)
        return found


async def test_the_work_takes_the_name_of_a_title() -> None:
    """The agent's turns have the name and its trust; a later title goes beside."""
    proxy = Proxy()
    await proxy.ask(TITLE)
    first = await proxy.ask(WORK[:2], tools=True)
    assert (first.session_id, first.key, first.trust) == ("run", NAMED, "opening")
    assert (await proxy.ask(WORK, tools=True)).session_id == "run"
    later = await proxy.ask([TITLE[0], {"role": "user", "content": SAID}])
    assert (later.session_id == "run", later.trust) == (False, "messages")


@pytest.mark.parametrize("settled", [False, True])
async def test_one_of_two_agents_takes_the_name(settled: bool) -> None:
    """Two windows under one name never share a session, however their turns and the title's end."""
    proxy = Proxy()
    title = await proxy.begin(TITLE)
    if settled:
        await proxy.settle(title, TITLE)
    first = await proxy.begin(WORK[:2], tools=True)
    again = await proxy.begin(WORK[:2], tools=True)
    second = await proxy.begin(OTHER_WORK, tools=True)
    assert first.session_id == again.session_id == title.session_id == "run"
    assert second.session_id != "run"
    if not settled:
        await proxy.settle(title, TITLE)
    third = await proxy.begin([SYSTEM, {"role": "user", "content": "A third."}], tools=True)
    assert third.session_id not in {"run", second.session_id}
    for found, messages in ((first, WORK[:2]), (again, WORK[:2]), (second, OTHER_WORK)):
        await proxy.settle(found, messages, tools=True)
    proxy.openings.leave(third.hold)
    assert not len(proxy.openings)
    assert (await proxy.ask(OTHER_WORK, tools=True)).session_id == second.session_id
    assert (await proxy.ask(WORK, tools=True)).session_id == "run"


async def test_a_request_without_tools_takes_no_name_over() -> None:
    """A second title doesn't join the first, and a chat doesn't join a title."""
    proxy = Proxy()
    await proxy.ask(TITLE)
    assert (await proxy.ask([TITLE[0], TITLE[1], WORK[3]])).session_id != "run"
    assert (await proxy.ask(OTHER_WORK)).session_id != "run"


async def test_a_conversation_keeps_its_name() -> None:
    """An agent's, or one without tools that has gone on: another agent goes beside it."""
    for messages, tools in ((WORK[:2], True), (WORK, False)):
        proxy = Proxy()
        await proxy.ask(messages, tools=tools)
        assert (await proxy.ask(OTHER_WORK, tools=True)).session_id != "run"


async def test_nothing_takes_over_what_has_forgotten() -> None:
    """A session with a forget stays its conversation's."""
    proxy = Proxy()
    await proxy.ask(TITLE, demands=1)
    assert (await proxy.ask(WORK[:2], tools=True)).session_id != "run"


async def test_counting_holds_nothing() -> None:
    """A request that won't be answered finds the same session, and takes no place in it."""
    proxy = Proxy()
    await proxy.ask(TITLE)
    found = await identify(proxy.store, asked(WORK[:2], NAME, tools=TOOLS))
    assert (found.session_id, found.hold) == ("run", None)


async def test_a_transcript_is_a_turn_of_what_it_retells() -> None:
    """It joins the session for its summary's sake, trusts none of its turns, and is no step."""
    proxy = Proxy()
    await proxy.ask(WORK, tools=True)
    found = await proxy.ask(WHOLE)
    assert (found.session_id, found.retells, found.trust) == ("run", True, "messages")
    session = await proxy.store.get(TENANT, "run")
    assert session is not None and session.last is session.turns[0]
    assert not (await proxy.ask(WORK, tools=True)).retells


@pytest.mark.parametrize(
    "messages",
    [
        transcript(words(1, 4)),
        transcript(LAST),
        transcript(SAID, LAST),
        transcript(words(1, 4), words(4, 2)),
        transcript(words(7, 20)),
        [*WHOLE, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on."}],
    ],
    ids=["the task", "an answer", "answers", "the user", "another", "a conversation"],
)
async def test_who_tells_less_is_no_transcript(messages: Messages) -> None:
    """Most of what both the user and the model said must be there, in a single request."""
    proxy = Proxy()
    await proxy.ask(WORK, tools=True)
    found = await proxy.ask(messages)
    assert (found.session_id == "run", found.retells) == (False, False)


async def test_a_short_conversation_has_no_transcript() -> None:
    """A few words in common show nothing."""
    proxy = Proxy()
    chat: Messages = [SYSTEM, {"role": "user", "content": "What is the time now?"}]
    await proxy.settle(await proxy.begin(chat, tools=True), chat)
    assert not (await proxy.ask(transcript("What is the time now?"))).retells


async def test_an_agent_retells_nothing() -> None:
    """An agent that is sent out with the whole story has a session of its own."""
    proxy = Proxy()
    await proxy.ask(WORK, tools=True)
    assert (await proxy.ask(WHOLE, tools=True)).session_id != "run"


VERDICT = Verdict(("t0.0",), (), "guard", "injection", "policy")


@pytest.mark.parametrize("facts", [{"demands": 1}, {"verdicts": (VERDICT,)}])
async def test_what_has_forgotten_is_not_retold(facts: dict[str, Any]) -> None:
    """No forget finds a text in a transcript, so a session with one has none."""
    proxy = Proxy()
    await proxy.ask(WORK, tools=True, **facts)
    found = await proxy.ask(WHOLE)
    assert (found.session_id == "run", found.retells) == (False, False)


async def test_a_transcript_is_of_its_own_name() -> None:
    """Not of another's, and without a name it is nobody's."""
    proxy = Proxy()
    await proxy.ask(WORK, tools=True)
    for headers in ({"x-session-id": "other"}, {}, {"x-leyline-session": "own"}):
        found = await proxy.begin(WHOLE, headers)
        assert (found.session_id == "run", found.retells) == (False, False)


async def test_tenants_of_one_name_share_nothing() -> None:
    """Each has the name for itself: neither titles nor transcripts find another tenant's work."""
    red = Proxy()
    blue = red.of("blue")
    titles = [await each.begin(TITLE) for each in (red, blue)]
    agents = [await each.begin(WORK[:2], tools=True) for each in (red, blue)]
    assert {found.session_id for found in (*titles, *agents)} == {"run"}
    assert not any(found.session for found in (*titles, *agents))
    for each in (*titles, *agents):
        red.openings.leave(each.hold)
    await red.ask(TITLE)
    await red.ask(WORK, tools=True)
    assert (await blue.ask(TITLE)).session is None
    found = await blue.ask(WHOLE)
    assert (found.session_id == "run", found.retells) == (False, False)
    taken = await blue.ask(OTHER_WORK, tools=True)
    assert taken.session is not None and taken.session.tenant == "blue"
    session = await red.store.get(TENANT, "run")
    assert session is not None and len(session.turns) == 2
    assert (await red.ask(WHOLE)).retells


def test_tools_are_the_clients_own() -> None:
    """The proxy's tool doesn't make a request an agent's."""
    assert offers_tools(asked(TITLE, tools=TOOLS))
    assert offers_tools(asked(TITLE, functions=[{"name": "f"}]))
    request = asked(TITLE)
    request = replace(request, tenant=replace(request.tenant, recall=True))
    offered = with_recall_tool(request, tool=True)
    assert offered.offers_recall and not offers_tools(offered)
