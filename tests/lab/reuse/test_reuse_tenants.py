"""The bench of reuse between tenants: its own record of slots, and what it finds."""

from __future__ import annotations

from array import array

import pytest
from support.replay_engine import random_tokens, tiny_model

from leyline_lab.reuse.tenants import TenantBench, TenantRequest
from leyline_replay.models.loader import LoadedModel

DOCS = [random_tokens(120, seed) for seed in range(90, 96)]


def requests() -> list[TenantRequest]:
    """Two tenants read six documents, one of them from the fourth on; each repeats its last."""
    found = []
    for number in range(14):
        turn, tenant = divmod(number, 2)
        doc = DOCS[(min(turn, 5) + 3 * tenant) % 6]
        tokens = array("q", [*random_tokens(40, 10 + number), 3, *doc, 5, number + 1])
        found.append(TenantRequest(tenant, f"s{number}", tokens))
    return found


def bench(groups: tuple[str, ...]) -> TenantBench:
    """A bench on the tiny model."""
    tokenizer: object = None
    model = LoadedModel("tiny", tiny_model(), tokenizer, "f" * 32, "")  # type: ignore[arg-type]
    return TenantBench(model, 4000, groups=groups, length=3)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_group_shares_what_could_be_shared(concurrency: int) -> None:
    """Of the tokens that only the other tenant has, nine in ten aren't computed."""
    samples = bench(("docs",)).serve(requests(), concurrency, lambda: None)
    shareable, shared = sum(s.shareable for s in samples), sum(s.shared for s in samples)
    assert shareable > 300
    assert shared >= 0.9 * shareable
    assert sum(s.foreign_slots for s in samples) >= sum(s.group for s in samples) > 0


@pytest.mark.parametrize("concurrency", [1, 4])
def test_without_a_group_no_slot_of_another_tenant_is_read(concurrency: int) -> None:
    """Neither copied nor read as a prefix: the record of who wrote each slot shows it."""
    samples = bench(()).serve(requests(), concurrency, lambda: None)
    assert sum(s.shareable for s in samples) > 300
    assert [s.foreign_slots for s in samples] == [0] * len(samples)
    assert sum(s.group + s.shared for s in samples) == 0
    assert sum(s.own for s in samples) > 0
