"""A session that is told a secret and then demands that it be forgotten."""

from __future__ import annotations

import random
from itertools import count, islice
from typing import Any

from secret_rows import ORDINARY, SECRETS, draw_ordinary
from splice_kit import Answer, SplicingEngine

from leyline_engine.contract import EditPayload, ForgetCounts, SpanLabel

HEAD, TAIL = 100, 90
SECRET = 40
"""Tokens of the secret; together with the head they end inside a block."""
_names, _secrets = count(), iter(SECRETS)


class Story:
    """A session that was told a secret: head, secret, tail."""

    def __init__(self, engine: SplicingEngine) -> None:
        self.engine = engine
        self.session = f"s{next(_names)}"
        rng = random.Random(self.session)
        self.head, self.tail = draw_ordinary(rng, HEAD), draw_ordinary(rng, TAIL)
        self.secret = tuple(islice(_secrets, SECRET))
        assert len(self.secret) == SECRET, "there are no more tokens that come only once"
        self.told = (*self.head, *self.secret, *self.tail)
        self.redacted = (*self.head, *self.tail)

    def telling(self, turn: str = "t1", **members: Any) -> EditPayload:
        """The payload of a turn that reads the secret."""
        end = HEAD + SECRET
        spans = (
            SpanLabel("head", 0, HEAD),
            SpanLabel("secret", HEAD, end),
            SpanLabel("tail", end, end + TAIL),
        )
        members = {"session": self.session, "scope": "t", "turn": turn, "spans": spans} | members
        return EditPayload(**members)

    def forgetting(self, turn: str = "t9", **members: Any) -> EditPayload:
        """The payload of the turn that demands forgetting."""
        spans = (SpanLabel("head", 0, HEAD), SpanLabel("tail", HEAD, HEAD + TAIL))
        return self.telling(turn, **({"spans": spans, "forget": ("secret",)} | members))

    def tell(self, **options: Any) -> Answer:
        """Tell the secret."""
        return asked(self.engine, self.told, self.telling(), **options)

    def forget(self, **members: Any) -> ForgetCounts:
        """Demand forgetting; returns the counts when the engine has come to rest."""
        answer = asked(self.engine, self.redacted, self.forgetting(**members))
        return counts_of(self.engine, answer)


def counts_of(engine: SplicingEngine, answer: Answer) -> ForgetCounts:
    """The last reported counts of a forget."""
    assert answer.record is not None
    forgot = engine.sent.forgot.get(answer.message, answer.record.receipt.forgot)
    assert forgot is not None
    return forgot


def asked(engine: SplicingEngine, *args: Any, **options: Any) -> Answer:
    """Run one request alone, which writes no secret itself."""
    return engine.ask(*args, allowed=ORDINARY, **options)


def started(engine: SplicingEngine, *args: Any, **options: Any) -> str:
    """Queue a request that writes no secret itself."""
    return engine.start(*args, allowed=ORDINARY, **options)
