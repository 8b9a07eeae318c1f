"""A proxy with a fidelity profile: boundary, quotes and errata of turns that policies edit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack
from typer.testing import CliRunner

from leyline_lab.fidelity.recall_words import GENERAL, KEYS, VALUES
from leyline_proxy.cli.main import build_app
from leyline_proxy.upstream.embedded import EngineUnavailable

POLICY = "truncate_older_than:n=1,max_chars=0"
NOTE = "[{name} was cut; notes on it may be stale]"
CHAT = "/v1/chat/completions"
MODEL = "leyline-recall"


def profile(**settings: Any) -> dict[str, Any]:
    """The document with the model's profile."""
    return {"profiles": [{"model": MODEL, **settings}]}


def history(turns: int, *, quoted: bool = False) -> list[dict[str, Any]]:
    """Turns that read a long file each and talk about it; the first talk may quote its file."""
    rng = Random(7)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s " + _words(rng, 40)}]
    for turn in range(turns):
        call = {"id": f"c{turn}", "type": "function"}
        call["function"] = {"name": "read_config", "arguments": "{}"}  # type: ignore[assignment]
        lines = [
            f"{rng.choice(KEYS)}={rng.choice(VALUES)}-{rng.randint(10, 99)}" for _ in range(12)
        ]
        said = _words(rng, 30) + (f"\n{lines[8]}\n{lines[9]}\n" if quoted and turn == 0 else " ")
        messages += [
            {"role": "user", "content": f"read {turn}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": "\n".join(lines)},
            {"role": "assistant", "content": said + _words(rng, 30)},
        ]
    return [*messages, {"role": "user", "content": "go on"}]


def _words(rng: Random, count: int) -> str:
    return " ".join(rng.choices(GENERAL, k=count))


def ask(origin: str, session: str, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Send a turn; return the account of its prompt."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "leyline": options}
    headers = {"x-leyline-session": session}
    answer = httpx.post(f"{origin}{CHAT}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["leyline"]


def edited(origin: str, session: str, *, quoted: bool = False, **options: Any) -> Any:
    """Play three turns, of which the last two are edited; return the second turn's account."""
    ask(origin, session, history(1, quoted=quoted))
    return ask(origin, session, history(2, quoted=quoted), **options)


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Proxies: with a boundary and quotes, with an erratum, and without a profile."""
    folder = tmp_path_factory.mktemp("profiles")
    written = {}
    for name, settings in {
        "exact": {"boundary": 5, "quotes": 3},
        "erratum": {"erratum": NOTE},
    }.items():
        written[name] = folder / f"{name}.json"
        written[name].write_text(json.dumps(profile(**settings)))
    options = {"pool_tokens": 8192}
    with (
        embedded_stack(options, policy=POLICY, fidelity_profile=written["exact"]) as exact,
        embedded_stack(options, policy=POLICY, fidelity_profile=written["erratum"]) as erratum,
        embedded_stack(options, policy=POLICY) as plain,
    ):
        yield {"exact": exact, "erratum": erratum, "plain": plain}


def test_the_boundary_and_the_quotes_are_computed_again(origins: dict[str, str]) -> None:
    """They are missing from what is spliced, and only they; a request may switch that off."""
    plain, exact = (edited(origins[name], "s")["tokens"] for name in ("plain", "exact"))
    assert plain["spliced"] > 0
    assert prefilled(exact) == prefilled(plain) + 5
    whole, quoted = (
        edited(origins[name], "q", quoted=True)["tokens"] for name in ("plain", "exact")
    )
    assert 6 <= prefilled(quoted) - prefilled(whole) - 5 <= 24
    asked = edited(origins["exact"], "off", quoted=True, boundary=0)["tokens"]
    assert prefilled(asked) == prefilled(whole)


def prefilled(tokens: dict[str, int]) -> int:
    """Return the number of prompt tokens that were computed."""
    return tokens["prompt"] - tokens["prefix"] - tokens["spliced"]


def test_what_was_computed_again_stays(origins: dict[str, str]) -> None:
    """The next turn finds the edited prompt whole; nothing of it is computed a third time."""
    edited(origins["exact"], "stays", quoted=True)
    account = ask(origins["exact"], "stays", [*history(2, quoted=True), *_more()])
    tokens = account["tokens"]
    assert tokens["prefix"] + tokens["spliced"] > tokens["prompt"] - 40
    assert not account["directives"]


def _more() -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "and on"}]


def test_shortened_messages_end_with_the_note(origins: dict[str, str]) -> None:
    """The prompt is longer by the notes, the same on the next turn, and still spliced."""
    plain, noted = (edited(origins[name], "s2") for name in ("plain", "erratum"))
    assert noted["outcome"] == "spliced"
    longer = noted["tokens"]["prompt"] - plain["tokens"]["prompt"]
    assert longer > 5
    grown = [*history(2), *_more()]
    after = {name: ask(origins[name], "s2", grown) for name in ("plain", "erratum")}
    assert after["erratum"]["tokens"]["prompt"] - after["plain"]["tokens"]["prompt"] == longer
    assert not after["erratum"]["directives"]


def test_a_proxy_refuses_a_file_without_profiles(tmp_path: Path) -> None:
    """It doesn't start, and names the setting and the file."""
    path = tmp_path / "wrong.json"
    path.write_text('{"tables": {}}')
    result = CliRunner().invoke(
        build_app(), ["serve", "--fidelity-profile", str(path), "--port", "0"]
    )
    assert result.exit_code == 2
    assert "fidelity_profile" in result.output
    assert "profiles" in result.output


def test_an_embedded_engine_loads_a_profile_too(tmp_path: Path) -> None:
    """Its own file has the same effect, and one without its model keeps it from starting."""
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(profile(boundary=9)))
    options = {"pool_tokens": 8192, "fidelity_profile": str(path)}
    with embedded_stack(options, policy=POLICY) as origin:
        careful = edited(origin, "s")["tokens"]
    with embedded_stack({"pool_tokens": 8192}, policy=POLICY) as origin:
        assert careful["spliced"] == edited(origin, "s")["tokens"]["spliced"] - 9
    path.write_text('{"profiles": [{"model": "another"}]}')
    with pytest.raises(EngineUnavailable, match=f"no profile for {MODEL}"), embedded_stack(options):
        pass
