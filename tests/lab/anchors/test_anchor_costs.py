"""The cost of anchors: which states are held, what turns prefill with them, and the command."""

from __future__ import annotations

import json
import sys
from array import array
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from leyline_engine.contract import CopySegment
from leyline_engine.records.lineage import MAX_TOKEN
from leyline_lab.anchors import command
from leyline_lab.anchors.arms import ARMS, CHOSEN, Arm, Choice, costs
from leyline_lab.anchors.recorded import Turn, sessions
from leyline_lab.anchors.report import GOAL, figures
from leyline_lab.anchors.slots import Eviction, StateSlots
from leyline_lab.roi.playing import Player
from leyline_lab.traces.recordings import RecordedSession, Trace, TraceRequest, read_trace
from leyline_lab.traces.renderer import SHIPPED, load_renderer
from leyline_proxy.model.undeclared import UndeclaredRules

ROLES = ("tool=amortize", "user=amortize", "assistant=amortize")
PLAYER = Player(load_renderer(SHIPPED), rules=UndeclaredRules.parse(ROLES))
ROWS, NATIVE = ARMS[:2]


def test_a_state_is_that_of_its_path() -> None:
    """Held positions, order and evictions are those of a list of whole prefixes."""
    rng = Random(11)
    slots, held = StateSlots(5), OrderedDict[tuple[int, ...], None]()
    for _ in range(200):
        keys = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
        places = rng.sample(range(1, len(keys) + 1), rng.randint(1, len(keys)))
        if rng.random() < 0.5:
            slots.touch(array("q", keys), places)
        else:
            slots.put(array("q", keys), places)
            held |= {tuple(keys[:at]): None for at in places if tuple(keys[:at]) not in held}
        for at in sorted(places):
            if tuple(keys[:at]) in held:
                held.move_to_end(tuple(keys[:at]))
        while len(held) > 5:
            held.popitem(last=False)
        expected = [at for at in range(1, len(keys) + 1) if tuple(keys[:at]) in held]
        assert slots.on(array("q", keys)) == expected
    assert slots.peak == 5


def test_spaced_states_keep_what_an_edit_may_need() -> None:
    """Other paths go first, then what is in front of the last edit, then the closest; never the
    last one."""
    keys, other = array("q", range(1000)), array("q", range(1000, 2000))
    slots = StateSlots(5, Eviction.SPACED)
    slots.put(other, [500, 900])
    slots.put(keys, [100, 200, 300, 500], settled=250)
    assert (slots.on(other), slots.on(keys)) == ([900], [100, 200, 300, 500])
    slots.put(keys, [900, 950], settled=250)
    assert (slots.on(other), slots.on(keys)) == ([], [200, 300, 500, 900, 950])
    slots.put(keys, [960, 970], settled=250)
    assert slots.on(keys) == [200, 300, 500, 900, 970]


def _turns() -> list[Turn]:
    """A prompt of 1,000 tokens with messages at 0, 400 and 700; the same with another message; one
    with a stub of 10 in place of [400, 700); and one that changes what comes after 800 there."""
    first, second = array("q", range(1030)), array("q", range(1300))
    third = array("q", [*range(400), *range(5000, 5710)])
    copies = (CopySegment(0, 0, 400, 0), CopySegment(0, 700, 1300, 410))
    return [
        Turn(first, 1000, 0, (0, 400, 700)),
        Turn(second, 1290, 1030, (0, 400, 700, 1030)),
        Turn(third, 1100, 400, (0, 400, 410, 740), copies, (second,)),
        Turn(third[:800] + array("q", range(100)), 900, 800, (0, 400, 410, 740)),
    ]


@pytest.mark.parametrize(
    ("arm", "prefilled"),
    [
        # The stub of 10, and the 90 tokens after the run.
        (ROWS, [1000, 260, 100, 100]),
        # Anchors at 960, at 1024 (decoded), at 1024 + 256; none of them in front of 400.
        (NATIVE, [1000, 266, 1100, 900]),
        # The run ends at 1280, which is 990 there. Nothing is in front of 400, so [0, 410) is
        # computed, up to 448 on the grid. With the run goes 1024, which is 734.
        (Arm("ends"), [1000, 266, 448 + 110, 900 - 734]),
        (Arm("not carried", carries=False), [1000, 266, 448 + 110, 900 - 448]),
        # 384 in place of 960: the gap is [384, 448), or [384, 410).
        (Arm("first", choice=Choice.FIRST), [1000, 266, 64 + 110, 900 - 734]),
        (Arm("exact", choice=Choice.FIRST, gaps=1), [1000, 266, 26 + 110, 900 - 734]),
        # 640 in place of 960, of no use to the cut; the last state is that of the answer's end.
        (Arm("last", choice=Choice.LAST, decoded=1), [1000, 260, 448 + 90, 900 - 740]),
        # With one slot, 1280 takes the place of all others.
        (Arm("one slot", slots=1), [1000, 266, 448 + 110, 900]),
    ],
)
def test_costs_are_those_of_a_drawing(arm: Arm, prefilled: list[int]) -> None:
    """Four turns cost what one finds with pencil and paper."""
    assert costs(_turns(), arm)[0] == prefilled


WORDS = ("north", "alpha", "march", "spring", "friday", "victor", "oscar", "june")


def _message(rng: Random, role: str) -> dict[str, Any]:
    words = rng.choices(WORDS, k=rng.randint(5, 60))
    return {"role": role, "content": " ".join(f"{word}{rng.randrange(99)}" for word in words)}


def _session(rng: Random) -> RecordedSession:
    """A session in which old outputs are cut now and then."""
    messages, requests = [_message(rng, "system")], list[TraceRequest]()
    for turn in range(12):
        messages += [_message(rng, "user"), _message(rng, "assistant"), _message(rng, "tool")]
        if turn % 3 == 2:
            old = rng.randrange(3, len(messages) - 6, 3)
            messages[old] = messages[old] | {"content": "cut"}
        requests.append(TraceRequest(tuple(messages)))
    return RecordedSession(str(rng.random()), tuple(requests))


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Three sessions whose histories are edited."""
    rng = Random(5)
    return Trace(tuple(_session(rng) for _ in range(3)))


def test_recorded_turns_are_what_the_engine_saw(trace: Trace) -> None:
    """Copies move equal tokens, prefixes are those of an earlier turn, and messages begin where
    the labels say."""
    for session in sessions(trace, PLAYER):
        assert len(session) == 12
        assert sum(bool(turn.copies) for turn in session) >= 3
        for place, turn in enumerate(session):
            tokens = [key & MAX_TOKEN for key in turn.keys]
            for copy in turn.copies:
                source = [key & MAX_TOKEN for key in turn.sources[copy.source]]
                assert source[copy.start : copy.end] == tokens[copy.dest : copy.dest_end]
            earlier = [list(other.keys[: turn.prefix]) for other in session[:place]]
            assert turn.prefix == 0 or list(turn.keys[: turn.prefix]) in earlier
            assert len(turn.boundaries) == 4 + 3 * place
            assert turn.boundaries[0] == 0 and turn.boundaries[-1] < turn.length


def test_anchors_cost_more_than_rows_and_less_than_a_prefix(trace: Trace) -> None:
    """No arm prefills less than rows alone, in any turn; the chosen one is far below native."""
    played = list(sessions(trace, PLAYER))
    for arm in ARMS[2:]:
        for session in played:
            floor, found = costs(session, ROWS)[0], costs(session, arm)[0]
            assert all(a <= b for a, b in zip(floor, found, strict=True))
    rows, native, chosen = (figures("f", played, arm) for arm in (ROWS, NATIVE, CHOSEN))
    assert rows.edited < chosen.edited < native.edited / 2


@pytest.mark.nightly
def test_the_chosen_anchors_reach_the_goal(traces_dir: Path) -> None:
    """On recorded histories, edited turns prefill two points more than with rows alone at most."""
    player = replace(PLAYER, renderer=command.renderer("deepseek"))
    for path in sorted(traces_dir.glob("edited_*-*.jsonl.gz")):
        played = list(sessions(read_trace(path), player))
        rows, ends, chosen = (figures("", played, arm) for arm in (ROWS, ARMS[2], CHOSEN))
        assert chosen.edited <= rows.edited + GOAL
        assert rows.edited < chosen.edited < ends.edited


def test_the_command_writes_figures_and_a_picture(
    trace: Trace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each arm and each bound has a row for the file, and the picture is there."""
    lines = list[str]()
    for session in trace.sessions:
        pool = [message for request in session.requests for message in request.messages]
        places = iter(range(len(pool)))
        picked = [[next(places) for _ in request.messages] for request in session.requests]
        lines.append(json.dumps({"id": session.id, "pool": pool, "requests": picked}))
    (tmp_path / "edited_made-up.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    flags = f"--traces {tmp_path} --tokenizer shipped --slots 4,8 --json {out} --plot {picture}"
    monkeypatch.setattr(sys, "argv", ["anchors", *flags.split()])
    command.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found) == len(ARMS) + len(Eviction) * 2
    assert {(each["file"], each["edited_turns"]) for each in found} == {("edited_made-up", 10)}
    assert picture.stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert all(arm.name in shown for arm in ARMS) and "8 states, most closely spaced" in shown
