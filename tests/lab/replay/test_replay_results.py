"""Totals, reuse of the unchanged tokens, and the report document."""

from __future__ import annotations

from array import array

import pytest

from leyline_lab.errors import AccountError, LabError, RequestRefusedError
from leyline_lab.replay.arms import (
    UnchangedCounter,
    check_same_prompts,
    parse_arms,
    run_sessions,
)
from leyline_lab.replay.results import (
    Arm,
    ArmRun,
    Pages,
    ReplayReport,
    RequestResult,
    percentile,
)
from leyline_lab.traces.recordings import RecordedSession, TraceRequest


def result(
    place: tuple[int, int], tokens: tuple[int, int, int], reason: str | None = None
) -> RequestResult:
    """One request of a made-up arm; its first token takes 10 ms per prefilled token."""
    session, turn = place
    cached, spliced, prefilled = tokens
    prompt = cached + spliced + prefilled
    ttft = 10.0 * prefilled
    return RequestResult(session, turn, prompt, cached, spliced, prefilled, ttft, reason)


RUN = ArmRun(
    Arm.SPLICE,
    (
        result((0, 0), (0, 0, 100)),
        result((0, 1), (50, 60, 10), "spliced"),
        result((1, 0), (80, 0, 20)),
        result((1, 1), (100, 0, 30), "reprefilled"),
    ),
)


class ScriptedDriver:
    """Answers with a fixed result, and refuses the given places."""

    def __init__(self, refused: set[tuple[int, int]]) -> None:
        self.refused = refused
        self.sessions: list[str] = []

    def send(self, request: TraceRequest, *, session: str, place: tuple[int, int]) -> RequestResult:
        """Send a request like ChatDriver.send."""
        self.sessions.append(session)
        if place in self.refused:
            raise RequestRefusedError("HTTP 400: too long")
        return result(place, (0, 0, 10))


def test_totals_and_outcomes() -> None:
    """Totals add up, reasons are counted, and an unedited request has none."""
    document = ReplayReport({Arm.SPLICE: RUN}, {}).to_json()
    assert document["arms"]["splice"] == {
        "requests": 4,
        "prompt_tokens": 450,
        "cached_tokens": 230,
        "spliced_tokens": 60,
        "reused_tokens": 0,
        "prefilled_tokens": 160,
        "hit_ratio": round(290 / 450, 6),
        "ttft_ms": {"p50": 250.0, "p90": 790.0},
        "outcomes": {"reprefilled": 1, "spliced": 1},
    }


def test_reused_tokens_are_hits() -> None:
    """Tokens that were copied from elsewhere are a source of their own, and not prefilled."""
    reused = RequestResult(0, 0, 100, 20, 10, 30, 1.0, reused=40)
    report = ReplayReport({Arm.SPLICE: ArmRun(Arm.SPLICE, (reused,))}, {(0, 0): 100})
    found = report.to_json()["arms"]["splice"]
    assert (found["spliced_tokens"], found["reused_tokens"], found["hit_ratio"]) == (10, 40, 0.7)
    assert report.reuse_of_unchanged(Arm.SPLICE) == 0.5
    off = ArmRun(Arm.SPLICE, (reused,)).switched_off().results[0]
    assert (off.reused, off.prefilled) == (0, 100)


def test_off_is_computed_from_the_same_prompts() -> None:
    """Without reuse every prompt token is prefilled, and nothing was timed."""
    off = ReplayReport({Arm.OFF: RUN.switched_off()}, {(0, 1): 40}).to_json()
    assert off["arms"]["off"] == {
        "requests": 4,
        "prompt_tokens": 450,
        "cached_tokens": 0,
        "spliced_tokens": 0,
        "reused_tokens": 0,
        "prefilled_tokens": 450,
        "hit_ratio": 0.0,
        "ttft_ms": {"p50": None, "p90": None},
        "outcomes": {},
    }
    assert off["reuse_of_unchanged"] == {"off": 0.0}


def test_reuse_counts_past_the_sink_and_never_twice() -> None:
    """Reuse below position 32 and beyond a request's own unchanged tokens does not count."""
    report = ReplayReport({Arm.SPLICE: RUN}, {(0, 1): 80, (1, 1): 20})
    assert report.unchanged_tokens == 100
    # (50 - 32) + 60 of 80, and min(100 - 32, 20) of 20
    assert report.reuse_of_unchanged(Arm.SPLICE) == 0.98


def test_what_whole_pages_cost_is_told_apart() -> None:
    """The part of a page at a prefix's end is rounding, and nothing else is: neither a prefix that
    ends earlier, nor tokens that were copied, nor a loss after it."""
    pages = Pages(32, {(0, 1): 75})
    cases = [  # cached, spliced, unchanged, rounded off
        (64, 0, 43, 11),
        (64, 11, 43, 0),
        (64, 5, 43, 6),
        (32, 0, 43, 0),
        (64, 0, 90, 11),
        (96, 0, 43, 0),
    ]
    for cached, spliced, unchanged, rounded in cases:
        prompt = 200
        prefilled = prompt - cached - spliced
        result = RequestResult(0, 1, prompt, cached, spliced, prefilled, None)
        assert pages.rounded_off(result, unchanged) == rounded, (cached, spliced, unchanged)
    result = RequestResult(0, 1, 200, 64, 0, 136, None)
    report = ReplayReport({Arm.SPLICE: ArmRun(Arm.SPLICE, (result,))}, {(0, 1): 43}, pages)
    document = report.to_json()
    assert document["page_tokens"] == 32
    assert document["rounding_tokens"] == {"splice": 11}
    assert document["reuse_without_rounding"] == {"splice": 1.0}
    one = ReplayReport(report.runs, report.unchanged)
    assert one.to_json()["rounding_tokens"] == {"splice": 0}


def test_nothing_unchanged_is_no_ratio() -> None:
    """A trace of single requests has no ratio rather than a made-up one."""
    assert ReplayReport({Arm.SPLICE: RUN}, {}).reuse_of_unchanged(Arm.SPLICE) is None


def test_percentile_interpolates() -> None:
    """Percentiles fall between ranks; an empty list has none."""
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([7.0], 0.9) == 7.0
    assert percentile([], 0.5) is None


def test_arms_by_name() -> None:
    """Arms keep their order; unknown, doubled and missing ones are refused."""
    assert parse_arms("splice, off") == (Arm.SPLICE, Arm.OFF)
    for text in ("fast", "off,off", " , "):
        with pytest.raises(LabError):
            parse_arms(text)


def test_a_refusal_ends_its_session_only() -> None:
    """The requests after a refused one are not sent, the next session is, and a note says so."""
    request = TraceRequest(({"role": "user", "content": "hi"},))
    sessions = [RecordedSession("a", (request,) * 3), RecordedSession("ü\n", (request,))]
    driver = ScriptedDriver({(0, 1)})
    steps: list[int] = []
    run = run_sessions(driver, sessions, Arm.RADIX, lambda arm, done: steps.append(done))
    assert [(r.session, r.turn) for r in run.results] == [(0, 0), (1, 0)]
    assert "session a ends before request 2 (2 not sent): HTTP 400: too long" in run.notes[0]
    assert sum(steps) == 4
    assert len(set(driver.sessions)) == 2
    assert all(name.isascii() and name.isprintable() for name in driver.sessions)


def test_arms_must_serve_the_same_prompts() -> None:
    """Another prompt length in one arm makes the comparison void."""
    check_same_prompts(RUN, RUN)
    shorter = ArmRun(Arm.RADIX, RUN.results[:-1])
    with pytest.raises(AccountError, match="request 2 of session 2 has 130 prompt tokens"):
        check_same_prompts(RUN, shorter)


def test_unchanged_starts_anew_with_each_session() -> None:
    """The first request of a session has nothing before it."""
    counter = UnchangedCounter()
    prompt = array("q", range(100))
    counter.add(0, 0, prompt)
    counter.add(0, 1, prompt)
    counter.add(1, 0, prompt)
    assert counter.counts == {(0, 1): 67}
