"""Resemblances of a request to a session under a harness's name, apart from messages in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile

from ..model.asides import RECALL_TOOL
from ..model.history import CONTINUES, FRAME
from ..model.messages import Message, text_of
from ..model.sentences import Sentence, quotes_answer, retells, sentences_of
from ..model.session import RetainedTurn, Session
from .parse import ChatRequest


def offers_tools(request: ChatRequest) -> bool:
    """Return True if a request offers the model tools of the client's own."""
    tools = [tool for tool in request.body.get("tools") or () if isinstance(tool, Mapping)]
    named = [tool.get("function") for tool in tools]
    own = [n for n in named if not (isinstance(n, Mapping) and n.get("name") == RECALL_TOOL)]
    return bool(own or request.body.get("functions"))


class Resemblance:
    """Compares a request with sessions.

    Args:
        key: see :func:`~leyline_proxy.model.sentences.sentences_of`.
    """

    def __init__(self, request: ChatRequest, key: bytes) -> None:
        self._request = request
        self._key = key

    def quotes(self, session: Session) -> bool:
        """Return True if the request quotes an answer of a session, and has its instructions: a
        compaction goes on with a summary, which the model wrote in the session.

        A request for a title quotes as well, but is another conversation.
        """
        alike = (_same_frame(turn, self._request) for turn in session.turns)
        said = [turn.sentences for turn in session.turns if turn.sentences]
        return bool(said) and any(alike) and any(quotes_answer(a, self._sentences) for a in said)

    def takes_over(self, session: Session) -> bool:
        """Return True if an agent's request may take the name of a session that has no agent yet.

        A harness may ask for a title first, under the name of the work that follows.
        """
        return (
            offers_tools(self._request)
            and bool(session.turns)
            and all(turn.is_lone for turn in session.turns)
            and not session.demands
        )

    def retells(self, session: Session) -> bool:
        """Return True if the request is a transcript of an agent's session: a harness has it
        summarised under other instructions.

        No forget finds a text in a transcript, so none counts of a session that has anything
        forgotten or in quarantine.
        """
        if session.demands or session.verdicts or offers_tools(self._request):
            return False
        if any(message.get("role") in CONTINUES for message in self._request.messages):
            return False
        steps = (turn for turn in reversed(session.turns) if not turn.is_apart)
        last = next((turn for turn in steps if turn.offers_tools), None)
        return last is not None and retells(*self._sides(last), self._sentences)

    def _sides(self, turn: RetainedTurn) -> tuple[frozenset[Sentence], frozenset[Sentence]]:
        """Return the sentences of the user and of the model up to a turn's end."""
        messages = turn.prepared.client
        told = [each for each in messages if each.get("role") == "user"]
        said = [each for each in messages if each.get("role") == "assistant"]
        return self._of(told), self._of(said) | frozenset(turn.sentences)

    @cached_property
    def _sentences(self) -> frozenset[Sentence]:
        return self._of(self._request.messages)

    def _of(self, messages: Iterable[Message]) -> frozenset[Sentence]:
        texts = map(text_of, messages)
        return frozenset(s for text in texts for s in sentences_of(text, self._key, most=None))


def _same_frame(turn: RetainedTurn, request: ChatRequest) -> bool:
    """Return True if a list begins with the instructions of a turn, or with most of them."""
    before, now = _frame_of(turn.prepared.client), _frame_of(request.messages)
    least = (len(before) + 1) // 2
    return before[:least] == now[:least] and bool(before) == bool(now)


def _frame_of(messages: Sequence[Message]) -> str:
    """Return the instructions before the conversation; if there are none, all within it.

    A harness may write those within it again when it compacts, in another order.
    """
    first = list(takewhile(lambda message: message.get("role") in FRAME, messages))
    return "\n".join(text_of(each) for each in first or messages if each.get("role") in FRAME)
