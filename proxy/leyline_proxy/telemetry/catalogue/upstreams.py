"""Engines: their facts, their health, and their work."""

from __future__ import annotations

from .entries import CatalogueEntry, Group, counter, gauge, histogram

_UPSTREAM = ("upstream",)

_ENGINES: tuple[CatalogueEntry, ...] = (
    gauge(
        "upstream_up",
        "1 when the engine answers.",
        _UPSTREAM,
        merge="livemin",
        bad="0: it is down or can't be reached; sessions go to other engines, if there are any.",
    ),
    gauge(
        "engine_splices",
        "1 when turns of this model are spliced, 0 when they can't be.",
        ("upstream", "model", "engine"),
        merge="livemin",
        bad="0: the plugin is missing or refuses this model; /readyz says why.",
    ),
    gauge(
        "engine_info",
        "Always 1. The labels hold an engine's facts from its capability document. pool: class of "
        "the KV pool; dtype: of KV; rotary: kind of rotary embedding; contract: protocol version.",
        ("upstream", "engine", "engine_version", "model", "pool", "dtype", "rotary", "contract"),
        merge="livemostrecent",
        bad="Missing for an upstream: it has no capability document, so nothing is spliced.",
    ),
    gauge(
        "upstream_circuit",
        "1 while an engine that fails requests gets no more, or one as a trial.",
        _UPSTREAM,
        name="leyline_upstream_circuit_open",
        merge="livemax",
        bad="1: it answers the handshake but fails requests.",
    ),
    gauge("upstream_running", "Requests in progress on an engine.", _UPSTREAM, merge="livesum"),
    counter(
        "upstream_turns",
        "Chat turns that an engine served, by the outcome of their edits.",
        ("upstream", "outcome"),
        bad="Uneven between engines of equal weight: few sessions, or an engine comes and goes.",
    ),
    counter(
        "upstream_prompt_tokens",
        "Prompt tokens by engine and by the source of their KV: cached, spliced, reused, "
        "prefilled.",
        ("upstream", "source"),
    ),
    histogram(
        "upstream_ttft_seconds",
        "Time from a chat request's arrival to its first token, by the engine that served it.",
        ("upstream", "outcome"),
        bad="One engine much slower than similar ones: busy with other work, or broken.",
    ),
    counter(
        "failovers",
        "Requests that moved to another engine before their first byte, by the engine that "
        "failed them.",
        _UPSTREAM,
        bad="Above 0: that engine fails requests; each costs its session the cache.",
        starts=((),),
    ),
    counter(
        "router_answers",
        "Turns by the engine that has answered them, as their records report: behind a router, and "
        "elsewhere if it wasn't the expected run. holder: it has the session's sources. first: the "
        "session had no engine. moved: the router has chosen another one. restarted: the same "
        "engine, in a later run. unknown: the engine isn't among the upstreams. unrecorded: no "
        "engine has a record.",
        ("upstream", "answered"),
        bad="'moved' above 0: the router doesn't keep sessions; each such turn is prefilled. "
        "'unknown' above 0: an engine is missing in upstreams; its turns never splice, and forgets "
        "can't reach it. 'unrecorded': the router drops the envelope, or an engine has no plugin.",
        starts=(("unknown", "unknown"),),
    ),
    counter(
        "receipts",
        "Receipts of turns by how they came. answer: with the answer. asked: the engine was asked "
        "for it. absent: the engine had none, or only an incomplete one. late: it didn't answer "
        "within receipt_timeout_s, or not at all. not_asked: after such failures the engine isn't "
        "asked for a while.",
        ("upstream", "came"),
        bad="'absent', 'late', 'not_asked': later edits can't use those turns as sources.",
    ),
    counter(
        "erasures",
        "Forgets that were sent to engines separately from a turn: to engines that held the "
        "session before, and to engines that did not confirm the forget with the turn. erased: the "
        "engine confirmed it; gone: its run has ended, and the KV with it; pending: neither at the "
        "first try; lost: the session has expired, and this proxy no longer knows the engine; or "
        "the engine has shown no capability document for 10 minutes.",
        ("result",),
        bad="'pending' isn't followed by 'erased' or 'gone': see leyline_erasures_owed. "
        "'lost' above 0: an engine was removed, or lost its plugin, while it owed a forget; if it "
        "runs, restart it.",
        starts=(("erased",), ("gone",), ("pending",), ("lost",)),
    ),
    gauge(
        "erasures_owed",
        "Sessions with a forget that some engine has not confirmed yet. With Redis, or "
        "owed_forgets_path, a proxy takes over those of one that was killed. Without both, a "
        "restarted proxy learns of each when the session's next turn comes.",
        merge="livesum",
        bad="Above 0 for minutes: text that should be forgotten may still be in an engine's "
        "memory.",
    ),
    gauge(
        "erasures_unsaved",
        "Sessions with a forget that an engine owes and of which only this process knows, because "
        "the store of debts (Redis, or the folder owed_forgets_path) can't be written.",
        merge="livesum",
        bad="Above 0: if the process is killed before the store is back, nobody "
        "sends these forgets.",
    ),
)

GROUPS = (Group("Engines", "The upstreams, by their names in the settings.", _ENGINES),)
