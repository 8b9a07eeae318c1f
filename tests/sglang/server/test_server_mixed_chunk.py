"""A real server with mixed chunks: gaps of splices are computed in steps that others decode in."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from threading import Event

import pytest
from conftest import ModelFolder, StartServer
from equality_cases import play_random
from equality_checks import ROWS_BOUND
from equality_kit import DECODED, PlayedSession, draw_tokens, row_errors, spliced_by_contract
from pool_probe import MIXED
from sglang_models import SglangModel
from sglang_server import SglangServer

pytestmark = pytest.mark.nightly

SESSIONS = 4


def test_gaps_beside_decodes_give_the_contracts_kv(
    start_server: StartServer,
    model_folder: ModelFolder,
    probed: dict[str, str],
    start_session: Callable[[SglangServer, str], PlayedSession],
) -> None:
    """KV and tokens of edited turns are the contract's, and the answers beside them unchanged.

    SGLang doesn't mix requests that want log-probabilities, so tokens and rows are compared.
    """
    folder = model_folder(SglangModel.LLAMA)
    flags = ("--enable-mixed-chunk", "--chunked-prefill-size=64")
    server = start_server(folder, *flags, environment=probed)
    stop, prompt = Event(), list(draw_tokens(Random(1), 90))
    alone = server.generate(prompt, 200)["output_ids"]

    def answer() -> int:
        count = 0
        while not stop.is_set():
            assert server.generate(prompt, 200)["output_ids"] == alone
            count += 1
        return count

    spliced = 0
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(answer)
        try:
            for seed in range(SESSIONS):
                session = replace(start_session(server, f"mixed{seed}"), scored=False)
                for played in play_random(session, Random(seed), 3):
                    assert played.receipt.tokens.spliced == spliced_by_contract(played.pieces)
                    errors = row_errors(session.subject, played)
                    assert max(errors.still, errors.turning) <= ROWS_BOUND
                    greedy = [int(row.argmax()) for row in played.expected.logits[-DECODED:]]
                    assert greedy == list(played.tokens[played.prompt :])
                    spliced += played.receipt.tokens.spliced
        finally:
            stop.set()
        assert beside.result() >= 1
    assert spliced >= 500
    assert server.log.read_text(errors="replace").count(MIXED) >= SESSIONS
