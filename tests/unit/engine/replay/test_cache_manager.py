"""Publishing, sharing and evicting, and an integrity check that sees damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.replay_engine import (
    SCOPE,
    VOCAB,
    admit,
    cached,
    edit,
    ids,
    make_engine,
    prefill,
    random_tokens,
    reference,
    register,
    run,
    same_logits,
    snapshot,
)

from leyline_engine.contract import Directive, EditPayload, Outcome, Reason
from leyline_replay.cache.integrity import IntegrityError
from leyline_replay.engine import PoolExhaustedError, ReplayEngine

SOURCE = random_tokens(100, 3)
AMORTIZE = Directive(40, 45)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_splice_moves_values_and_keys(kind: str) -> None:
    """After an amortized cut the values are those of the source, the keys turned by δ."""
    engine = make_engine(kind)
    run(engine, SOURCE, register("t1"))
    source = cached(engine, SOURCE)
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[9, 8])
    _, record = run(engine, prompt, payload)
    assert record.receipt.outcome is Outcome.SPLICED
    assert record.receipt.tokens.spliced == 55
    assert record.receipt.lineage[0].start == 40
    spliced = cached(engine, prompt, record.receipt.lineage)
    assert len(spliced) == len(prompt)
    assert spliced[:40].tolist() == source[:40].tolist()
    layout = engine.cache.pool.layout
    for layer in range(layout.layers):
        old = engine.cache.pool.read(layer, source[45:])
        new = engine.cache.pool.read(layer, spliced[40:95])
        assert torch.equal(old[1 - layout.rotary_tensor], new[1 - layout.rotary_tensor])
        turned = engine.cache.pool.rotary.rotate(
            old[layout.rotary_tensor], torch.arange(45, 100), torch.arange(40, 95)
        )
        assert torch.allclose(turned, new[layout.rotary_tensor], atol=1e-6)


def test_spliced_kv_is_private() -> None:
    """The next turn finds it by lineage; the same tokens without it get a clean answer."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[9, 8])
    answer, record = run(engine, prompt, payload)
    assert not same_logits(answer, reference(prompt))
    longer = [*prompt, 4]
    follow = EditPayload(session="s", scope=SCOPE, turn="t3", lineage=record.receipt.lineage)
    _, mine = run(engine, longer, follow)
    assert mine.receipt.tokens.prefix == len(prompt)
    clean, theirs = run(engine, longer, register("t1", session="z"))
    assert theirs.receipt.tokens.prefix == 40
    assert theirs.receipt.lineage == ()
    assert same_logits(clean, reference(longer))


def test_lineage_of_another_scope_is_not_served() -> None:
    """Naming another tenant's lineage finds the exact prefix only."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[1, 2])
    _, record = run(engine, prompt, payload)
    stolen = EditPayload(session="s", scope="other", turn="x", lineage=record.receipt.lineage)
    _, taken = run(engine, [*prompt, 3], stolen)
    assert taken.receipt.tokens.prefix == 40


def test_two_edits_with_equal_tokens_share_nothing() -> None:
    """Two different cut spans leave the same text: equal prompts, two lineages."""
    head, rest = random_tokens(40, 4), random_tokens(40, 5)
    sources = [[*head, *span, *rest] for span in ([7, 7, 7], [8, 9])]
    engine = make_engine()
    found = []
    for number, source in enumerate(sources):
        run(engine, source, register(f"t{number}"))
        cut = Directive(40, len(source) - 40)
        prompt, payload = edit(source, [cut], tail=[3], source_turn=f"t{number}", turn=f"u{number}")
        answer, record = run(engine, prompt, payload)
        assert record.receipt.outcome is Outcome.SPLICED
        found.append((prompt, answer, record.receipt.lineage))
    (prompt, answer, lineage), (same, other_answer, other) = found
    assert prompt == same
    assert lineage[-1].lineage != other[-1].lineage
    assert not same_logits(answer, other_answer)
    slots = [set(cached(engine, prompt, runs)[40:].tolist()) for runs in (lineage, other)]
    assert len(slots[0]) == len(slots[1]) == 41
    assert not slots[0] & slots[1]


def test_edits_that_leave_the_same_kv_share_it() -> None:
    """Cutting either of two equal spans leaves the same prefix and the same copies."""
    source = [*random_tokens(40, 4), 7, 7, 7, 7, *random_tokens(40, 5)]
    engine = make_engine()
    run(engine, source, register("t1"))
    first, one = edit(source, [Directive(40, 42)], tail=[9])
    second, two = edit(source, [Directive(42, 44)], tail=[9])
    assert first == second
    answer, _ = run(engine, first, one)
    again, _ = run(engine, second, two)
    assert same_logits(answer, again)


def test_equal_requests_side_by_side_publish_once() -> None:
    """The second of two equal prompts gives its duplicate slots back and stays right."""
    engine = make_engine()
    one, two = admit(engine, SOURCE, register("a")), admit(engine, SOURCE, register("b"))
    for sequence in (one, two):
        assert same_logits(prefill(sequence), reference(SOURCE))
        engine.check_integrity()
    assert engine.stats().cached == 100
    assert engine.stats().in_flight == 0
    assert same_logits(two.decode_step(5), reference([*SOURCE, 5]))
    two.finish()
    one.abort()
    engine.check_integrity()
    assert engine.stats().cached == 101


def test_flush_spares_what_runs() -> None:
    """A running request's prefix survives a flush; afterwards everything goes."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    sequence = admit(engine, [*SOURCE, 5], register("t2"))
    run(engine, SOURCE[::-1], register("t1", session="z"))
    engine.flush()
    engine.check_integrity()
    assert engine.stats().cached == 100
    assert same_logits(prefill(sequence), reference([*SOURCE, 5]))
    sequence.abort()
    engine.flush()
    assert engine.stats().free == engine.stats().capacity


def test_evicted_source_is_named() -> None:
    """A source whose slots are gone is a reason, not an error."""
    engine = make_engine(pool=260)
    run(engine, SOURCE, register("t1"))
    run(engine, random_tokens(250, 9))
    prompt, payload = edit(SOURCE, [AMORTIZE], tail=[9])
    answer, record = run(engine, prompt, payload)
    assert record.receipt.reason is Reason.SOURCE_EVICTED
    assert same_logits(answer, reference(prompt))


def test_exhausted_pool_says_so() -> None:
    """Running requests fill the pool: the next has to wait, and fits when they end."""
    engine = make_engine(pool=150)
    first = admit(engine, SOURCE)
    with pytest.raises(PoolExhaustedError):
        admit(engine, SOURCE[::-1])
    engine.check_integrity()
    first.abort()
    admit(engine, SOURCE[::-1]).abort()
    engine.check_integrity()


def test_a_request_that_cannot_fit_evicts_nothing() -> None:
    """A waiting request is tried again and again; it must not empty the cache each time."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    running = admit(engine, random_tokens(300, 8))
    before = snapshot(engine)
    with pytest.raises(PoolExhaustedError):
        admit(engine, random_tokens(400, 9))
    assert snapshot(engine) == before
    running.abort()


def _leak(engine: ReplayEngine) -> None:
    engine.cache._allocator.allocate(1)


def _own_twice(engine: ReplayEngine) -> None:
    node = next(iter(engine.cache.tree.nodes()))
    node.slots = node.slots.copy()
    node.slots[0] = engine.cache._allocator.free_slots()[0]


def _free_what_is_cached(engine: ReplayEngine) -> None:
    engine.cache._allocator.release(next(iter(engine.cache.tree.nodes())).slots[:1])


def _one_slot_short(engine: ReplayEngine) -> None:
    node = next(iter(engine.cache.tree.nodes()))
    engine.cache._allocator.release(node.slots[-1:])
    node.slots = node.slots[:-1]


def _empty_node(engine: ReplayEngine) -> None:
    node = next(iter(engine.cache.tree.nodes()))
    engine.cache._allocator.release(node.slots)
    node.slots, node.keys = node.slots[:0], ids([])


def _stray_lock(engine: ReplayEngine) -> None:
    engine.cache.tree.lock(next(iter(engine.cache.tree.nodes())))


def _stray_lock_on_one_node(engine: ReplayEngine) -> None:
    next(iter(engine.cache.tree.nodes())).locks += 1


def _detached_in_the_tree(engine: ReplayEngine) -> None:
    next(iter(engine.cache.tree.nodes())).detached = True


def _owner_of_a_child_only(engine: ReplayEngine) -> None:
    node = next(child for child in engine.cache.tree.nodes() if child.children)
    node.owners.clear()


def _wrong_first_key(engine: ReplayEngine) -> None:
    children = engine.cache.tree.nodes()
    node = next(child for child in children if child.children)
    key, child = node.children.popitem()
    node.children[key + VOCAB] = child


def _wrong_parent(engine: ReplayEngine) -> None:
    node = next(child for child in engine.cache.tree.nodes() if child.children)
    next(iter(node.children.values())).parent = engine.cache.tree.root


def _lost_child(engine: ReplayEngine) -> None:
    engine.cache.tree.root.children.popitem()


@pytest.mark.damages
@pytest.mark.parametrize(
    "damage",
    [
        _leak,
        _own_twice,
        _free_what_is_cached,
        _one_slot_short,
        _empty_node,
        _stray_lock,
        _stray_lock_on_one_node,
        _detached_in_the_tree,
        _owner_of_a_child_only,
        _wrong_first_key,
        _wrong_parent,
        _lost_child,
    ],
)
def test_integrity_check_sees_damage(damage: Callable[[ReplayEngine], None]) -> None:
    """Leaked, doubly owned or misfiled slots, stray locks and lost owners are found."""
    engine = make_engine()
    run(engine, SOURCE, register("t1"))
    run(engine, [*SOURCE[:50], 5, 6], register("t2"))
    engine.check_integrity()
    damage(engine)
    with pytest.raises(IntegrityError):
        engine.check_integrity()
