"""The margin gate in a real SGLang server, with its own logits, scheduling and checks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_client import EngineClient, new_message_id, request_body
from equality_kit import draw_tokens
from sglang_server import SglangServer

from leyline_engine.contract import (
    EditPayload,
    LineageRun,
    Receipt,
    ReuseMode,
    ReusePayload,
    edit_envelope,
)

STRICT = ReusePayload(mode=ReuseMode.LIVE, margin=100)
LENIENT = ReusePayload(mode=ReuseMode.LIVE, margin=1e-9)
"""Measures, and gates next to nothing."""


def ask(
    client: EngineClient,
    prompt: list[int],
    session: str,
    reuse: ReusePayload | None,
    lineage: tuple[LineageRun, ...] = (),
    **body: Any,
) -> tuple[float, Receipt]:
    """A greedy answer's margin, as SGLang's own log probabilities have it, and its receipt."""
    name = new_message_id()
    payload = EditPayload(session=session, scope="margins", turn=name, lineage=lineage)
    envelope = edit_envelope(name, payload, reuse=reuse)
    options: dict[str, Any] = {
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": -1,
    }
    answer = client.post(request_body(prompt, envelope, decode=4, **options, **body))
    first, second = answer["meta_info"]["output_top_logprobs"][0]
    return first[0] - second[0], client.record(name).receipt


@pytest.mark.parametrize("name", ["mla_server", "gqa_server"])
def test_a_server_measures_and_heeds_margins(name: str, request: pytest.FixtureRequest) -> None:
    """The margin is that of SGLang's log probabilities; a session that isn't trusted computes its
    next turn, and then reuses again."""
    server: SglangServer = request.getfixturevalue(name)
    rng = random.Random(name)
    doc, news = draw_tokens(rng, 300), draw_tokens(rng, 200)
    with EngineClient(server.base_url) as client:
        ask(client, [*draw_tokens(rng, 50), *doc, *news], "a", LENIENT)
        trusted = [*draw_tokens(rng, 60), *doc, *draw_tokens(rng, 30)]
        margin, receipt = ask(client, trusted, "b", LENIENT)
        assert receipt.reuse is not None
        assert receipt.reuse.margin == pytest.approx(margin, rel=1e-3, abs=1e-3)
        assert (receipt.reuse.total, receipt.tokens.reused) == (300, 300)

        head = draw_tokens(rng, 60)
        doubted = [*head, *doc, *draw_tokens(rng, 30)]
        margin, first = ask(client, doubted, "c", STRICT)
        assert first.reuse is not None
        assert first.reuse.margin == pytest.approx(margin, rel=1e-3, abs=1e-3)
        assert (first.reuse.gated, first.tokens.reused) == (False, 300)
        grown = [*doubted, *news, 5]
        _, gated = ask(client, grown, "c", STRICT, first.lineage)
        assert gated.reuse is not None
        assert gated.reuse.gated
        assert (gated.tokens.reused, gated.tokens.prefix, gated.lineage) == (0, len(head), ())
        _, after = ask(client, [*grown, *doc, 6], "c", LENIENT, gated.lineage)
        assert after.reuse is not None
        assert (after.reuse.gated, after.tokens.prefix) == (False, len(grown))
        assert after.tokens.reused == 300
        client.wait_idle()
