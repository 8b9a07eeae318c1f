"""tiered: the next tier only while the conversation is still too long."""

from __future__ import annotations

import pytest
from talking import Talk
from tool_talks import SYSTEM, USER, contents, steps

from leyline_policies import Message, SpecError, load_pipeline

TIERS = (
    "['truncate_older_than:n=1,max_chars=70';'summarize:trigger_tokens=1,keep_messages=2';"
    "'sliding_window:max_messages=2']"
)


def talk(number: int) -> list[Message]:
    """So many steps with results of a hundred characters."""
    return [SYSTEM, USER, *steps(*(("bash", f"{i:03}" * 33) for i in range(number)))]


def size(message: Message) -> int:
    """Tokens that only the length of results changes: 10 for a whole one, 1 for a short one."""
    return 1 if message["role"] == "tool" and len(message["content"]) < 80 else 10


def tiered(target: int, tiers: str = TIERS, more: str = "") -> Talk:
    """A session with the policy."""
    return Talk(f"tiered:target_tokens={target},tiers={tiers}{more}")


def test_cheap_steps_come_first_and_last_until_the_target_is_exceeded_again() -> None:
    """The first tier acts once there is too much; what it made stays, and newer results stay whole
    until there is too much again."""
    session = tiered(100)
    assert session.send(talk(4), count=size) == talk(4)
    sent = session.send(talk(5), count=size)
    assert [len(text) < 80 for text in contents(sent)] == [True] * 4 + [False]
    assert session.wanted == []
    longer = session.send(talk(5) + steps(("bash", "x" * 99), start=9)[:1], count=size)
    assert longer[: len(sent)] == sent
    again = session.send(talk(6), count=size)
    assert [len(text) < 80 for text in contents(again)] == [True] * 5 + [False]


def test_a_deeper_tier_gets_what_the_first_left_and_stays_when_the_first_acts_again() -> None:
    """Once a summary stands for the beginning, a longer conversation is shortened after it first,
    without another question."""
    session = tiered(70)
    first = session.send(talk(4), count=size)
    assert len(first) == len(talk(4)) and len(session.wanted) == 1
    session.answer("they looked around")
    summed = session.send(talk(4), count=size)
    assert len(summed) == 4 and "they looked around" in summed[1]["content"]
    later = session.send(talk(6), count=size)
    assert later[:2] == summed[:2] and not session.wanted
    assert len(contents(later)) == 3
    assert session.send(talk(6), count=size) == later


def test_a_summary_stands_until_the_next_one_has_come() -> None:
    """When the tier that summarizes is reached again, it continues from what it had."""
    session = tiered(70)
    session.send(talk(4), count=size)
    session.answer("they looked around")
    session.send(talk(4), count=size)
    meanwhile = session.send(talk(9), count=size)
    assert session.wanted and "they looked around" in meanwhile[1]["content"]
    session.answer("they looked twice")
    assert "they looked twice" in session.send(talk(9), count=size)[1]["content"]


def test_later_tiers_wait_for_an_answer_but_not_for_ever() -> None:
    """While a model is asked, no further step is made; after the patience the next tier is."""
    session = tiered(60, more=",patience_turns=2")
    held = session.send(talk(5), count=size)
    assert session.wanted
    assert session.send(talk(5), count=size) == held
    late = session.send(talk(5), count=size)
    assert len(late) < len(held)
    assert session.send(talk(5), count=size) == late


def test_a_step_that_reclaims_nothing_is_not_made() -> None:
    """The conversation is over the target, and the very list that was given is returned."""
    session = tiered(5, "['drop_images';'deduplicate_calls:exclude_tools=[bash]']")
    messages = talk(3)
    assert session.send(messages) is messages
    assert session.state.get("ends") is None


def test_a_history_that_the_client_shortens_is_no_fault() -> None:
    """The tiers act on what is there, and no call loses its result."""
    session = tiered(70)
    session.send(talk(9), count=size)
    assert session.send(talk(3)[:-1], count=size)[-1] == talk(3)[-2]


def test_the_window_gives_the_target() -> None:
    """A share of it; without a known window nothing is compacted."""
    session = Talk(f"tiered:target_fraction=0.5,tiers={TIERS}")
    assert session.send(talk(9), count=size) == talk(9)
    assert session.send(talk(9), count=size, window=220) != talk(9)


def test_tiers_are_specs_of_the_registry() -> None:
    """A tier may be a pipeline; the settings are read as everywhere."""
    tiers = """['drop_images | prune:protect_tokens=7';"tiered:target_tokens=5,tiers=[prune]"]"""
    (policy,) = load_pipeline(f"tiered:target_tokens=9,tiers={tiers}")
    held = getattr(policy, "tiers", ())
    assert [each.name for each in held] == ["pipeline", "tiered"]
    assert held[0].policies[1].protect_tokens == 7


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("target_tokens=9", "tiers"),
        ("tiers=['prune']", "target_tokens and target_fraction are both none"),
        ("tiers=['prune'],target_tokens=9,target_fraction=0.5", "both given"),
        ("tiers=['prune'],target_fraction=2", "target_fraction=2.0"),
        ("tiers=['prune'],target_tokens=0", "target_tokens=0"),
        ("tiers=['prune'],target_tokens=1,patience_turns=0", "patience_turns=0"),
        ("tiers=[],target_tokens=9", "names no policy"),
        ("tiers=[''],target_tokens=9", "a spec without a policy"),
        ("tiers=['prun'],target_tokens=9", "tiers: no policy is called 'prun'"),
        ("tiers=['prune:n=2'],target_tokens=9", "tiers: prune has no parameter 'n'"),
        ("tiers=['redact:pattern=x'],target_tokens=9", "redact forgets"),
        (
            "tiers=[a;b;c;d;e;f;g],target_tokens=9".replace(
                "a;b;c;d;e;f;g", ";".join(["prune"] * 7)
            ),
            "takes 6 at most",
        ),
        ("target_tokens=9,tiers=['" + " | ".join(["prune"] * 16) + "';prune]", "more than 16"),
    ],
)
def test_bad_settings_are_refused(settings: str, words: str) -> None:
    """The message names the setting and what is wrong with it."""
    with pytest.raises(SpecError, match=words):
        load_pipeline(f"tiered:{settings}")
