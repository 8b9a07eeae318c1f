"""Counts of a scheduler that the HTTP process shows."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import ForgetCounts, Receipt
from leyline_engine.metrics import NoMetrics
from leyline_engine.occupancy import RegistryLevels
from leyline_engine.server.counts import Counts, SentMetrics


class Seen(NoMetrics):
    """Adds up what is counted."""

    def __init__(self) -> None:
        self.totals = {"request": 0, "copied": 0, "evicted": 0, "retired": 0, "refused": 0}
        self.progress: list[tuple[ForgetCounts, ForgetCounts]] = []
        self.levels: list[RegistryLevels] = []

    def request(self, receipt: Receipt) -> None:
        """Count one."""
        self.totals["request"] += 1

    def copied(self, size: int) -> None:
        """Add bytes."""
        self.totals["copied"] += size

    def evicted(self, tokens: int) -> None:
        """Add tokens."""
        self.totals["evicted"] += tokens

    def retired(self, tokens: int) -> None:
        """Add tokens."""
        self.totals["retired"] += tokens

    def refused(self) -> None:
        """Count one."""
        self.totals["refused"] += 1

    def forgot(self, before: ForgetCounts, now: ForgetCounts) -> None:
        """Note the progress."""
        self.progress.append((before, now))

    def registries(self, levels: RegistryLevels) -> None:
        """Note the levels."""
        self.levels.append(levels)


NAMES = ("request", "copied", "evicted", "retired", "refused", "flush")


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 1 << 40)), max_size=30))
def test_counts_arrive_once_and_whole(calls: list[tuple[str, int]]) -> None:
    """Counts between any two messages add up to the same after the way over the wire."""
    direct, shown = Seen(), Seen()
    decode = msgspec.msgpack.Decoder(Counts).decode
    sent = SentMetrics(lambda c: decode(msgspec.msgpack.encode(c)).apply(shown), now_s=lambda: 0.0)
    for name, number in calls:
        match name:
            case "flush":
                sent.flush()
            case "request":
                sent.request(Receipt(message_id=str(number)))
                direct.request(Receipt(message_id=str(number)))
            case "refused":
                sent.refused()
                direct.refused()
            case _:
                getattr(sent, name)(number)
                getattr(direct, name)(number)
    sent.flush()
    assert shown.totals == direct.totals


def test_messages_are_sent_once_a_second_and_only_with_news() -> None:
    """A message is due after a second, an empty one isn't sent, and levels are the last ones."""
    clock, messages = [0.0], list[Counts]()
    sent = SentMetrics(messages.append, now_s=lambda: clock[0])
    assert sent.is_due
    sent.flush()
    assert not messages
    assert not sent.is_due
    clock[0] = 1.0
    assert sent.is_due
    sent.registries(RegistryLevels(turns=1))
    sent.registries(RegistryLevels(turns=2))
    sent.forgot(ForgetCounts(), ForgetCounts(overwritten=32))
    sent.flush()
    (message,) = messages
    seen = Seen()
    message.apply(seen)
    assert seen.levels == [RegistryLevels(turns=2)]
    assert seen.progress == [(ForgetCounts(), ForgetCounts(overwritten=32))]
