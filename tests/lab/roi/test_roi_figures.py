"""Estimates of reuse on recorded sessions: sums, known shares, files and errors."""

from __future__ import annotations

import gzip
import json
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from leyline_engine.contract import ReuseMode
from leyline_lab.errors import TokenizerError
from leyline_lab.roi.playing import Player
from leyline_lab.roi.results import Served, advice
from leyline_lab.traces.recordings import RecordedSession, Trace, TraceRequest
from leyline_lab.traces.renderer import SHIPPED, load_renderer
from leyline_policies import load_pipeline
from leyline_proxy.cli.main import build_app
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.render.renderer import ChatRenderer
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

Message = dict[str, Any]
DEMO = Path(__file__).parents[3] / "bench" / "leyline_lab" / "demo" / "session.jsonl.gz"
WORDS = ("north", "alpha", "march", "spring", "friday", "victor", "oscar", "june", "kilo", "lima")


@cache
def _renderer() -> ChatRenderer:
    return load_renderer(SHIPPED)


def _text(seed: int, words: int = 120) -> str:
    return " ".join(
        f"{WORDS[(seed * 7 + n * n) % len(WORDS)]}{seed}-{n * seed}" for n in range(words)
    )


def _say(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _trace(*sessions: list[list[Message]]) -> Trace:
    return Trace(
        tuple(
            RecordedSession(f"session {number}", tuple(TraceRequest(tuple(one)) for one in each))
            for number, each in enumerate(sessions)
        )
    )


def _tokens(messages: list[Message]) -> list[int]:
    return list(_renderer().render_request(messages, {}).tokens)


def _common(first: list[int], second: list[int]) -> int:
    """Length of the longest run that both have, by another algorithm."""
    return SequenceMatcher(None, first, second, autojunk=False).find_longest_match().size


def _shared(first: list[int], second: list[int]) -> int:
    """Length of the common beginning."""
    return next(n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


BLOCKS = [_say("user", _text(seed, 60)) for seed in range(1, 6)]


@given(
    st.lists(
        st.lists(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["keep_all", "truncate_older_than:n=1,max_chars=40", "redact:patterns=[june]"]),
    st.sampled_from([None, 600, 3000]),
    st.sampled_from([*ReuseMode]),
)
def test_every_prompt_token_has_one_source(
    sessions: list[list[list[Message]]], policy: str, bound: int | None, mode: ReuseMode
) -> None:
    """Prefix, edits, reuse and prefill sum to each prompt, and none of them is negative."""
    rules = UndeclaredRules(frozenset({"user"}))
    player = Player(_renderer(), load_pipeline(policy), rules, cache_tokens=bound, mode=mode)
    file = player.play(_trace(*sessions), "f")
    for played, requests in zip(file.sessions, sessions, strict=True):
        for served, messages in zip(played.requests, requests, strict=True):
            assert min(served.by_source().values()) >= 0
            assert min(served.by_kind().values()) >= 0
            assert served.prefill >= 1  # the last token's logits are needed
            if policy == "keep_all":
                assert served.prompt == len(_tokens(messages))
    assert file.served.prompt == sum(
        one.prompt for session in file.sessions for one in session.requests
    )


def test_each_source_serves_what_it_should() -> None:
    """A session continues itself, quotes another one, and rewrites an old message."""
    document = _say("user", _text(21))
    first = [_say("system", "Be brief."), _say("user", _text(22)), document]
    opening = [_say("system", _text(25, 40)), _say("user", _text(23, 80))]
    second = [*opening, document, _say("user", "Which is it?")]
    third = [*second, _say("assistant", "The north one."), _say("user", _text(24))]
    edited = [opening[0], _say("user", "cut"), *third[2:], _say("user", "And now?")]
    trace = _trace([first], [second, third, edited])
    a, b, c, d = map(_tokens, (first, second, third, edited))

    plain = Player(_renderer()).play(trace, "f").sessions
    assert plain[0].requests == (Served(prefill=len(a)),)
    quoting, going_on, rewritten = plain[1].requests
    assert (quoting.prefix, quoting.edits) == (_shared(a, b), 0)
    assert quoting.by_kind() == {"clean": 0, "session": 0, "tenant": _common(a, b)}
    # The recorded answer is cached behind its prompt, but for the token that ends it.
    answer = list(_renderer().encode("The north one."))
    assert c[len(b) : len(b) + len(answer)] == answer
    assert going_on.prefix == len(b) + len(answer)
    assert going_on.reuse == 0
    moved = _common(c, d)
    assert (rewritten.prefix, rewritten.edits) == (_shared(c, d), 0)
    assert _shared(c, d) > 32  # positions below are the sink, which nothing is copied to
    assert (rewritten.reuse, rewritten.clean) == (moved, 0)
    assert rewritten.session  # the document's first hit may be in either session

    rules = UndeclaredRules(frozenset({"user"}))
    declared = Player(_renderer(), rules=rules).play(trace, "f").sessions[1].requests[-1]
    assert (declared.prefix, declared.edits, declared.reuse) == (_shared(c, d), moved, 0)
    hybrid = Player(_renderer(), rules=rules, anchor_tokens=9).play(trace, "f").sessions[1]
    assert (hybrid.requests[-1].edits, hybrid.requests[-1].prompt) == (moved - 8, declared.prompt)
    assert [one.reuse for one in hybrid.requests] == [0, 0, 0], "a state brings what it has read"


def test_a_cache_too_small_for_any_prompt_serves_nothing() -> None:
    """The control: everything is prefilled, though the same traffic is found without the bound."""
    requests = [[BLOCKS[: n + 1] for n in range(4)], [BLOCKS[n:] for n in range(4)]]
    trace = _trace(*requests)
    unbounded = Player(_renderer()).play(trace, "f").served
    assert unbounded.prefix and unbounded.reuse
    served = Player(_renderer(), cache_tokens=4).play(trace, "f").served
    assert served == Served(prefill=served.prompt)
    assert served.prompt > 0


def test_advice_follows_from_the_numbers() -> None:
    """Below one percent reuse isn't worth it; above, the sentence tells what to set."""
    assert "isn't worth" in advice(Served(prefix=991, tenant=9))
    told = advice(Served(prefix=400, clean=20, session=30, tenant=50, prefill=500))
    assert "another 10.0%" in told and "16.7%" in told and "reuse: observe" in told
    assert advice(Served()) == "There is no prompt to serve."


def test_json_table_and_picture(tmp_path: Path) -> None:
    """The command writes the documented members, whose sums agree, and a picture."""
    out, picture = tmp_path / "out" / "roi.json", tmp_path / "out" / "roi.png"
    arguments = [str(DEMO), str(DEMO), "--limit", "4", "--policy", "keep_all", "--retained-turns"]
    arguments += ["2", "--cache-tokens", "90000", "--json", str(out), "--plot", str(picture)]
    done = CliRunner().invoke(build_app(), ["roi", *arguments])
    assert done.exit_code == 0, done.output
    assert "session.jsonl.gz" in done.output and "all 2 files" in done.output
    found = json.loads(out.read_text())
    members = {"files", "sessions", "requests", "prompt_tokens", "served", "shares"}
    assert set(found) == members | {"reuse_by_kind", "by_session", "settings", "advice"}
    assert (found["sessions"], found["requests"], len(found["files"])) == (2, 8, 2)
    assert set(found["served"]) == set(found["shares"]) == {"prefix", "edits", "reuse", "prefill"}
    assert sum(found["served"].values()) == found["prompt_tokens"]
    assert sum(found["shares"].values()) == pytest.approx(1, abs=1e-5)
    assert sum(found["reuse_by_kind"].values()) == found["served"]["reuse"]
    for part in ("files", "by_session"):
        assert sum(one["prompt_tokens"] for one in found[part]) == found["prompt_tokens"]
    turns = found["by_session"][0]["by_turn"]
    assert sum(sum(turn.values()) for turn in turns) == found["by_session"][0]["prompt_tokens"]
    assert found["settings"] == {
        "policy": "keep_all",
        "undeclared": [],
        "tokenizer": "shipped",
        "retained_turns": 2,
        "cache_tokens": 90000,
        "page_tokens": 1,
        "anchor_tokens": 1,
        "mode": "observe",
    }
    assert picture.read_bytes().startswith(b"\x89PNG")


GOOD = '{"messages": [{"role": "user", "content": "hi"}], "calls": [{"n": 1}]}'


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot read"),
        ("", "bad.jsonl holds no session"),
        (f"{GOOD}\n\nnot json\n", "bad.jsonl, line 3: not JSON"),
        (f"{GOOD}\n" + '{"id": "x", "calls": []}\n', "bad.jsonl, line 2: neither"),
        ('{"id": "x"}\n', "bad.jsonl, line 1: messages"),
        ('{"messages": [], "calls": []}\n', "bad.jsonl, line 1: the session makes no request"),
        (b"\x1f\x8b broken", "cannot read"),
    ],
)
def test_unusable_file_is_told(tmp_path: Path, content: str | bytes | None, told: str) -> None:
    """The error names file and line, the exit code is 2, and earlier figures stay as they are."""
    bad, out = tmp_path / "bad.jsonl", tmp_path / "roi.json"
    if isinstance(content, bytes):
        bad = tmp_path / "bad.jsonl.gz"
        bad.write_bytes(content)
    elif content is not None:
        bad.write_text(content)
    out.write_text("figures of yesterday")
    done = CliRunner().invoke(build_app(), ["roi", str(DEMO), str(bad), "--json", str(out)])
    assert done.exit_code == 2
    assert told in done.output.replace("\n", " ") and bad.name in done.output.replace("\n", "")
    assert out.read_text() == "figures of yesterday"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--policy", "no_such"], "no_such"),
        (["--undeclared", "robot=amortize"], "robot"),
        (["--tokenizer", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_setting_is_told(flags: list[str], told: str) -> None:
    """A setting that can't be used ends the command with 2 before anything is played."""
    done = CliRunner().invoke(build_app(), ["roi", str(DEMO), *flags])
    assert done.exit_code == 2
    assert told in done.output


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    """A folder's own tokenizer and template are used; without a template the error says so."""
    source = json.loads(_shipped("tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    with pytest.raises(TokenizerError, match="no chat template"):
        load_renderer(str(tmp_path))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": {"content": "<|im_start|>"}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        renderer = load_renderer(str(place))
        assert renderer.text([_say("user", "hi")], None) == "<|im_start|>hi"


def _shipped(name: str) -> str:
    folder = trained_model_dir(DEFAULT_MODEL_NAME)
    assert folder is not None
    return (folder / name).read_text(encoding="utf-8")


def test_a_request_that_cannot_be_rendered_is_left_out(tmp_path: Path) -> None:
    """The other requests count, and a note names the one that the template refuses."""
    (tmp_path / "tokenizer.json").write_text(_shipped("tokenizer.json"))
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    trace = _trace([[BLOCKS[0]], [BLOCKS[0], _say("tool", "x")], [BLOCKS[0], BLOCKS[1]]])
    file = Player(load_renderer(str(tmp_path))).play(trace, "f")
    assert file.requests == 2
    assert len(file.notes) == 1 and "request 2 is left out" in file.notes[0]


def test_plain_and_packed_files_are_the_same(tmp_path: Path) -> None:
    """A recording with and without gzip gives the same figures."""
    packed, plain = tmp_path / "one.jsonl.gz", tmp_path / "one.jsonl"
    plain.write_text(f"{GOOD}\n{GOOD}\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    figures = []
    for path in (packed, plain):
        out = tmp_path / "roi.json"
        done = CliRunner().invoke(build_app(), ["roi", str(path), "--json", str(out)])
        assert done.exit_code == 0, done.output
        figures.append(json.loads(out.read_text())["served"])
    assert figures[0] == figures[1]
