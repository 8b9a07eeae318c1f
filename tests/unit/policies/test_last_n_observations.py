"""last_n_observations: what SWE-agent's processor did, and what is ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tool_talks import SYSTEM, USER, contents, result, sent, steps, talk

from leyline_policies import Message
from leyline_policies.builtin.last_n_observations import LastNObservations

FIXTURE = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "policies" / "swe_agent.json").read_text("utf-8")
)
ROLES = {"text": ("user",), "tools": ("tool",)}


def _chat(history: list[dict[str, Any]]) -> list[Message]:
    """A history as it reaches a model, but with its tags."""
    return [
        {key: value for key, value in entry.items() if key not in ("message_type", "is_demo")}
        for entry in history
    ]


def _expected(messages: list[Message], changed: dict[str, str]) -> list[Message]:
    """SWE-agent's version of the messages, but for the last user message, which stays here."""
    last = len(messages) - 1 if messages[-1]["role"] == "user" else None
    return [
        {**message, "content": changed.get(str(index), message["content"])}
        if index != last
        else message
        for index, message in enumerate(messages)
    ]


def _cases() -> list[Any]:
    return [
        pytest.param(case, id=f"{case['history']}-{case['settings']}")
        for case in FIXTURE["last_n_observations"]
    ]


@pytest.mark.parametrize("case", _cases())
def test_swe_agent_omits_the_same(case: dict[str, Any]) -> None:
    """At every request, what SWE-agent omitted is omitted, with the same text."""
    history = _chat(FIXTURE["histories"][case["history"]])
    policy = LastNObservations(**case["settings"], roles=ROLES[case["history"]])
    assert any(prefix["changed"] for prefix in case["prefixes"])
    for prefix in case["prefixes"]:
        messages = history[: prefix["length"]]
        assert sent(policy, messages) == _expected(messages, prefix["changed"])


@pytest.mark.parametrize("change", [{"n": 4}, {"polling": 2}, {"always_keep_output_for_tags": ()}])
def test_fixture_tells_settings_apart(change: dict[str, Any]) -> None:
    """Other settings than SWE-agent ran with give something else somewhere."""
    case = FIXTURE["last_n_observations"][0]
    assert case["settings"] == {"n": 5}
    history = _chat(FIXTURE["histories"][case["history"]])
    policy = LastNObservations(**{"n": 5, "roles": ("user",), **change})
    assert any(
        sent(policy, history[: prefix["length"]])
        != _expected(history[: prefix["length"]], prefix["changed"])
        for prefix in case["prefixes"]
    )


def test_newest_results_stay() -> None:
    """The newest n results stay whole, older ones become a count of their lines."""
    messages = talk(*[("bash", f"line\n{n}") for n in range(4)])
    after = contents(sent(LastNObservations(n=2), messages))
    assert after == ["Old environment output: (2 lines omitted)"] * 2 + ["line\n2", "line\n3"]


def test_polling_moves_the_cut_in_steps() -> None:
    """With polling, what is omitted stays the same for as many results as it says."""
    cuts = [
        sum(
            text.startswith("Old")
            for text in contents(
                sent(LastNObservations(n=3, polling=5), talk(*[("bash", "x")] * size))
            )
        )
        for size in range(20)
    ]
    assert sorted(set(cuts)) == [0, 1, 6, 11, 16]
    assert all(cut == 0 or 3 <= size - cut < 8 for size, cut in enumerate(cuts))


def test_tags_in_leylines_own_member_count() -> None:
    """Tags may also be in the member ``leyline``, which SWE-agent doesn't know."""
    old, new = talk(("bash", "a"))[3], talk(("bash", "b"))[3]
    old = {**old, "leyline": {"tags": ["keep_output"]}}
    new = {**new, "leyline": {"tags": ["remove_output"]}}
    messages = [SYSTEM, USER, *steps(("bash", "a"))[:1], old, *steps(("bash", "b"))[:1], new]
    after = contents(sent(LastNObservations(n=1), messages))
    assert after == ["a", "Old environment output: (1 lines omitted)"]


def test_last_user_message_stays_whatever_its_tags() -> None:
    """The last user message stays, also where user messages are observations."""
    tagged = {"role": "user", "content": "now this", "tags": ["remove_output"]}
    messages = [SYSTEM, USER, {"role": "assistant", "content": "ok"}, tagged]
    assert sent(LastNObservations(n=1, roles=("user",)), messages) == messages


def test_omitted_observations_are_not_counted_anew() -> None:
    """A result that a harness has omitted already stays as it is."""
    text = "Old environment output: (63 lines omitted)"
    messages = talk(("bash", text), ("bash", "x"), ("bash", "y"))
    assert sent(LastNObservations(n=2), messages) == messages


def test_content_without_text_has_no_lines() -> None:
    """A result without content, or with odd parts, is omitted as one of no lines."""
    messages = [USER, *steps(("bash", None), ("bash", ["x", {"type": "text"}]), ("bash", "y"))]
    after = contents(sent(LastNObservations(n=1), messages))
    assert after[:2] == ["Old environment output: (0 lines omitted)"] * 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n": 0}, "n=0"),
        ({"polling": 0}, "polling=0"),
        ({"roles": ("tools",)}, "tool"),
        ({"roles": ()}, "roles"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, Any], said: str) -> None:
    """A setting that can't work is refused, by name."""
    with pytest.raises(ValueError, match=said):
        LastNObservations(**settings)


def test_orphaned_results_count() -> None:
    """A result whose call is gone is an observation like others."""
    messages = [*talk(("bash", "x")), result("gone", "y"), result("gone", "z")]
    assert contents(sent(LastNObservations(n=1), messages))[-1] == "z"
    assert contents(sent(LastNObservations(n=1), messages))[0] != "x"
