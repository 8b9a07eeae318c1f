"""The chain: nothing can be done to a log that isn't found."""

from __future__ import annotations

import msgspec
import pytest
from audit_kit import AT, KEY, event, judged, lines_of_log
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.audit.chain import AuditKey, Head, seal
from leyline_proxy.audit.check import Checked, check_file
from leyline_proxy.audit.records import gap_record, recovered_record, start_record

KEYS = st.sampled_from([None, KEY])
COUNTS = st.integers(2, 8)


@given(COUNTS, KEYS)
def test_an_untouched_log_is_good(count: int, key: AuditKey | None) -> None:
    """It is good at any length, with and without a key."""
    lines, head = lines_of_log(count, key)
    assert judged(b"".join(lines), key, head.hash) is None


@given(COUNTS, KEYS, st.data())
def test_any_byte_that_is_edited_is_found(
    count: int, key: AuditKey | None, data: st.DataObject
) -> None:
    """The check covers the hash, and the end of a line."""
    lines, head = lines_of_log(count, key)
    log = bytearray(b"".join(lines))
    place = data.draw(st.integers(0, len(log) - 1))
    log[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != log[place]))
    finding = judged(bytes(log), key, head.hash)
    assert finding is not None
    at = bytes(log[: place + 1]).count(b"\n")
    assert finding.damage == "truncated" or finding.line <= at + 2


@given(COUNTS, KEYS, st.data())
def test_any_line_that_is_removed_is_found(
    count: int, key: AuditKey | None, data: st.DataObject
) -> None:
    """The chain alone finds it at the front and in the middle, the head at the end."""
    lines, head = lines_of_log(count, key)
    place = data.draw(st.integers(0, len(lines) - 1))
    last = place == len(lines) - 1
    del lines[place]
    log = b"".join(lines)
    finding = judged(log, key, head.hash)
    assert finding is not None
    assert finding.damage == ("truncated" if last else "removed")
    assert (judged(log, key) is None) == last, "without the head, a cut at the end can't be seen"


@given(COUNTS, KEYS, st.data())
def test_any_two_lines_that_are_swapped_are_found(
    count: int, key: AuditKey | None, data: st.DataObject
) -> None:
    """They are called reordered, at the first that is not where it was."""
    lines, head = lines_of_log(count, key)
    first = data.draw(st.integers(1, len(lines) - 2))
    second = data.draw(st.integers(first + 1, len(lines) - 1))
    lines[first], lines[second] = lines[second], lines[first]
    finding = judged(b"".join(lines), key, head.hash)
    assert finding is not None
    assert (finding.damage, finding.line) == ("reordered", first + 1)


@given(COUNTS, KEYS, st.data())
def test_any_line_that_is_put_in_is_found(
    count: int, key: AuditKey | None, data: st.DataObject
) -> None:
    """A copy of one that is there, one from another log, or one that fits its neighbour."""
    lines, head = lines_of_log(count, key)
    place = data.draw(st.integers(1, len(lines)))
    before = msgspec.json.decode(lines[place - 1])
    other = Head(before["seq"], before["hash"])
    new = data.draw(
        st.sampled_from(
            [
                lines[place - 1],
                seal(other, event(99), None)[0],
                seal(Head(7, "1" * 64), event(99), AuditKey.derive("another key"))[0],
                b"not a line\n",
                b"\n",
            ]
        )
    )
    lines.insert(place, new)
    finding = judged(b"".join(lines), key, head.hash)
    if place == len(lines) - 1 and key is None and new.startswith(b'{"seq":') and finding is None:
        return  # without a key, anybody may continue a log
    assert finding is not None


def test_a_key_keeps_others_from_going_on_with_a_log() -> None:
    """A line at the end that was sealed without the key is found, and one sealed with it is not."""
    lines, head = lines_of_log(3, KEY)
    forged = seal(head, event(4), None)[0]
    own = seal(head, event(4), KEY)[0]
    assert judged(b"".join((*lines, own)), KEY, head.hash) is None
    finding = judged(b"".join((*lines, forged)), KEY, head.hash)
    assert finding is not None
    assert finding.line == 5


def test_who_lacks_the_key_cannot_seal_a_log_anew() -> None:
    """A log that was rewritten with other content and without the key is found with the key."""
    lines, _ = lines_of_log(3)
    finding = judged(b"".join(lines), KEY)
    assert finding is not None
    assert (finding.damage, finding.line) == ("edited", 1)


def test_a_line_that_was_sealed_anew_is_named() -> None:
    """Without a key one line can be forged; the next one reveals it, and the forged one is
    named."""
    lines, head = lines_of_log(4)
    before = msgspec.json.decode(lines[1])
    lines[2] = seal(Head(before["seq"], before["hash"]), event(77), None)[0]
    finding = judged(b"".join(lines), None, head.hash)
    assert finding is not None
    assert (finding.damage, finding.line) == ("edited", 3)


@pytest.mark.parametrize("spoil", [False, True])
def test_a_torn_line_is_told_from_tampering(spoil: bool) -> None:
    """A crash's torn line is good when a record accounts for it, and only for these very bytes."""
    lines, head = lines_of_log(2)
    torn = seal(head, event(3), None)[0][:40]
    note, head = seal(head, recovered_record([torn], opens=False, at=AT), None)
    after, head = seal(head, event(3), None)
    left = torn.replace(b"4", b"5", 1) if spoil else torn
    log = b"".join((*lines, left, b"\n", note, after))
    assert left != torn or not spoil
    assert (judged(log, None, head.hash) is not None) == spoil
    without = b"".join((*lines, note, after))
    finding = judged(without, None, head.hash)
    assert finding is not None
    assert finding.damage == "removed"


def test_an_unaccounted_torn_line_is_named_as_such() -> None:
    """Before the next start has noted it, a crash looks the same as a cut."""
    lines, _ = lines_of_log(2)
    finding = judged(b"".join(lines)[:-20])
    assert finding is not None
    assert (finding.damage, finding.line) == ("torn", 3)


def test_a_start_keeps_a_cut_in_the_log() -> None:
    """A log that was cut at its end before a start is found to be, although it continues."""
    lines, old = lines_of_log(3)
    cut, head = lines_of_log(1)
    missing = {"seq": old.seq, "hash": old.hash}
    start, head = seal(head, start_record("here", "1", None, AT, missing), None)
    finding = judged(b"".join((*cut, start)), None, head.hash)
    assert finding is not None
    assert (finding.damage, finding.line) == ("truncated", 3)
    assert len(lines) == 4


def test_lost_records_are_counted() -> None:
    """The log's own account counts them, and is part of the chain."""
    lines, head = lines_of_log(1)
    gap, _ = seal(head, gap_record(12, "queue", AT), None)
    checked = Checked()
    check_file(b"".join((*lines, gap)), checked, [])
    assert (checked.finding, checked.lost, checked.records) == (None, 12, 3)


def test_several_keys_are_tried() -> None:
    """A log whose key was changed is good with both keys, and with none of them alone."""
    lines, head = lines_of_log(2, KEY)
    second = AuditKey.derive("the next key")
    start, head = seal(head, start_record("here", "1", second, AT, None), second)
    log = b"".join((*lines, start, seal(head, event(3), second)[0]))
    for keys, good in (([KEY, second], True), ([second, KEY], True), ([KEY], False)):
        checked = Checked()
        check_file(log, checked, keys)
        assert (checked.finding is None) == good


def test_keys_do_not_show() -> None:
    """A key is neither in its printed form nor in its name."""
    assert "a key for tests" not in repr(KEY)
    assert KEY.lines.hex() not in repr(KEY)
    assert KEY.lines.hex()[:16] != KEY.id
    assert KEY.digest("x") != AuditKey.derive("other").digest("x")
