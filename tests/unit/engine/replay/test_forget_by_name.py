"""Forgetting spans by their names in the ledger: what goes, what stays, and when it is done."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.replay_engine import (
    SCOPE,
    admit,
    blank,
    cached,
    edit,
    make_engine,
    prefill,
    random_tokens,
    reference,
    register,
    retained,
    run,
    same_logits,
)

from leyline_engine.contract import (
    Directive,
    EditPayload,
    ForgetCounts,
    LineageRun,
    Mode,
    Outcome,
    Reason,
    SpanLabel,
    output_span,
)
from leyline_engine.records.turn_records import RecordBook
from leyline_replay.engine import ReplayEngine

SOURCE = random_tokens(200, 3)
SECRET = "m2"
CUT = Directive(60, 80)
LABELS = (
    SpanLabel("m1", 0, 62),
    SpanLabel(SECRET, 58, 82),
    SpanLabel("m3", 78, 150),
    SpanLabel("m4", 150, 200),
)


def labelled(payload: EditPayload, *labels: SpanLabel, forget: tuple[str, ...] = ()) -> EditPayload:
    """The payload with labels, and spans to forget."""
    return msgspec.structs.replace(payload, spans=labels, forget=forget)


def truncated(engine: ReplayEngine) -> tuple[list[int], tuple[LineageRun, ...]]:
    """A session whose second turn has cut the secret out, amortized; its prompt and lineage."""
    run(engine, SOURCE, labelled(register("t1"), *LABELS))
    prompt, payload = edit(SOURCE, [CUT], tail=[9, 8, 7])
    after = (SpanLabel("m1", 0, 60), SpanLabel("m3", 60, 130), SpanLabel("m4", 130, len(prompt)))
    _, record = run(engine, prompt, labelled(payload, *after))
    assert record.receipt.tokens.spliced == 120
    return prompt, record.receipt.lineage


def forget(
    engine: ReplayEngine, prompt: list[int], lineage: tuple[LineageRun, ...], *names: str
) -> EditPayload:
    """A payload that continues a lineage and forgets spans by name alone."""
    spans = (SpanLabel("m1", 0, 60), SpanLabel("rest", 60, len(prompt)))
    payload = EditPayload(session="s", scope=SCOPE, turn="forgetting", lineage=lineage)
    return labelled(payload, *spans, forget=names)


def test_a_span_truncated_turns_ago_is_forgotten_by_its_name() -> None:
    """No source of the request holds the span any more; its readers go all the same, blank."""
    engine = make_engine(pool=1200)
    prompt, lineage = truncated(engine)
    for number in range(9):
        prompt = [*prompt, number + 1]
        spans = (SpanLabel("m1", 0, 60), SpanLabel("rest", 60, len(prompt)))
        later = EditPayload(session="s", scope=SCOPE, turn=f"u{number}", lineage=lineage)
        run(engine, prompt, labelled(later, *spans))
    assert "t2" not in retained(engine)
    readers = np.concatenate([cached(engine, prompt, lineage)[60:], cached(engine, SOURCE)[60:]])
    asked = [*prompt, 99]
    sequence = admit(engine, asked, forget(engine, asked, lineage, SECRET))
    assert sequence.receipt.tokens.prefix == 60
    assert sequence.receipt.reason is Reason.REPREFILLED
    assert sequence.receipt.forgot == ForgetCounts(overwritten=len(readers))
    assert blank(engine, np.setdiff1d(readers, sequence.owned))
    assert same_logits(prefill(sequence), reference(asked))
    sequence.finish()
    engine.check_integrity()
    assert retained(engine) == ["forgetting"]


def test_a_forget_keeps_what_was_computed_before_the_spans_first_reader() -> None:
    """A splice in front of the span has nothing to do with it; its KV keeps serving."""
    engine = make_engine(pool=1200)
    run(engine, SOURCE, labelled(register("t1"), *LABELS))
    prompt, payload = edit(SOURCE, [Directive(40, 45), Directive(150, 160)], tail=[9])
    after = (
        SpanLabel("m1", 0, 55),
        SpanLabel(SECRET, 53, 75),
        SpanLabel("m3", 73, 145),
        SpanLabel("m4", 145, len(prompt)),
    )
    _, record = run(engine, prompt, labelled(payload, *after))
    lineage = record.receipt.lineage
    answer, forgot = run(engine, [*prompt, 5], forget(engine, [*prompt, 5], lineage, "m4"))
    # m4 was at 150 in its source; the copy from before it, after the first cut, stays.
    assert forgot.receipt.tokens.prefix == 145
    assert forgot.receipt.lineage == lineage
    assert not same_logits(answer, reference([*prompt, 5]))


@pytest.mark.parametrize("names", [("never heard of",), (SECRET, "never heard of")])
def test_an_unknown_name_spares_nothing_but_the_exact_prefix(names: tuple[str, ...]) -> None:
    """A ledger that doesn't know a span's readers treats all spliced KV as its readers."""
    engine = make_engine(pool=1200)
    prompt, lineage = truncated(engine)
    asked = [*prompt, 99]
    answer, record = run(engine, asked, forget(engine, asked, lineage, *names))
    assert record.receipt.tokens.prefix == 60
    assert same_logits(answer, reference(asked))
    assert retained(engine) == ["forgetting"]


def test_an_edit_beside_an_unknown_name_copies_nothing() -> None:
    """A span with readers unknown to the ledger forbids copies, also where an edit offers some."""
    engine = make_engine(pool=1200)
    prompt, lineage = truncated(engine)
    asked, payload = edit(
        prompt, [Directive(100, 105)], source_turn="t2", turn="t3", lineage=lineage, tail=[4]
    )
    payload = labelled(payload, SpanLabel("all", 0, len(asked)), forget=("never heard of",))
    answer, record = run(engine, asked, payload)
    assert (record.receipt.tokens.prefix, record.receipt.tokens.spliced) == (60, 0)
    assert same_logits(answer, reference(asked))


def test_turns_that_never_read_the_span_stay() -> None:
    """A branch that was computed without it is neither erased nor lost as a source."""
    engine = make_engine(pool=1200)
    branch = [*SOURCE[:58], *random_tokens(50, 9)]
    labels = (SpanLabel("m1", 0, 58), SpanLabel("b2", 58, len(branch)))
    run(engine, branch, labelled(register("branch"), *labels))
    prompt, lineage = truncated(engine)
    slots = cached(engine, branch)
    run(engine, [*prompt, 1], forget(engine, [*prompt, 1], lineage, SECRET))
    assert retained(engine) == ["branch", "forgetting"]
    assert np.array_equal(cached(engine, branch), slots)
    assert len(cached(engine, SOURCE)) == 60


def test_a_directive_forgets_by_the_labels_under_it() -> None:
    """A forget directive over a labelled source reaches the span's readers in other turns."""
    engine = make_engine(pool=1200)
    prompt, lineage = truncated(engine)
    asked, payload = edit(SOURCE, [Directive(60, 80, (), Mode.FORGET)], tail=[4], turn="t3")
    _, record = run(engine, asked, labelled(payload, SpanLabel("all", 0, len(asked))))
    assert record.receipt.tokens.spliced == 0
    assert len(cached(engine, prompt, lineage)) == 60


def test_the_answer_of_a_turn_is_a_span_of_its_own() -> None:
    """The engine's answer can be forgotten by the turn's name, and the prompt stays."""
    engine = make_engine(pool=1200)
    run(engine, SOURCE, labelled(register("t1"), *LABELS), decode=6)
    longer = [*SOURCE, 1, 2, 3]
    name = output_span("t1")
    payload = labelled(register("t2"), *LABELS, SpanLabel("m5", 200, 203), forget=(name,))
    _, record = run(engine, longer, payload)
    assert record.receipt.tokens.prefix == 200
    assert record.receipt.forgot == ForgetCounts(overwritten=6)


def test_a_forget_that_meets_nothing_is_no_edit() -> None:
    """A name demanded in a session's first turn leaves its receipt that of an ordinary request."""
    engine = make_engine()
    payload = labelled(register("t1"), SpanLabel("m1", 0, 100), forget=("m0",))
    _, record = run(engine, SOURCE[:100], payload)
    assert record.receipt.outcome is Outcome.UNEDITED
    assert record.receipt.reason is None
    assert record.receipt.forgot == ForgetCounts()


def test_pending_slots_close_the_receipt_later() -> None:
    """Slots that others hold are counted until the last holder ends and they are overwritten."""
    engine = make_engine(pool=1200)
    run(engine, SOURCE, labelled(register("t1"), *LABELS))
    holder = admit(engine, [*SOURCE, 5], register("t1", session="z"))
    beside = admit(engine, [*SOURCE[:90], 6, 7], labelled(register("t2"), *LABELS[:2]))
    own = len(beside.owned)
    prompt, payload = edit(SOURCE, [CUT], tail=[9], turn="t3")
    asked = admit(engine, prompt, labelled(payload, SpanLabel("m", 0, 181), forget=(SECRET,)))
    waiting = 200 - 60 + own
    assert asked.receipt.forgot == ForgetCounts(pending=waiting)
    assert engine.settled_forgets() == {}
    book = RecordBook()
    prefill(asked)
    book.put(asked.finish())
    name = asked.receipt.message_id
    beside.abort()
    [(ticket, counts)] = engine.settled_forgets().items()
    assert (ticket, counts) == (name, ForgetCounts(overwritten=own, pending=140))
    prefill(holder)
    holder.finish()
    for ticket, counts in engine.settled_forgets().items():
        book.update_forgot(ticket, counts)
    record = book.get(name)
    assert record is not None
    assert record.receipt.forgot == ForgetCounts(overwritten=waiting)
    assert engine.settled_forgets() == {}


def test_a_receipt_keeps_what_was_learned_while_its_request_ran() -> None:
    """Filing the finished record doesn't bring back the count of pending slots."""
    engine = make_engine(pool=1200)
    run(engine, SOURCE, labelled(register("t1"), *LABELS))
    _, record = run(engine, SOURCE[:60], labelled(register("t2"), *LABELS[:1], forget=(SECRET,)))
    book = RecordBook()
    book.put(record)
    book.update_forgot(record.receipt.message_id, ForgetCounts(overwritten=7))
    book.put(record)
    later = book.get(record.receipt.message_id)
    assert later is not None and later.receipt.forgot == ForgetCounts(overwritten=7)


@pytest.mark.parametrize(
    ("scope", "share", "prefix"),
    [(SCOPE, "crew", 182), (SCOPE, "", 60), (SCOPE, "others", 60), ("else", "crew", 60)],
)
def test_shared_kv_serves_the_scope_and_nobody_else(scope: str, share: str, prefix: int) -> None:
    """KV that a turn splices under SHARE is found by the tenant's requests of that scope alone."""
    engine = make_engine(pool=1200)
    run(engine, SOURCE, labelled(register("t1"), *LABELS))
    prompt, payload = edit(SOURCE, [CUT], tail=[9, 8])
    _, record = run(engine, prompt, msgspec.structs.replace(payload, share="crew"))
    (run_,) = record.receipt.lineage
    assert run_.start == 60 and "crew" not in run_.lineage
    other = EditPayload(session="other", scope=scope, turn="t", share=share)
    answer, found = run(engine, [*prompt, 5], other)
    assert found.receipt.tokens.prefix == prefix
    assert same_logits(answer, reference([*prompt, 5])) == (prefix == 60)


def joined(engine: ReplayEngine) -> tuple[list[int], list[int], EditPayload]:
    """Session y continues what s shared; then the prompt and payload of a splice of its own.

    Returns:
        The prompt of s, and of y's next turn with its payload.
    """
    run(engine, SOURCE, labelled(register("t1"), *LABELS))
    prompt, payload = edit(SOURCE, [CUT], tail=[9, 8])
    after = (SpanLabel("m1", 0, 60), SpanLabel("m3", 60, len(prompt)))
    run(engine, prompt, msgspec.structs.replace(labelled(payload, *after), share="crew"))
    join = msgspec.structs.replace(register("y1", session="y"), share="crew")
    longer = [*prompt, 5, 6]
    _, there = run(engine, longer, labelled(join, SpanLabel("k", 0, len(longer))))
    assert there.receipt.tokens.prefix == len(prompt)
    moved, splice = edit(
        longer, [Directive(40, 44)], tail=[3], source_turn="y1", turn="y2", session="y"
    )
    splice = msgspec.structs.replace(splice, lineage=there.receipt.lineage)
    return prompt, moved, labelled(splice, SpanLabel("k", 0, len(moved)))


def test_a_forget_reaches_what_others_made_of_shared_kv() -> None:
    """Another session's own splice of shared KV goes as well; what it sent itself stays."""
    engine = make_engine(pool=2000)
    prompt, moved, splice = joined(engine)
    _, own = run(engine, moved, splice)
    assert own.receipt.tokens.spliced > 100
    run(engine, [*prompt, 1], forget(engine, [*prompt, 1], own.receipt.lineage, SECRET))
    # Positions 40 to 55 of y's own splice were copied from before the secret.
    assert len(cached(engine, moved, own.receipt.lineage)) == 56
    engine.check_integrity()


def test_a_running_splice_of_shared_kv_is_not_published_after_a_forget() -> None:
    """It was admitted with KV that had read the span; what it computes is overwritten."""
    engine = make_engine(pool=2000)
    prompt, moved, splice = joined(engine)
    running = admit(engine, moved, splice)
    own = running.owned.copy()
    asked = [*prompt, 1]
    sequence = admit(engine, asked, forget(engine, asked, (), SECRET))
    prefill(running)
    record = running.finish()
    assert record.receipt.turn == ""
    assert len(cached(engine, moved, record.receipt.lineage)) <= 40
    assert blank(engine, np.setdiff1d(own, sequence.owned))
    sequence.abort()
    engine.check_integrity()


@pytest.mark.parametrize("share", ["", "crew"])
def test_nobody_can_tell_a_lineage_before_its_engine_has_started(share: str) -> None:
    """Two engines name one splice differently, and each finds it again under its own name."""
    names = []
    for _ in range(2):
        engine = make_engine(pool=1200)
        run(engine, SOURCE, labelled(register("t1"), *LABELS))
        prompt, payload = edit(SOURCE, [CUT], tail=[9, 8])
        _, record = run(engine, prompt, msgspec.structs.replace(payload, share=share))
        lineage = record.receipt.lineage
        later = EditPayload(session="s", scope=SCOPE, turn="t9", lineage=lineage, share=share)
        _, found = run(engine, [*prompt, 5], later)
        assert found.receipt.tokens.prefix == 182
        names.append(lineage[0].lineage)
    assert names[0] != names[1]
