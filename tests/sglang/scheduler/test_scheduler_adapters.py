"""LoRA adapters in SGLang's queue: whose KV an edit copies, what computes its gaps, and forgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from scheduler_kit import Scheduler, text

from leyline_engine.contract import (
    Directive,
    EditPayload,
    ForgetCounts,
    Outcome,
    Reason,
    Receipt,
    SourceRef,
    SpanLabel,
    apply_directives,
    token_digest,
)
from leyline_engine.records.publications import Space
from leyline_engine.sglang.stage_row import StageRow

pytestmark = pytest.mark.usefixtures("server_args")

OPENING = text(200, 1)
CUTS = (Directive(50, 60, (7, 8)), Directive(120, 130, (9,)))
RED, BLUE, NONE = Space("red"), Space("blue"), Space()
SECRET = 1001


def payload(name: str, **fields: Any) -> EditPayload:
    """A turn of the one session."""
    return EditPayload(session="s", scope="t", turn=name, **fields)


def ask(
    scheduler: Scheduler, prompt: Sequence[int], turn: EditPayload, space: Space
) -> tuple[list[int], Receipt]:
    """All tokens of a turn, served alone, and its receipt."""
    req, record = scheduler.serve(prompt, turn, space=space)
    assert record is not None
    scheduler.check_idle()
    return [*prompt, *req.output_ids], record.receipt


def edit_of(source: Sequence[int]) -> tuple[list[int], EditPayload]:
    """An edit of the session's opening, with two gaps."""
    ref = SourceRef("t1", len(source), token_digest(source))
    return [*apply_directives(source, CUTS), 5], payload("t2", sources=(ref,), directives=CUTS)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (RED, RED, Reason.SPLICED),
        (NONE, NONE, Reason.SPLICED),
        (RED, BLUE, Reason.INCOMPATIBLE_IDENTITY),
        (RED, NONE, Reason.INCOMPATIBLE_IDENTITY),
        (NONE, RED, Reason.INCOMPATIBLE_IDENTITY),
    ],
)
def test_a_source_is_of_the_adapter_that_computed_it(
    before: Space, after: Space, reason: Reason
) -> None:
    """An edit draws on sources of its own adapter only; others are refused by name."""
    scheduler = Scheduler(3000)
    source, _ = ask(scheduler, OPENING, payload("t1"), before)
    prompt, edit = edit_of(source)
    _, receipt = ask(scheduler, prompt, edit, after)
    assert receipt.reason is reason
    own = reason is Reason.SPLICED
    assert receipt.outcome is (Outcome.SPLICED if own else Outcome.REPREFILLED)
    assert (receipt.tokens.spliced > 100) == own
    assert receipt.tokens.prefix == (50 if own else 0)


def test_gaps_are_computed_with_the_turn_s_adapter() -> None:
    """A stage row has its request's adapter and namespace, which SGLang would else make anew."""
    scheduler = Scheduler(3000)
    source, _ = ask(scheduler, OPENING, payload("t1"), RED)
    prompt, edit = edit_of(source)
    req = scheduler.submit(prompt, edit, space=RED)
    req.lora_id = "red"
    row = StageRow(scheduler.engine.turn_of(req), 52)
    assert (row.lora_id, row.extra_key) == ("red", "red")
    # As SGLang's scheduler leaves it where none are wanted; ranks of data-parallel attention agree
    # on how many there are.
    assert row.logprob_start_len == -1


@pytest.mark.parametrize("space", [NONE, RED, Space(None, "salt"), Space("red", "salt")])
def test_a_forget_spares_what_was_before_the_span_in_any_namespace(space: Space) -> None:
    """The part of its own prompt that is cached stays, and so do turns that read nothing of it."""
    scheduler = Scheduler(3000)
    prompt = [*text(80, 2), SECRET, *text(60, 3)]
    labels = (SpanLabel("a", 0, 80), SpanLabel("b", 80, 81), SpanLabel("c", 81, 141))
    clean = text(90, 4)
    one, _ = ask(scheduler, clean, payload("t1", spans=(SpanLabel("x", 0, 90),)), space)
    two, _ = ask(scheduler, prompt, payload("t2", spans=labels), space)
    kept = (labels[0], SpanLabel("c", 80, 140))
    redacted = [*prompt[:80], *prompt[81:]]
    _, receipt = ask(scheduler, redacted, payload("t3", spans=kept, forget=("b",)), space)
    assert receipt.forgot == ForgetCounts(overwritten=len(two) - 1 - 80)
    assert receipt.tokens.prefix == 80
    assert scheduler.remembered() == frozenset()
    _, again = ask(scheduler, one, payload("t4"), space)
    assert again.tokens.prefix == len(one) - 1


@pytest.mark.parametrize("space", [NONE, RED, Space(None, "salt")])
def test_a_forget_spares_its_own_prompt_to_the_last_token(space: Space) -> None:
    """Also the token that it computes again, as each prompt's last one is."""
    scheduler = Scheduler(3000)
    prompt = [*text(80, 2), SECRET, *text(60, 3)]
    labels = (SpanLabel("a", 0, 80), SpanLabel("b", 80, 81), SpanLabel("c", 81, 141))
    told, _ = ask(scheduler, prompt, payload("t1", spans=labels), space)
    forget = payload("t2", spans=labels[:1], forget=("b",))
    _, receipt = ask(scheduler, prompt[:80], forget, space)
    assert receipt.tokens.prefix == 79
    assert receipt.forgot == ForgetCounts(overwritten=len(told) - 1 - 80)


@pytest.mark.parametrize("space", [NONE, RED])
def test_a_forget_spares_spliced_kv_that_its_turn_continues(space: Space) -> None:
    """In any namespace, a turn that continues a splice and forgets its end computes only that."""
    scheduler = Scheduler(3000)
    labels = (SpanLabel("a", 0, 200),)
    source, _ = ask(scheduler, OPENING, payload("t1", spans=labels), space)
    prompt, edit = edit_of(source)
    end = len(prompt) - 1
    labels = (SpanLabel("a", 0, end), SpanLabel("late", end, end + 1))
    edit = msgspec.structs.replace(edit, spans=labels)
    _, before = ask(scheduler, prompt, edit, space)
    assert before.reason is Reason.SPLICED
    fields = {"lineage": before.lineage, "spans": labels[:1], "forget": ("late",)}
    _, receipt = ask(scheduler, [*prompt[:end], 6, 7], payload("t3", **fields), space)
    assert receipt.tokens.prefix == end


def test_a_forget_reaches_the_namespaces_that_the_session_left() -> None:
    """KV under an earlier adapter goes, too."""
    scheduler = Scheduler(3000)
    prompt = [*text(80, 2), SECRET, *text(60, 3)]
    labels = (SpanLabel("a", 0, 80), SpanLabel("b", 80, 81), SpanLabel("c", 81, 141))
    for name, space in (("t1", RED), ("t2", BLUE)):
        ask(scheduler, prompt, payload(name, spans=labels), space)
    assert scheduler.remembered() == {SECRET}
    forget = payload("t3", spans=(SpanLabel("z", 0, 40),), forget=("b",))
    ask(scheduler, text(40, 5), forget, NONE)
    assert scheduler.remembered() == frozenset()
