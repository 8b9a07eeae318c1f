"""Forgets where the rows of the KV pool can't be touched, as model or pool isn't covered."""

from __future__ import annotations

from array import array
from pathlib import Path
from random import Random

import pytest
from conftest import ModelFolder
from scheduler_kit import SECRETS, VOCABULARY, Scheduler, install_server_args
from sglang_models import SglangModel

from leyline_engine.contract import EditPayload, ForgetCounts, SpanLabel, token_array
from leyline_engine.sglang.publications import Space

SECRET = SECRETS + 9
HEAD, TAIL = 60, 50


@pytest.fixture(scope="module", autouse=True)
def server_args(model_folder: ModelFolder) -> None:
    """SGLang's configuration, once per process."""
    install_server_args(Path(model_folder(SglangModel.MLA)))


def _told() -> array[int]:
    rng = Random(5)
    before, behind = ([rng.randrange(VOCABULARY) for _ in range(n)] for n in (HEAD, TAIL))
    return token_array([*before, SECRET, *behind])


TOLD = _told()
REDACTED = token_array([*TOLD[:HEAD], 7, *TOLD[HEAD + 1 :]])
SPANS = (
    SpanLabel("head", 0, HEAD),
    SpanLabel("secret", HEAD, HEAD + 1),
    SpanLabel("tail", HEAD + 1, len(TOLD)),
)
TELLING = EditPayload(session="s", scope="t", turn="t1", spans=SPANS)
FORGETTING = EditPayload(session="s", scope="t", turn="t9", spans=SPANS, forget=("secret",))


def found(scheduler: Scheduler) -> int:
    """How much of the prompt with the secret anybody would find."""
    return int(scheduler.cache.find(TOLD, Space()).device_prefix_len)


@pytest.mark.parametrize("splices", [True, False])
def test_only_what_was_overwritten_is_counted_as_overwritten(splices: bool) -> None:
    """Slots that keep what was forgotten are pending, and nobody finds them."""
    scheduler = Scheduler(splices=splices)
    req, _ = scheduler.serve(TOLD, TELLING)
    tokens = req.origin_input_ids + req.output_ids
    slots = scheduler.cache.find(tokens, Space()).last_device_node
    held = scheduler.cache.path_device_indices(slots)[HEAD:].clone()
    _, record = scheduler.serve(REDACTED, FORGETTING, decode=1)
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
    scheduler.serve(TOLD, TELLING)
    running = scheduler.submit(TOLD, TELLING, decode=12)
    scheduler.step()
    forget = scheduler.submit(REDACTED, FORGETTING, decode=1, message_id="forget")
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
