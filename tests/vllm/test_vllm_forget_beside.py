"""A forget in the step in which another turn of the session gets its copies."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from contract_kit import draw_tokens, labels
from splice_kit import Answer, SplicingEngine, splicing_engine

from leyline_engine.contract import Directive, EditPayload, Mode, Outcome, apply_directives

CUT = (Directive(64, 80, ()),)
"""At a block's edge: the copies follow the cached prefix, and are all ordered at once."""
FORGET = (Directive(100, 300, (), Mode.FORGET),)


def edited(source: Answer, session: str) -> tuple[tuple[int, ...], EditPayload]:
    """A turn that the cut makes of its source."""
    payload = EditPayload(
        session=session, scope="t", turn="b", sources=(source.ref("a"),), directives=CUT
    )
    return (*apply_directives(source.tokens, CUT), 77, 78), payload


def opened(engine: SplicingEngine, session: str, prompt: tuple[int, ...]) -> Answer:
    """A session's first turn."""
    spans = labels(("kept", 100), ("secret", 300), ("rest", len(prompt)))
    return engine.ask(prompt, EditPayload(session=session, scope="t", turn="a", spans=spans))


def test_a_splice_that_is_ordered_is_withheld_and_exact(
    vllm_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The splice keeps its sources until its rows are copied; nobody draws on it, nothing fails."""
    prompt = draw_tokens(random.Random(3), 420)
    with splicing_engine(vllm_model) as engine:
        alone = engine.ask(*edited(opened(engine, "alone", prompt), "alone"))
        source = opened(engine, "s", prompt)
        text, payload = edited(source, "s")
        left = (*apply_directives(source.tokens, FORGET), 79)
        forgetting = EditPayload(
            session="s",
            scope="t",
            turn="c",
            sources=(source.ref("a"),),
            directives=FORGET,
            forget=("secret",),
        )
        caplog.clear()
        started = [engine.start(text, payload), engine.start(left, forgetting)]
        spliced, forgot = engine.run(started)
        assert alone.record is not None and spliced.record is not None
        assert forgot.record is not None and forgot.record.receipt.forgot is not None
        assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
        assert spliced.record.receipt.outcome is alone.record.receipt.outcome is Outcome.SPLICED
        assert spliced.output == alone.output
        assert not spliced.record.receipt.turn
        progress = engine.sent.forgot.get(forgot.message, forgot.record.receipt.forgot)
        assert progress.pending == 0
