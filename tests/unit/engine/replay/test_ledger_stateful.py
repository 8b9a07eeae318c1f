"""Readers of the secret, where spans have names and some KV is shared with a second session."""

from __future__ import annotations

from hypothesis import settings
from ledger_machine import LedgerMachine
from support.examples import examples
from support.replay_engine import SCOPE
from taint_machine import STEM

from leyline_engine.records.lineage import fold_keys


def test_the_machine_shares_what_it_means_to() -> None:
    """The second session is served spliced KV of the first under the share's key, once declared."""
    machine = LedgerMachine()
    machine.start()
    machine.fresh(60, [1, 2], True, [3, 4])
    machine.amortize_and_share(0, [1], 40)
    _, tokens, lineage = machine.turns[-1]
    assert lineage[-1].lineage.startswith("share ")
    machine.sharer_extends(len(machine.turns) - 1, [2], 0, False)
    found = machine._retained("y")[-1]
    assert found.lineage == lineage
    cached = machine.engine.cache.match(fold_keys(tokens, lineage, SCOPE))
    assert machine.tainted[cached.slots].any()
    machine.forget_by_name(0, [1], True, True, False)
    left = machine.engine.cache.match(fold_keys(tokens, lineage, SCOPE))
    assert left.length == len(STEM) + 2
    machine.what_is_forgotten_stays_forgotten()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
