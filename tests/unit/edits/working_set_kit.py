"""Sessions for tests of the working set: small, with texts that meet in every way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from leyline_proxy.edits.working_set import plan_working_set
from leyline_proxy.model.parts import PartFacts
from leyline_proxy.model.working_set import (
    ContextPiece,
    PieceCatalogue,
    Treatment,
    WorkingSet,
)
from leyline_proxy.request.options import parse_options
from leyline_proxy.request.working_set import ContextOption

LIMIT = 1000


def address(letter: str, last: str = "0") -> str:
    """The address of a text; those with the same letter begin alike."""
    return f"sha256:{letter * 31}{last}"


A, B, C, D = map(address, "abcd")
A_TOO = address("a", "1")
EVERY = (A, A_TOO, B, C, D)


def msg(text: str | None = None, tokens: int = 10, **more: Any) -> dict[str, Any]:
    """A message of the client's list, until it has its index."""
    return {"role": "tool", "tokens": tokens, "address": text} | more


def evicted(text: str, tokens: int = 10, **more: Any) -> dict[str, Any]:
    """A message with a stub in its place."""
    own = {"treatment": Treatment.EVICTED, "part": text, "policy": "truncate_older_than"}
    return msg(text, tokens, **(own | more))


def stored(text: str, tokens: int = 10, **more: Any) -> PartFacts:
    """A part in the store."""
    own = {"role": "tool", "policy": "truncate_older_than", "turn": "t1-a", "index": 1}
    return PartFacts(address=text, tokens=tokens, **(own | more))


def catalogue(*messages: dict[str, Any], **more: Any) -> PieceCatalogue:
    """A catalogue of messages, with their indices."""
    return PieceCatalogue(
        tuple(ContextPiece(client_index=at, **each) for at, each in enumerate(messages)), **more
    )


def option(
    *need: str, exclude: Sequence[str] = (), budget_tokens: int | None = None
) -> ContextOption:
    """The option of a request, read as the proxy reads it."""
    raw = {"need": list(need), "exclude": list(exclude), "budget_tokens": budget_tokens}
    parsed = parse_options({"context": raw}, max_edits=1).context
    assert parsed is not None
    return parsed


def plan(
    asked: ContextOption, session: PieceCatalogue, *, recall: bool = True, limit: int = LIMIT
) -> WorkingSet:
    """The working set."""
    return plan_working_set(asked, session, recall=recall, limit_tokens=limit)


_TAGS = st.lists(st.sampled_from(["x", "y"]), unique=True, max_size=2).map(tuple)
_TOOLS = st.sampled_from(["", "bash", "web"])
_TOKENS = st.integers(0, 30)


@st.composite
def _messages(draw: st.DrawFn) -> dict[str, Any]:
    treatment = draw(
        st.sampled_from([Treatment.WHOLE, Treatment.EVICTED, Treatment.EVICTED, *Treatment])
    )
    text = draw(st.sampled_from([*EVERY, None]))
    part = None
    if treatment is Treatment.EVICTED:
        part = draw(st.sampled_from(EVERY)) if text is None or draw(st.booleans()) else text
    return {
        "role": draw(st.sampled_from(["system", "user", "assistant", "tool", "tool"])),
        "tool": draw(_TOOLS),
        "tags": draw(_TAGS),
        "tokens": draw(_TOKENS),
        "address": text,
        "treatment": treatment,
        "part": part,
    }


@st.composite
def catalogues(draw: st.DrawFn) -> PieceCatalogue:
    """Sessions: messages with every treatment, stored parts, forgotten ones, a store that fails."""
    parts = [
        stored(text, draw(_TOKENS), tool=draw(_TOOLS), tags=draw(_TAGS))
        for text in draw(st.lists(st.sampled_from(EVERY), unique=True))
    ]
    return catalogue(
        *draw(st.lists(_messages(), max_size=8)),
        parts=tuple(parts),
        forgotten=frozenset(draw(st.sets(st.sampled_from(EVERY), max_size=1))),
        problem=draw(st.sampled_from([None, None, None, "away"])),
        forgets=draw(st.sampled_from([False, False, False, True])),
    )


NAMES = ("tag:x", "tag:y", "tag:z", "tool:bash", "tool:web", "tool:no")
SELECTORS = st.sampled_from(
    [*EVERY, A[:19], B[:19], f"{C}{'0' * 32}", address("e"), *NAMES],
)


@st.composite
def options(draw: st.DrawFn) -> ContextOption:
    """Requests: some need more than there is, or exclude what they need."""
    return option(
        *draw(st.lists(SELECTORS, max_size=6)),
        exclude=draw(st.lists(SELECTORS, max_size=2)),
        budget_tokens=draw(st.none() | st.integers(0, 60)),
    )
