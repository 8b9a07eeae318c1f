"""Forgetting: what it reaches, what it leaves to others, and what goes wrong on the way."""

from __future__ import annotations

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

from leyline_engine.contract import Directive, EditPayload, LineageRun, Mode, Reason
from leyline_replay.engine import ReplayEngine

SOURCE = random_tokens(100, 3)
AMORTIZE = Directive(40, 45)
FORGET = Directive(60, 70, (), Mode.FORGET)


def served_by_lineage(
    engine: ReplayEngine, prompt: list[int], lineage: tuple[LineageRun, ...]
) -> int:
    """Tokens that a request naming this lineage finds in the cache."""
    payload = EditPayload(session="s", scope=SCOPE, turn="probe", lineage=lineage)
    _, record = run(engine, [*prompt, 9], payload)
    return record.receipt.tokens.prefix


def test_forget_overwrites_and_frees() -> None:
    """KV after the span that only this session held is zero before another gets its slots."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"), decode=3)
    slots = cached(engine, SOURCE)[60:]
    prompt, payload = edit([*SOURCE], [FORGET], tail=[9])
    sequence = admit(engine, prompt, payload)
    assert blank(engine, np.setdiff1d(slots, sequence.owned))
    answer = prefill(sequence)
    assert same_logits(answer, reference(prompt))
    # The digest is that of the prompt alone, so the edit is refused; the forget is not.
    assert sequence.receipt.reason is Reason.TOKEN_MISMATCH
    assert sequence.receipt.tokens.freed == 43
    sequence.finish()
    engine.check_integrity()
    assert len(cached(engine, SOURCE)) == 60


def test_forget_reaches_spliced_descendants() -> None:
    """A lineage that an earlier amortize made goes too, though the span is cut there already."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    cut = Directive(60, 70)
    prompt, payload = edit(SOURCE, [cut], tail=[9, 8])
    _, record = run(engine, prompt, payload)
    assert record.receipt.tokens.spliced
    again, redact = edit(SOURCE, [FORGET], tail=[9, 8, 7], turn="t3")
    answer, gone = run(engine, again, redact)
    assert same_logits(answer, reference(again))
    assert gone.receipt.tokens.freed == 40 + 32
    assert len(cached(engine, prompt, record.receipt.lineage)) <= 60
    assert len(cached(engine, SOURCE)) == 60


def test_forget_leaves_what_others_sent_themselves() -> None:
    """Nodes that another session shares stay for it, and are counted."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    run(engine, SOURCE[:80], register("t1", session="z"))
    prompt, payload = edit(SOURCE, [FORGET], tail=[9])
    _, record = run(engine, prompt, payload)
    assert record.receipt.forgot and record.receipt.forgot.shared_retained == 20
    assert record.receipt.tokens.freed == 20
    assert len(cached(engine, SOURCE)) == 80


def test_forget_waits_for_running_requests() -> None:
    """Held slots are unmatchable at once and overwritten when their holder ends."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    holder = admit(engine, [*SOURCE, 5], register("t1", session="z"))
    prompt, payload = edit(SOURCE, [FORGET], tail=[9])
    slots = cached(engine, SOURCE)[60:]
    _, record = run(engine, prompt, payload)
    assert record.receipt.forgot and record.receipt.forgot.pending == 40
    assert engine.stats().doomed == 40
    assert len(cached(engine, SOURCE)) == 60
    assert not blank(engine, slots)
    prefill(holder)
    holder.finish()
    engine.check_integrity()
    assert engine.stats().doomed == 0
    assert len(cached(engine, SOURCE)) == 60
    assert blank(engine, slots)


def test_a_running_turn_of_the_session_is_not_kept() -> None:
    """A turn computed beside a forget is no source for later ones and isn't matchable."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    beside = [*SOURCE, 1, 2, 3]
    running = admit(engine, beside, register("t2"))
    prompt, payload = edit(SOURCE, [FORGET], tail=[9], turn="t3")
    run(engine, prompt, payload)
    prefill(running)
    running.finish()
    engine.check_integrity()
    assert retained(engine) == ["t3"]
    assert len(cached(engine, beside)) == 60


def test_forget_reaches_what_a_running_turn_published() -> None:
    """A turn that still decodes has published its prompt; a forget must reach that too."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[1, 2])
    running = admit(engine, prompt, payload)
    prefill(running)
    again, redact = edit(SOURCE, [AMORTIZE, FORGET], tail=[5], turn="t3")
    run(engine, again, redact)
    running.finish()
    assert retained(engine) == ["t3"]
    assert served_by_lineage(engine, prompt, running.receipt.lineage) <= 40


def test_forget_reaches_an_aborted_turn() -> None:
    """A client that hangs up leaves KV in the tree; a later forget must find it."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[1, 2])
    aborted = admit(engine, prompt, payload)
    prefill(aborted)
    aborted.abort()
    slots = cached(engine, prompt, aborted.receipt.lineage)[40:]
    again, redact = edit(SOURCE, [AMORTIZE, FORGET], tail=[5], turn="t3")
    sequence = admit(engine, again, redact)
    assert len(slots) == 57
    assert blank(engine, np.setdiff1d(slots, sequence.owned))
    prefill(sequence)
    sequence.finish()
    assert served_by_lineage(engine, prompt, aborted.receipt.lineage) <= 40


@pytest.mark.parametrize("turns", [1, 8])
def test_forget_reaches_turns_that_are_no_longer_retained(turns: int) -> None:
    """Retaining few turns bounds the sources, not what a forget has to erase."""
    engine = make_engine(pool=2000)
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[1, 2])
    _, spliced = run(engine, prompt, payload)
    for number in range(turns):
        name = f"u{number}"
        latest = [*SOURCE, number + 1]
        run(engine, latest, register(name))
    again, redact = edit(latest, [FORGET], tail=[5], turn="t3", source_turn=name)
    _, record = run(engine, again, redact)
    assert record.receipt.reason is Reason.REPREFILLED
    assert served_by_lineage(engine, prompt, spliced.receipt.lineage) <= 40


def test_slots_of_a_withheld_request_are_overwritten() -> None:
    """A turn that ran beside a forget read the span; its slots are blank before others get them."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    running = admit(engine, SOURCE + random_tokens(50, 7), register("t2"))
    running.prefill_step()
    own = running.owned.copy()
    prompt, payload = edit(SOURCE, [FORGET], tail=[5], turn="t3")
    sequence = admit(engine, prompt, payload)
    running.abort()
    freed = np.setdiff1d(own, sequence.owned)
    assert len(freed) == 50
    assert blank(engine, freed)
