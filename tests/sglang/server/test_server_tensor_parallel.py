"""Two tensor-parallel ranks decide alike, splice the same slots and answer as one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from conftest import ModelFolder, StartServer
from ledger_client import post_question
from rank_probe import probe_environment, splices
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import (
    Directive,
    EditPayload,
    SourceRef,
    SpanLabel,
    apply_directives,
    edit_envelope,
    token_digest,
)

BOUND = 1e-4
"""Of log-probabilities in fp32: ranks add their parts in another order than one process does."""
TURNS = 4


def ask(server: SglangServer, prompt: list[int], payload: EditPayload, name: str) -> dict:
    """Greedy answer with the log-probabilities of its tokens."""
    envelope = msgspec.to_builtins(edit_envelope(name, payload))
    sampling = {
        "temperature": 0,
        "max_new_tokens": 8,
        "ignore_eos": True,
        "custom_params": {"kv_hints": envelope},
    }
    return server.generate(prompt, 8, sampling_params=sampling, return_logprob=True)


def play(server: SglangServer) -> list[tuple[list[int], list[float], int]]:
    """A session whose every turn edits the one before: tokens, log-probabilities, cached tokens."""
    rng = Random(11)

    def text(length: int) -> list[int]:
        return [rng.randrange(10, 400) for _ in range(length)]

    prompt, answers, previous = text(300), [], ""
    spans = (SpanLabel("a", 0, 50), SpanLabel("b", 50, 100), SpanLabel("c", 100, 300))
    payload = EditPayload(session="s", scope="t", turn="t0", spans=spans)
    for number in range(TURNS):
        answer = ask(server, prompt, payload, f"tp-{number}")
        meta = answer["meta_info"]
        logprobs = [value for value, *_ in meta["output_token_logprobs"]]
        answers.append((answer["output_ids"], logprobs, meta["cached_tokens"]))
        source, previous = [*prompt, *answer["output_ids"]], payload.turn
        start = 60 + 20 * number
        directives = (
            Directive(start, start + 9),
            Directive(start + 80, start + 90, tuple(text(4))),
        )
        prompt = [*apply_directives(source, directives), *text(12)]
        payload = EditPayload(
            session="s",
            scope="t",
            turn=f"t{number + 1}",
            sources=(SourceRef(previous, len(source), token_digest(source)),),
            directives=directives,
        )
    return answers


@pytest.mark.nightly
def test_two_ranks_splice_the_same_slots(
    model_folder: ModelFolder, start_server: StartServer, mla_server: SglangServer, tmp_path: Path
) -> None:
    """Both ranks copy the same slots to the same slots, and answer as one rank does, also about
    their ledger."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    environment = probe_environment(folder) | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    server = start_server(model_folder(SglangModel.MLA), "--tp=2", environment=environment)
    answers = play(server)
    ledger = post_question(server.base_url, "a", "b", "c")
    first, second = splices(folder)
    assert first == second
    assert len(first) == 2 * (TURNS - 1)
    for (tokens, logprobs, cached), (wanted, expected, reused) in zip(
        answers, play(mla_server), strict=True
    ):
        assert (tokens, cached) == (wanted, reused)
        assert logprobs == pytest.approx(expected, abs=BOUND * max(map(abs, expected)))
    assert ledger == post_question(mla_server.base_url, "a", "b", "c")
    assert (ledger.spans["b"].turns, ledger.spans["b"].first) == (1, 50)
    assert ledger.spans["b"].lineages >= 1
