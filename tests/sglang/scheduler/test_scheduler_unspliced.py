"""Forgets where the rows of the KV pool can't be touched, as model or pool isn't covered."""

from __future__ import annotations

import pytest
from scheduler_kit import Scheduler
from secret_kit import HEAD, REDACTED, SECRET, TAIL, TOLD, forgetting, telling

from leyline_engine.contract import ForgetCounts, token_array
from leyline_engine.records.publications import Space

pytestmark = pytest.mark.usefixtures("server_args")


def found(scheduler: Scheduler) -> int:
    """The number of tokens of the prompt with the secret that any request would find."""
    return int(scheduler.cache.find(token_array(TOLD), Space()).device_prefix_len)


@pytest.mark.parametrize("splices", [True, False])
def test_only_what_was_overwritten_is_counted_as_overwritten(splices: bool) -> None:
    """Slots that keep forgotten text are pending, and no request finds them."""
    scheduler = Scheduler(splices=splices)
    req, _ = scheduler.serve(TOLD, telling())
    tokens = req.origin_input_ids + req.output_ids
    slots = scheduler.cache.find(tokens, Space()).last_device_node
    held = scheduler.cache.path_device_indices(slots)[HEAD:].clone()
    _, record = scheduler.serve(REDACTED, forgetting(), decode=1)
    assert record is not None
    forgot = record.receipt.forgot
    assert forgot is not None
    assert found(scheduler) == HEAD
    assert (SECRET in scheduler.remembered(held)) is not splices
    assert (forgot.overwritten > 0) is splices
    assert (forgot.pending > 0) is not splices
    assert forgot.overwritten + forgot.pending == len(held)
    assert scheduler.seen.overwritten == forgot.overwritten
    scheduler.check_idle()


def test_what_a_running_request_held_stays_pending() -> None:
    """The end of the last holder closes no receipt of slots that were not overwritten."""
    scheduler = Scheduler(splices=False)
    scheduler.serve(TOLD, telling())
    running = scheduler.submit(TOLD, telling(), decode=12)
    scheduler.step()
    forget = scheduler.submit(REDACTED, forgetting(), decode=1, message_id="forget")
    scheduler.step()
    assert forget.finished()
    assert not running.finished()
    before = scheduler.sender.records["forget"].receipt.forgot
    assert before is not None
    scheduler.drain()
    after = scheduler.sender.forgotten["forget"]
    assert after == ForgetCounts(pending=before.pending)
    assert after.pending > TAIL
    assert found(scheduler) == HEAD
    scheduler.check_idle()
