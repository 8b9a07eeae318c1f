"""Models that keep state per sequence, in SGLang's own trees and pools: the reported anchors,
random sessions whose forwards start from the contract's state, forgets, refusals and proofs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from scheduler_kit import Scheduler, sealed, source_of, text
from secret_kit import TOLD, forgetting, telling
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from state_scheduler import GRID, RecurrentScheduler, WindowScheduler
from test_scheduler_random import Driver

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    ProvePayload,
    Reason,
    Receipt,
    RecurrentEdits,
    ReuseMode,
    ReusePayload,
    SourceRef,
    apply_directives,
    edit_envelope,
    token_array,
)
from leyline_engine.records.publications import Space
from leyline_engine.rows.pool import SplicePool

pytestmark = pytest.mark.usefixtures("server_args")
LIVE = ReusePayload(mode=ReuseMode.LIVE)
SECRET = 1001

Make = Callable[..., Scheduler]


def recurrent(**options: object) -> Scheduler:
    return RecurrentScheduler(**options)  # type: ignore[arg-type]


def buffered(**options: object) -> Scheduler:
    return RecurrentScheduler(buffered=True, **options)  # type: ignore[arg-type]


def overlapped(**options: object) -> Scheduler:
    return RecurrentScheduler(buffered=True, overlap=True, **options)  # type: ignore[arg-type]


def windowed(**options: object) -> Scheduler:
    return WindowScheduler(**options)  # type: ignore[arg-type]


def paged(**options: object) -> Scheduler:
    return WindowScheduler(page=16, windowed=1280, **options)  # type: ignore[arg-type]


KINDS = [recurrent, buffered, windowed, paged]


def edited(
    scheduler: Scheduler, req: Req, *cuts: Directive, decode: int = 2, **fields: object
) -> tuple[Req, Receipt]:
    """Serve an edit of session ``s``, of its turn ``t1``."""
    fields = {"recurrent": RecurrentEdits.KEPT, **fields}
    payload = EditPayload(
        session="s",
        scope="t",
        turn="t2",
        sources=(SourceRef("t1", len(source_of(req)), sealed(req)),),
        directives=cuts,
        **fields,  # type: ignore[arg-type]
    )
    prompt = [*apply_directives(source_of(req), cuts), 9, 8]
    done, record = scheduler.serve(prompt, payload, decode=decode)
    assert record is not None
    scheduler.check_idle()
    return done, record.receipt


def told(scheduler: Scheduler, length: int = 300) -> Req:
    """Serve the turn that is edited next."""
    payload = EditPayload(session="s", scope="t", turn="t1")
    return scheduler.serve(text(length, 1), payload)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_anchors_are_where_a_match_ends(kind: Make, seed: int) -> None:
    """For each position, the last anchor is the end of SGLang's own match limited to it."""
    rng, scheduler = Random(seed), kind(chunk=40)
    paths: list[list[int]] = []
    for number in range(6):
        base = rng.choice(paths)[: rng.randrange(20, 200)] if paths else []
        prompt = [*base, *text(rng.randrange(30, 150), 10 * seed + number)]
        paths.append(list(source_of(scheduler.serve(prompt, decode=rng.randrange(1, 30))[0])))
    for _ in range(3):
        lost = EvictParams(num_tokens=0, mamba_num=1, swa_num_tokens=2 * GRID)
        scheduler.cache.evict(lost)
    found = 0
    for path in paths:
        keys = token_array(path)
        end = scheduler.cache.find(keys, Space())
        anchors = scheduler.cache.state.anchors(end.last_device_node)
        found += len(anchors.spans)
        for limit in range(end.device_prefix_len + 1):
            native = scheduler.cache.find(keys, Space(), limit).device_prefix_len
            assert anchors.last(limit, step=scheduler.page) == native, (limit, anchors)
    assert found > 6


WIDE = [
    pytest.param(recurrent, {}, id="recurrent"),
    pytest.param(recurrent, {"states": 40, "capacity": 460, "chunk": 32}, id="recurrent-pressure"),
    pytest.param(buffered, {"chunk": 32}, id="buffered-chunked"),
    pytest.param(overlapped, {"states": 72, "capacity": 700, "chunk": 32}, id="overlapped"),
    pytest.param(windowed, {}, id="windowed"),
    pytest.param(windowed, {"windowed": 260, "capacity": 900, "chunk": 32}, id="windowed-pressure"),
    pytest.param(windowed, {"overlap": True, "chunk": 24, "reuses": True}, id="windowed-reuse"),
    pytest.param(paged, {"capacity": 1600}, id="paged"),
]


def run(kind: Make, options: dict[str, object], seed: int, steps: int) -> Driver:
    """Random sessions; each step checks rows, windows, states and slots."""
    options = dict(options)
    reuses = bool(options.pop("reuses", False))
    scheduler = kind(**options)
    driver = Driver(seed, scheduler, reuses=reuses)
    driver.run(steps)
    assert driver.spliced > 1 and driver.reused > 100 and driver.forgot > 1
    scheduler.flush()
    assert scheduler.cache.row_allocator.available_size() == scheduler.capacity
    return driver


@pytest.mark.parametrize("kind", [recurrent, buffered, windowed])
def test_random_sessions(kind: Make) -> None:
    """Forwards start from the states and windows of their own sequences; what is forgotten is in
    no row, no window and no state."""
    run(kind, {"capacity": 900, "chunk": 32}, 0, 250)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "options"), WIDE)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_many_random_sessions(kind: Make, options: dict[str, object], seed: int) -> None:
    """The same under pressure, with chunks, pages, overlap and reuse, over 200 victims and more."""
    driver = run(kind, options, seed, 1000)
    assert len(driver.scheduler.sender.records) >= 200


@pytest.mark.parametrize("kind", [recurrent, buffered, windowed])
def test_a_foreign_state_is_noticed(kind: Make) -> None:
    """The check of the random sessions fails if a cached state or window is another session's."""
    scheduler = kind()
    first = source_of(scheduler.serve(text(100, 1))[0])
    scheduler.serve(text(100, 2))
    if isinstance(scheduler, WindowScheduler):
        cached = scheduler.inside(scheduler.cache.all_values_flatten())
        rows = scheduler.windowed.kv_buffer[0]
        rows[cached[cached > 0]] = rows[cached[cached > 0]].roll(1, 0)
    else:
        here = scheduler.cache.all_mamba_values_flatten()
        scheduler.splicing.states.copy(here, here.roll(1))
    with pytest.raises(AssertionError, match=r"state|window|key"):
        scheduler.serve([*first, 7, 8])


@pytest.mark.parametrize("kind", [recurrent, windowed])
@pytest.mark.parametrize("cut", [Directive(60, 90, ()), Directive(60, 90, tuple(text(7, 4)))])
def test_an_edit_moves_rows_and_state_from_anchor_to_anchor(kind: Make, cut: Directive) -> None:
    """All rows after the cut are copied up to the source's last anchor; one more turn matches."""
    scheduler = kind()
    req = told(scheduler)
    done, receipt = edited(scheduler, req, cut)
    assert receipt.outcome is Outcome.SPLICED
    assert receipt.tokens.spliced == 300 + 1 - cut.end
    assert receipt.state == ("kept" if kind is recurrent else "")
    after = EditPayload(session="s", scope="t", turn="t3", lineage=receipt.lineage)
    prompt = [*source_of(done), 5, 6]
    _, record = scheduler.serve(prompt, after)
    assert record is not None and record.receipt.tokens.prefix >= len(prompt) - 4


@pytest.mark.parametrize("kind", [recurrent, buffered])
def test_exact_states_refuse_edits_and_reuse(kind: Make) -> None:
    """Nobody gets a kept state without asking, and nobody reuses other sessions' content."""
    scheduler = kind()
    before = scheduler.seen.copied_bytes
    receipt = edited(
        scheduler, told(scheduler), Directive(60, 90, ()), recurrent=RecurrentEdits.EXACT
    )[1]
    assert receipt.reason is Reason.RECURRENT_STATE and not receipt.state
    document = text(150, 9)
    scheduler.serve([*text(40, 5), *document], EditPayload(session="a", scope="t", turn="t1"))
    wanted = EditPayload(session="b", scope="t", turn="t1", recurrent=RecurrentEdits.KEPT)
    _, record = scheduler.serve([*text(50, 6), *document, 1], wanted, reuse=LIVE)
    assert record is not None and record.receipt.tokens.reused == 0
    assert scheduler.seen.copied_bytes == before


def test_windows_still_reuse() -> None:
    """Content of another session is copied, with its last rows in the windows."""
    scheduler, document = windowed(), text(150, 9)
    first = EditPayload(session="a", scope="t", turn="t1")
    scheduler.serve([*text(40, 5), *document], first, reuse=LIVE)
    other = EditPayload(session="b", scope="t", turn="t1")
    _, record = scheduler.serve([*text(50, 6), *document, 1], other, reuse=LIVE)
    assert record is not None and record.receipt.tokens.reused > 100


@pytest.mark.parametrize("kind", [buffered, overlapped])
@pytest.mark.parametrize("stub", [3, GRID + 3])
def test_gaps_leave_their_state_at_their_end(kind: Make, stub: int) -> None:
    """A gap that ends off the grid is in the tree with its state, whenever its row is processed."""
    scheduler = kind()
    req = told(scheduler, 320)
    receipt = edited(scheduler, req, Directive(61, 93, tuple(text(stub, 4))))[1]
    assert receipt.outcome is Outcome.SPLICED
    assert receipt.tokens.spliced > 200


@pytest.mark.parametrize("kind", [recurrent, buffered])
def test_waiting_turns_hold_no_states(kind: Make) -> None:
    """A turn that waits for its gap leaves its slot to those that run."""
    scheduler = kind(chunk=16)
    req = told(scheduler)
    cut = Directive(61, 93, tuple(text(40, 4)))
    payload = EditPayload(
        session="s",
        scope="t",
        turn="t2",
        sources=(SourceRef("t1", len(source_of(req)), sealed(req)),),
        directives=(cut,),
        recurrent=RecurrentEdits.KEPT,
    )
    waits = scheduler.submit([*apply_directives(source_of(req), (cut,)), 9], payload)
    for _ in range(3):
        scheduler.step()
        assert waits in scheduler.waiting and not waits.kv.holds_mamba
    scheduler.abort(waits)
    scheduler.drain()
    scheduler.check_idle()


@pytest.mark.parametrize("kind", [recurrent, buffered])
def test_a_flush_leaves_no_state(kind: Make) -> None:
    """Free slots of states are empty after a flush, too."""
    scheduler = kind()
    scheduler.serve([*text(40, 1), SECRET, *text(40, 2)])
    scheduler.flush()
    scheduler.cache.scrub()
    assert SECRET not in scheduler.everywhere()


@pytest.mark.parametrize("kind", [recurrent, buffered, windowed, paged])
def test_a_proof_looks_at_states_and_windows(kind: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forget is proven clean; what a free slot of a state or a window holds survives."""
    parts = SplicePool.parts
    monkeypatch.setattr(  # the stand-in's rotary keys depend on positions alone
        SplicePool, "parts", lambda self: [p for p in parts(self) if p.group.startswith("free")]
    )
    places = []
    for planted in (False, True):
        scheduler = kind()
        scheduler.serve(TOLD, telling())
        if planted:
            plant(scheduler, monkeypatch)
        hints = edit_envelope(
            "p", forgetting(forget=("*",), spans=()), prove=ProvePayload(nonce="5e" * 32)
        )
        scheduler.submit([7], message_id="p", hints=hints)
        scheduler.drain()
        proof = scheduler.sender.proofs["p"]
        assert bool(proof.survivors) == planted, proof
        places.append({place.place: place.survivors for place in proof.places})
    name = "window" if isinstance(scheduler, WindowScheduler) else "state"
    assert places[0][name] == 0 < places[1][name]


def plant(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have free slots keep what they held."""
    if isinstance(scheduler, WindowScheduler):
        monkeypatch.setattr(scheduler.splicing.window, "erase_used", lambda _: None)
        monkeypatch.setattr(scheduler.splicing.window, "erase", lambda _: None)
        monkeypatch.setattr(scheduler, "check", lambda: None)
    else:
        monkeypatch.setattr(scheduler.splicing.states, "erase", lambda _: None)
        monkeypatch.setattr(scheduler, "check", lambda: None)


def test_a_withheld_request_leaves_nothing_in_windows() -> None:
    """Rows that leave the window of a request after its session forgot are overwritten with it."""
    scheduler = windowed()
    scheduler.submit(TOLD, telling(), decode=30)
    for _ in range(12):
        scheduler.step()
    scheduler.submit([7], forgetting(forget=("*",), spans=()), message_id="f", decode=1)
    scheduler.drain()
    forgot = scheduler.sender.forgotten.get("f", scheduler.sender.records["f"].receipt.forgot)
    assert forgot is not None and not forgot.pending
    assert not scheduler.everywhere()
