"""The data-parallel replica that a request goes to, and a wrong one's content of it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_kit import Scheduler
from sglang.srt.managers.io_struct import GenerateReqInput

from leyline_engine.contract import EditPayload, Outcome, Reason, edit_envelope
from leyline_engine.sglang.hints import pack_hints
from leyline_engine.sglang.ranks import Replica, pin_session, replica_of, session_rank

pytestmark = pytest.mark.usefixtures("server_args")

PROMPT = list(range(40))


def sent(hints: object, *, native: bool = False, rank: int | None = None) -> GenerateReqInput:
    """A request as the launching process sees it."""
    request = GenerateReqInput(
        text="x",
        sampling_params={} if native else {"custom_params": {"kv_hints": hints}},
        kv_hints=hints if native else None,
        routed_dp_rank=rank,
    )
    request.normalize_batch_and_arguments()
    pack_hints(request)
    return request


def hints_of(session: str, scope: str = "t", **payload: Any) -> Any:
    """An envelope as a body carries it."""
    named = EditPayload(session=session, scope=scope, turn="t1", **payload)
    return msgspec.to_builtins(edit_envelope("m", named))


@pytest.mark.parametrize("native", [False, True])
@given(scope=st.text(min_size=1), session=st.text(min_size=1), asked=st.none() | st.integers(0, 7))
def test_a_session_goes_to_the_replica_that_takes_it(
    native: bool, scope: str, session: str, asked: int | None
) -> None:
    """The scheduler of that replica serves the session, whichever one the client asks for."""
    request = sent(hints_of(session, scope), native=native, rank=asked)
    pin_session(request, 8)
    assert [r for r in range(8) if Replica(r, 8).owns((scope, session))] == [request.routed_dp_rank]


@pytest.mark.parametrize(
    "hints",
    [
        None,
        5,
        {"actions": []},
        {"actions": [{"action_type": "leyline.edit", "payload": {"session": "s"}}]},
        {"actions": [{"action_type": "other", "payload": {"session": "s", "scope": "t"}}]},
        {"message_id": "m", "refused": "too_large"},
        {"actions": hints_of("a")["actions"] + hints_of("b")["actions"]},
    ],
)
def test_who_names_no_session_goes_where_sglang_likes(hints: object) -> None:
    """The client's choice holds, also where there is a single replica."""
    request = sent(hints, rank=1)
    pin_session(request, 2)
    assert request.routed_dp_rank == 1
    alone = sent(hints_of("s"))
    pin_session(alone, 1)
    assert alone.routed_dp_rank is None


@pytest.mark.parametrize(
    ("widths", "ranks", "replica"),
    [
        ((1, 1), (None, 0), Replica()),
        ((1, 1), (3, 0), Replica()),
        ((4, 1), (2, 0), Replica(2, 4)),
        ((1, 4), (2, 2), Replica(2, 4)),
        ((1, 4), (None, 2), Replica(2, 4)),
    ],
)
def test_a_scheduler_knows_which_replica_it_is(
    widths: tuple[int, int], ranks: tuple[int | None, int], replica: Replica
) -> None:
    """Replicas count by their own rank, ranks of data-parallel attention by theirs, once."""
    parallel = SimpleNamespace(
        num_dp_ranks=widths[0] * widths[1],
        attn_dp_size=widths[1],
        dp_rank=ranks[0],
        attn_dp_rank=ranks[1],
    )
    assert replica_of(parallel) == replica


def test_sessions_are_spread() -> None:
    """Every replica gets its share, of sessions and of tenants, and one alone gets all."""
    by_session = Counter(session_rank(("t", f"s{n}"), 8) for n in range(4000))
    by_tenant = Counter(session_rank((f"t{n}", "s"), 8) for n in range(4000))
    for found in (by_session, by_tenant):
        assert min(found.values()) > 400
        assert set(found) == set(range(8))
    assert session_rank(("t", "s"), 1) == 0
    assert session_rank(("ab", "c"), 2**60) != session_rank(("a", "bc"), 2**60)


@pytest.mark.parametrize("forget", [(), ("*",)])
def test_a_wrong_replica_keeps_nothing_and_claims_nothing(forget: tuple[str, ...]) -> None:
    """A request that came past the hook is served; its KV isn't kept, its forget not confirmed."""
    payload = EditPayload(session="s", scope="t", turn="t1", forget=forget)
    right = session_rank(("t", "s"), 2)
    for rank in range(2):
        scheduler = Scheduler(replica=Replica(rank, 2))
        req, record = scheduler.serve(PROMPT, payload)
        assert record is not None
        assert len(req.output_ids) == 2
        kept = scheduler.capacity - scheduler.allocator.available_size()
        receipt = record.receipt
        if rank == right:
            assert receipt.outcome is Outcome.UNEDITED
            assert kept == len(PROMPT) + 1
            assert (receipt.forgot is not None) == bool(forget)
        else:
            assert receipt.reason is Reason.UNSUPPORTED_RUNTIME
            assert "data-parallel" in receipt.detail
            assert (receipt.turn, receipt.forgot) == ("", None)
            assert kept == 0
