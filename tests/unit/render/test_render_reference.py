"""Rendering equals transformers, for published templates and recorded sessions."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from template_kit import renderer_of, tokenizer_of
from transformers import PreTrainedTokenizerFast

from leyline_engine.contract import normalize_messages, template_takes_parts
from leyline_proxy.model.messages import text_of

SESSIONS = ("sessions_tau_bench", "sessions_openhands_codeact", "sessions_swe_agent")
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is 'a  b' in <b>Python</b>? é…  "},
    {"role": "assistant", "content": "Two words."},
    {"role": "user", "content": "Thanks, and now?"},
]


def _reference(
    tokenizer: PreTrainedTokenizerFast, messages: list[Any], tools: list[Any] | None
) -> list[int] | None:
    try:
        return list(
            tokenizer.apply_chat_template(
                normalize_messages(messages, parts=template_takes_parts(tokenizer.chat_template)),
                tools=tools,
                add_generation_prompt=True,
                return_dict=False,
            )
        )
    except Exception:
        return None


def _conversations(traces: Path) -> list[tuple[list[Any], list[Any] | None]]:
    found: list[tuple[list[Any], list[Any] | None]] = [(CHAT, None)]
    for name in SESSIONS:
        with gzip.open(traces / f"{name}.jsonl.gz", "rt") as lines:
            for line in islice(lines, 1):
                session = json.loads(line)
                found.append((session["messages"][:24], session.get("tools") or None))
    return found


def test_every_published_template_renders_as_in_transformers(
    templates_dir: Path, traces_dir: Path
) -> None:
    """Equal tokens for the normalised messages, or both refuse."""
    rendered = 0
    for path in sorted(templates_dir.glob("*.jinja")):
        template = path.read_text()
        tokenizer = tokenizer_of(template)
        renderer = renderer_of(tokenizer, template)
        for messages, tools in _conversations(traces_dir):
            expected = _reference(tokenizer, messages, tools)
            try:
                tokens = renderer.render(messages, tools).tokens.tolist()
            except Exception:
                tokens = None
            assert tokens == expected, path.name
            rendered += expected is not None
    assert rendered >= 20


def test_spans_hold_the_contents(templates_dir: Path) -> None:
    """If a template emits contents verbatim, decoding a span gives the content back."""
    template = (templates_dir / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    tokenizer = tokenizer_of(template)
    rendered = renderer_of(tokenizer, template).render(CHAT, None)
    assert [span.message for span in rendered.spans] == list(range(len(CHAT)))
    for span in rendered.spans:
        text = tokenizer.decode(rendered.tokens[span.start : span.end].tolist())
        assert text.strip() == text_of(CHAT[span.message]).strip()


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages[99].role }}"])
def test_a_refusing_template_raises(source: str) -> None:
    """Any error of the template reaches the caller as an exception."""
    with pytest.raises(Exception, match="template"):
        renderer_of(tokenizer_of(source), source).render(CHAT, None)
