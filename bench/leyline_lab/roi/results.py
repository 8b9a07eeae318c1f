"""Prompt tokens by who would serve them: per request, session, file and in all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..sums import Sums

WORTH_IT = 0.01
"""Smallest share of the prompt tokens for which reuse is worth being turned on."""


@dataclass(frozen=True, slots=True)
class Served(Sums):
    """Prompt tokens by their origin."""

    prefix: int = 0
    """The longest exact prefix of anything live of the tenant."""
    edits: int = 0
    """Spliced from the session's own retained turns, after edits by policies or by rule."""
    clean: int = 0
    """Found by content; its KV has read nothing but what the prompt begins with as well."""
    session: int = 0
    """Found by content in the same session."""
    tenant: int = 0
    """Found by content in another session of the tenant."""
    prefill: int = 0

    @property
    def reuse(self) -> int:
        """Tokens found by content."""
        return self.clean + self.session + self.tenant

    @property
    def prompt(self) -> int:
        """All tokens."""
        return self.prefix + self.edits + self.reuse + self.prefill

    def share(self, tokens: int) -> float:
        """Return a number of tokens as a share of the prompt; 0 for an empty one."""
        return tokens / self.prompt if self.prompt else 0.0

    def by_source(self) -> dict[str, int]:
        """Return the tokens by source; they sum to the prompt."""
        return {
            "prefix": self.prefix,
            "edits": self.edits,
            "reuse": self.reuse,
            "prefill": self.prefill,
        }

    def by_kind(self) -> dict[str, int]:
        """Return the reused tokens by kind."""
        return {"clean": self.clean, "session": self.session, "tenant": self.tenant}

    def to_json(self) -> dict[str, Any]:
        """Return tokens and shares in the form of `leyline roi --json`."""
        return {
            "prompt_tokens": self.prompt,
            "served": self.by_source(),
            "shares": {
                name: round(self.share(count), 6) for name, count in self.by_source().items()
            },
            "reuse_by_kind": self.by_kind(),
        }


def total(served: Iterable[Served]) -> Served:
    """Return the sum."""
    return sum(served, Served())


@dataclass(frozen=True, slots=True)
class SessionRoi:
    """One session, request by request."""

    id: str
    requests: tuple[Served, ...]


@dataclass(frozen=True, slots=True)
class FileRoi:
    """The sessions of a file, which are those of one tenant, in their order."""

    name: str
    sessions: tuple[SessionRoi, ...]
    notes: tuple[str, ...] = ()
    """Requests that could not be played."""

    @property
    def requests(self) -> int:
        """Number of requests."""
        return sum(len(session.requests) for session in self.sessions)

    @property
    def served(self) -> Served:
        """The sum over all requests."""
        return total(one for session in self.sessions for one in session.requests)


@dataclass(frozen=True, slots=True)
class RoiSettings:
    """The assumptions of an estimate."""

    policy: str = "keep_all"
    undeclared: tuple[str, ...] = ()
    """Rules ``ROLE=amortize`` for the harness's own edits."""
    tokenizer: str = "shipped"
    retained_turns: int = 4
    """Turns of a session that the proxy keeps as sources of edits."""
    cache_tokens: int | None = None
    """Bound of live tokens; None if nothing is ever evicted."""
    mode: str = "observe"
    """``observe`` counts content beside a cache that prefills it; ``live`` copies it."""
    page_tokens: int = 1
    """Tokens per page of the cache."""
    anchor_tokens: int = 1
    """Tokens between two anchors of a model with recurrent layers, which reuses no content; 1 for
    other models."""


@dataclass(frozen=True, slots=True)
class RoiReport:
    """All files."""

    files: tuple[FileRoi, ...]
    settings: RoiSettings

    @property
    def served(self) -> Served:
        """The sum over all files."""
        return total(file.served for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the form that `leyline roi --json` writes."""
        return {
            "files": [
                {
                    "file": file.name,
                    "sessions": len(file.sessions),
                    "requests": file.requests,
                    **file.served.to_json(),
                    "notes": list(file.notes),
                }
                for file in self.files
            ],
            "sessions": sum(len(file.sessions) for file in self.files),
            "requests": sum(file.requests for file in self.files),
            **self.served.to_json(),
            "by_session": [
                {
                    "file": file.name,
                    "id": session.id,
                    "requests": len(session.requests),
                    **total(session.requests).to_json(),
                    "by_turn": [one.by_source() for one in session.requests],
                }
                for file in self.files
                for session in file.sessions
            ],
            "settings": asdict(self.settings),
            "advice": advice(self.served),
        }


def by_turn(report: RoiReport) -> list[Served]:
    """Return the sums over all sessions by turn."""
    sessions: Sequence[SessionRoi] = [one for file in report.files for one in file.sessions]
    longest = max((len(session.requests) for session in sessions), default=0)
    return [
        total(session.requests[turn] for session in sessions if turn < len(session.requests))
        for turn in range(longest)
    ]


def advice(served: Served) -> str:
    """Return in one sentence what the figures mean for the setting ``reuse``."""
    if not served.prompt:
        return "There is no prompt to serve."
    share = served.share(served.reuse)
    if share < WORTH_IT:
        return (
            f"Content reuse would serve {share:.1%} of the prompt tokens: for this traffic it "
            "isn't worth turning on."
        )
    computed = served.reuse / (served.reuse + served.prefill)
    return (
        f"Content reuse would serve another {share:.1%} of the prompt tokens, {computed:.1%} of "
        "those that are otherwise prefilled; turn it on with reuse: observe first."
    )
