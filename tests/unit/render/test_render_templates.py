"""Content spans and diffs for every published template, over recorded agent sessions."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from template_kit import renderer_of, tokenizer_of
from transformers import PreTrainedTokenizerFast

from leyline_proxy.model.diff import diff_messages
from leyline_proxy.model.messages import text_of
from leyline_proxy.model.rendered import Rendered
from leyline_proxy.plan.token_diff import SourceView, diff_tokens
from leyline_proxy.render import ChatRenderer

SESSIONS = (
    "sessions_tau_bench",
    "sessions_openhands_codeact",
    "sessions_swe_agent",
    "sessions_mini_swe_deepseek",
    "sessions_tau2_bench",
)
MESSAGES = 14
TEMPLATES = 10


def plainly(message: dict[str, Any]) -> dict[str, Any]:
    """Return messages as serving engines hand them to templates: texts as strings, arguments as
    objects."""
    plain = {"role": message["role"], "content": text_of(message)}
    plain |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"] or "{}"),
                },
            }
            for call in message["tool_calls"][:1]  # some templates take one call at a time
        ]
    return plain


def sessions(traces: Path) -> list[tuple[list[dict[str, Any]], list[Any] | None]]:
    """The beginnings of some recorded sessions."""
    found = []
    for name in SESSIONS:
        with gzip.open(traces / f"{name}.jsonl.gz", "rt") as lines:
            for line in islice(lines, 1):
                session = json.loads(line)
                messages = [plainly(message) for message in session["messages"][:MESSAGES]]
                found.append((messages, session.get("tools") or None))
    return found


def rendered_if_accepted(
    renderer: ChatRenderer, messages: list[dict[str, Any]], tools: list[Any] | None
) -> Rendered | None:
    """The prompt, or None where the template refuses the conversation."""
    try:
        return renderer.render(messages, tools)
    except Exception:  # templates raise what they like
        return None


@pytest.fixture
def templates(templates_dir: Path) -> list[tuple[str, PreTrainedTokenizerFast, ChatRenderer]]:
    """Each published template with a small tokenizer."""
    found = []
    for path in sorted(templates_dir.glob("*.jinja")):
        template = path.read_text()
        tokenizer = tokenizer_of(template)
        found.append((path.stem, tokenizer, renderer_of(tokenizer, template)))
    return found


def test_spans_are_the_contents_for_every_template(
    templates: list[tuple[str, PreTrainedTokenizerFast, ChatRenderer]], traces_dir: Path
) -> None:
    """A span decodes to its message's text, or to that text as JSON; spans never overlap."""
    located: dict[str, int] = {}
    for name, tokenizer, renderer in templates:
        for messages, tools in sessions(traces_dir):
            rendered = rendered_if_accepted(renderer, messages, tools)
            if rendered is None:
                continue
            end = 0
            for span in rendered.spans:
                assert end <= span.start < span.end <= len(rendered.tokens)
                end = span.end
                decoded = tokenizer.decode(
                    rendered.tokens[span.start : end].tolist(), clean_up_tokenization_spaces=False
                )
                text = text_of(messages[span.message]).strip()
                inner = json.dumps(text, ensure_ascii=False)[1:-1]
                # A token belongs to where it starts, so white space may be over at either end.
                assert decoded.strip() in (text, inner), name
            located[name] = located.get(name, 0) + len(rendered.spans)
    assert len(located) == TEMPLATES
    assert all(count >= 10 for count in located.values()), located


def test_a_truncated_result_is_blamed_on_its_message_for_every_template(
    templates: list[tuple[str, PreTrainedTokenizerFast, ChatRenderer]], traces_dir: Path
) -> None:
    """The difference names the edited message and no other, and everything else is kept."""
    checked = 0
    for name, _, renderer in templates:
        for messages, tools in sessions(traces_dir):
            before = rendered_if_accepted(renderer, messages, tools)
            if before is None:
                continue
            located = {span.message: span for span in before.spans}
            target = max(
                (i for i in located if 1 < i < MESSAGES - 4),
                key=lambda i: located[i].end - located[i].start,
                default=None,
            )
            if target is None or len(text_of(messages[target])) < 200:
                continue
            text = text_of(messages[target])
            cut = f"{text[:60]}\n[cut]\n{text[-60:]}"
            edited = [*messages]
            edited[target] = {**messages[target], "content": cut}
            after = renderer.render(edited, tools)
            view = SourceView(before.tokens, before.spans, len(before.tokens))
            diff = diff_tokens(view, after, diff_messages(messages, edited))
            blamed = {message for hunk in diff.hunks for message in hunk.old_messages}
            assert blamed == {target}, name
            own = {span.message: span.end - span.start for span in after.spans}[target]
            assert diff.kept_tokens >= len(after.tokens) - own - 8, name
            checked += 1
    assert checked >= 2 * TEMPLATES
