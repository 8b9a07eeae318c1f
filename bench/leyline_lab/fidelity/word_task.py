"""The recall task in single words, which a tiny hybrid model learns in minutes.

A message is a few tokens: outputs of tools show settings, the user asks for one, the assistant
answers with its value, or with :data:`UNKNOWN` where nothing has shown it::

    <tool> k3 v17 k8 v2 <end>  <text> w4 w9 <end>  <ask> k8 v2 <end>  <ask> k5 <unknown> <end>

Pure: the same random generator gives the same session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

KEYS: Final = tuple(f"k{n}" for n in range(32))
VALUES: Final = tuple(f"v{n}" for n in range(32))
_WORDS: Final = tuple(f"w{n}" for n in range(24))
PAD, TOOL, TEXT, ASK, END, UNKNOWN, CUT = (
    f"<{name}>" for name in ("pad", "tool", "text", "ask", "end", "unknown", "cut")
)
VOCABULARY: Final = (PAD, TOOL, TEXT, ASK, END, UNKNOWN, CUT, *KEYS, *VALUES, *_WORDS)
STUB: Final = (TOOL, CUT, END)
"""A message in place of one that was cut."""

Words = list[str]


def output(rng: Random, shown: dict[str, str], keys: Sequence[str]) -> Words:
    """Return a tool's output, and note what it shows.

    Args:
        shown: values by key; those of the output are added.
        keys: the settings that it has.
    """
    values = {key: rng.choice(VALUES) for key in keys}
    shown |= values
    return [TOOL, *(word for pair in values.items() for word in pair), END]


def text(rng: Random) -> Words:
    """Return a message without meaning."""
    return [TEXT, *rng.choices(_WORDS, k=rng.randint(2, 8)), END]


def asked(key: str, shown: dict[str, str]) -> Words:
    """Return a question with its answer."""
    return [ASK, key, shown.get(key, UNKNOWN), END]


def messages(
    rng: Random,
    length: int,
    shown: dict[str, str],
    keys: Sequence[str],
    *,
    stubs: float = 0.0,
    unknown: float = 0.0,
) -> Words:
    """Return messages of at least so many words.

    Args:
        shown: values by key that may be asked for; those that outputs show are added.
        keys: the settings that outputs have.
        stubs: share of stubs.
        unknown: share of questions about settings that weren't shown.
    """
    words = Words()
    while len(words) < length:
        kind = rng.random()
        if kind < 0.3:
            words += output(rng, shown, rng.sample(keys, rng.randint(1, 4)))
        elif kind < 0.4:
            words += text(rng)
        elif kind < 0.4 + stubs:
            words += STUB
        else:
            unseen = [key for key in keys if key not in shown]
            known = shown and (not unseen or rng.random() >= unknown)
            if known or unknown:
                words += asked(rng.choice(list(shown) if known else unseen), shown)
    return words


def session(rng: Random, length: int, *, keys: int = len(KEYS)) -> Words:
    """Return a session of so many words, of which the first ``keys`` settings are known."""
    return messages(rng, length, {}, KEYS[:keys], stubs=0.04, unknown=0.25)[:length]


@dataclass(frozen=True, slots=True)
class CutSession:
    """A session one of whose outputs is cut."""

    head: tuple[str, ...]
    output: tuple[str, ...]
    rest: tuple[str, ...]
    questions: dict[str, tuple[str, str]]
    """Key and right answer of the whole session, by what the key is: of the ``cut`` output, shown
    ``before`` or ``after`` it, or ``never``."""


def cut_session(rng: Random, head: int, rest: int) -> CutSession:
    """Return a session of an output between about so many words, neither of which has its keys."""
    keys = rng.sample(KEYS, len(KEYS))
    before, cut = dict[str, str](), dict[str, str]()
    first = messages(rng, head, before, keys[:12])
    middle = output(rng, cut, keys[12:15])
    known = dict(before)
    last = [*output(rng, known, keys[15:17]), *messages(rng, rest - 6, known, keys[15:28])]
    after = {key: value for key, value in known.items() if key not in before}
    shown = {"cut": cut, "before": before, "after": after}
    questions = {kind: rng.choice(list(facts.items())) for kind, facts in shown.items()}
    questions["never"] = (keys[-1], UNKNOWN)
    return CutSession(tuple(first), tuple(middle), tuple(last), questions)
