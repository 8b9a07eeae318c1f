"""The share of evicted text that agents quote later, by policy, over recorded sessions.

Every session is played turn by turn, as ``leyline policies try --window 32000 --idle 10m`` does. A
message counts as a part from the turn on which a policy first shortened or removed it. What the
model wrote on that turn and later, as recorded, is searched for it; `leyline_policies.quotes`
defines what counts. The sessions were recorded without policies: the models had read everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from leyline_policies import Memo, Message, Policy, load_pipeline, text_of
from leyline_policies.builtin import BUILTINS
from leyline_policies.conversation import INSTRUCTION_ROLES
from leyline_policies.faults import may_forget
from leyline_policies.quotes import Plain, QuoteCounter, plain, texts_in
from leyline_proxy.edits.prepare import PolicySession, prepare

from ..console import write_json
from ..harness import markdown
from ..harness.arguments import Arguments
from ..harness.report import progress
from ..sums import Sums
from ..traces.recordings import RecordedSession, read_trace
from .reclaimed import OPTIONS, spec

KINDS = "sessions_*.jsonl.gz"
BEGIN = markdown.mark("policy-quotes")
CHARS = 4
"""Characters of a token."""
MEMORY = 1 << 24
"""Characters of evicted texts that are remembered: more than any session has."""


@dataclass(frozen=True, slots=True)
class Figures(Sums):
    """Counts of one policy."""

    sessions: int = 0
    parts: int = 0
    quoted_parts: int = 0
    chars: int = 0
    quoted_chars: int = 0


class Texts:
    """The texts of messages, read once."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[Message, tuple[Plain, ...]]] = {}

    def of(self, message: Message) -> tuple[Plain, ...]:
        """Return the texts of a message."""
        if id(message) not in self._read:
            self._read[id(message)] = message, tuple(texts_in(message))
        return self._read[id(message)][1]

    def of_all(self, messages: Sequence[Message]) -> Iterator[Plain]:
        """Yield the texts of messages."""
        for message in messages:
            yield from self.of(message)


def figures(session: RecordedSession, policies: Sequence[Policy], texts: Texts) -> Figures:
    """Return the counts of one session.

    Raises:
        RuntimeError: a policy broke a rule.
    """
    counter, memo = QuoteCounter(MEMORY), Memo()
    facts = PolicySession(window=OPTIONS.window, memo=memo)
    forms: dict[int, int] = {}
    turns = [request.messages for request in session.requests]
    for turn, (messages, later) in enumerate(zip(turns, [*turns[1:], ()], strict=True)):
        memo.next_turn()
        prepared = prepare(messages, policies, (), turn, session=facts)
        if prepared.faults:
            raise RuntimeError(f"{policies} on {session.id}: {prepared.faults[0]}")
        facts = replace(facts, states=prepared.states, idle_s=OPTIONS.idle_s, last=prepared)
        kept = {entry.client_index: entry.message for entry in prepared.sent}
        prompt = [*texts.of_all(prepared.messages)]
        for at, message in enumerate(messages):
            sent = kept.get(at)
            if sent is message or message["role"] in INSTRUCTION_ROLES:
                continue
            # A message that is edited further is looked at again.
            if forms.get(id(message)) != id(sent):
                forms[id(message)] = id(sent)
                counter.evict(str(id(message)), plain(text_of(message)), prompt)
        known = set(map(id, messages))
        new = [m for m in later if id(m) not in known and m["role"] == "assistant"]
        counter.wrote([*texts.of_all(new)], prompt)
    counts = [each for each in counter.counts().values() if each.evicted]
    return Figures(
        bool(counts),
        len(counts),
        sum(each.quoted > 0 for each in counts),
        sum(each.evicted for each in counts),
        sum(each.quoted for each in counts),
    )


def measured(name: str, sessions: Sequence[RecordedSession]) -> Figures:
    """Return the counts of a policy over sessions."""
    texts = Texts()
    found = (figures(each, load_pipeline(spec(name)), texts) for each in sessions)
    return sum(found, Figures())


def row(name: str, found: Figures) -> str:
    """Return a line of the table."""
    return markdown.row(
        (
            f"`{name}`",
            found.sessions,
            f"{found.chars // CHARS:,}",
            f"{found.quoted_chars / found.chars:.1%}",
            f"{found.parts:,}",
            f"{found.quoted_parts / found.parts:.1%}",
        )
    )


def table(results: dict[str, Figures]) -> str:
    """Return the table, without policies that evict nothing."""
    lines = ["| policy | sessions | evicted tokens | quoted | parts | parts quoted |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    return "\n".join([*lines, *(row(name, each) for name, each in results.items() if each.chars)])


def recallable_names() -> list[str]:
    """Return the built-in policies that don't forget."""
    return [name for name in sorted(BUILTINS) if not may_forget(load_pipeline(spec(name))[0])]


def recorded(folder: Path) -> list[RecordedSession]:
    """Return the sessions of all files whose history the client didn't edit."""
    return [each for path in sorted(folder.glob(KINDS)) for each in read_trace(path).sessions]


def main() -> None:
    """Play, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="replace the table in here")
    given = parser.parse_args()
    sessions, names = recorded(given.traces), recallable_names()
    results: dict[str, Figures] = {}
    with progress("policies", len(names)) as step:
        for name in names:
            results[name] = measured(name, sessions)
            step()
    text = table(results)
    print(text)
    if given.into is not None:
        markdown.write(text, given.into, BEGIN)
    figures = {name: {"spec": spec(name), **asdict(found)} for name, found in results.items()}
    write_json(given.json, figures)
