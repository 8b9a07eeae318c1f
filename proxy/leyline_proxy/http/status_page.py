"""The page at ``/``: what a person wants to see first, as one HTML document without assets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from string import Template

from ..sessions.summary import SessionOverview, SessionTotals
from ..upstream.handshake import UpstreamStatus

MAX_ROWS = 50

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Leyline</title>
<style>
:root { color-scheme: light dark; --line: #d5d9de; --dim: #5b6570; --good: #17703a; --bad: #a13317;
  --link: #1558b0; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a414a; --dim: #9aa5b1; --good: #63c98a; --bad: #f09070; --link: #8ab8f5; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } a { color: var(--link); } .dim { color: var(--dim); }
.good { color: var(--good); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: .9em; overflow-wrap: anywhere; }
</style>
</head>
<body>
<main>
<h1>Leyline</h1>
<p class="dim">OpenAI-compatible endpoint: <code>$base_url</code></p>
<h2>Engine</h2>
<p class="$tone"><strong>$verdict</strong></p>
<div class="scroll"><table>$facts</table></div>
<h2>Sessions</h2>
$sessions
<h2>More</h2>
<p><a href="/readyz">readiness</a> · <a href="/metrics">metrics</a> ·
<a href="/v1/models">models</a> · <a href="/v1/leyline/sessions">sessions as JSON</a> ·
<a href="/openapi.json">API description</a></p>
</main>
</body>
</html>
""")


def status_page(
    base_url: str, status: UpstreamStatus, sessions: Sequence[SessionOverview] | None, count: int
) -> str:
    """The page; ``sessions`` is None where they are nobody else's business."""
    return _PAGE.substitute(
        base_url=escape(base_url),
        tone="good" if status.splices else "bad",
        verdict=escape(_verdict(status)),
        facts="".join(
            f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in engine_facts(status)
        ),
        sessions=_sessions(sessions, count),
    )


def _verdict(status: UpstreamStatus) -> str:
    if status.splices:
        return "Up, and it splices."
    return f"Edits are not spliced: {status.obstacle}."


def engine_facts(status: UpstreamStatus) -> list[tuple[str, str]]:
    """The engine's capability as names and values for people."""
    facts = [("Models", ", ".join(status.models) if status.models else "unknown")]
    capability = status.capability
    if capability is None:
        return facts
    facts += [
        ("Engine", f"{capability.engine} {capability.engine_version}"),
        ("Architecture", capability.architecture),
        ("Context", f"{capability.max_context:,} tokens"),
        ("Actions", ", ".join(capability.actions) or "none"),
    ]
    if capability.rotary is not None:
        rotary = capability.rotary
        facts.append(("Rotary", f"{rotary.rope_type}, {rotary.pairing}, {rotary.rotary_dim} wide"))
    if capability.kv is not None:
        kv = capability.kv
        size = f"{kv.capacity_tokens:,} tokens, {kv.layers} layers"
        facts.append(("KV cache", f"{kv.pool_class}, {kv.dtype}, {size}"))
    return facts


def _sessions(sessions: Sequence[SessionOverview] | None, count: int) -> str:
    if sessions is None:
        return (
            f"<p>{count} live. This proxy has API keys, so their list is at "
            "<code>/v1/leyline/sessions</code>, for each tenant its own.</p>"
        )
    if not sessions:
        return "<p>None yet. Point an OpenAI client at the address above.</p>"
    head = "".join(
        f'<th class="{kind}">{name}</th>'
        for name, kind in [
            ("Session", ""),
            ("Turns", "n"),
            ("Prompt tokens", "n"),
            ("Cached", "n"),
            ("Spliced", "n"),
            ("Hit ratio", "n"),
        ]
    )
    rows = "".join(_row(session.id, session.totals) for session in sessions[:MAX_ROWS])
    more = f"<p class=dim>{count - MAX_ROWS} more.</p>" if count > MAX_ROWS else ""
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>{more}'


def _row(session_id: str, totals: SessionTotals) -> str:
    cells: Iterable[str] = (
        f"{totals.turns:,}",
        f"{totals.prompt_tokens:,}",
        f"{totals.cached_tokens:,}",
        f"{totals.spliced_tokens:,}",
        "–" if totals.hit_ratio is None else f"{totals.hit_ratio:.1%}",
    )
    numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    return f"<tr><td><code>{escape(session_id)}</code></td>{numbers}</tr>"
