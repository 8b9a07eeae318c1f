"""Reuse against its contract computed the long way round: content that another session holds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

import pytest
import torch
from oracle_cases import draw_tokens
from oracle_check import BOUND, relative_error
from oracle_engine import Ran, start_engine, tamper
from oracle_models import MODEL_NAMES, OracleModel
from oracle_reference import Fresh, Keep, Piece, Remembered, long_way_round

from leyline_engine.contract import EditPayload, ReuseMode, ReusePayload
from leyline_replay.engine import GenerationRequest, ReplayEngine

Models = Callable[[str], OracleModel]

FORCED = (1, 2, 3)
LIVE = ReusePayload(mode=ReuseMode.LIVE)


def run(
    engine: ReplayEngine, session: str, prompt: Sequence[int], reuse: ReusePayload | None = LIVE
) -> Ran:
    """One request of a session, which asks for reuse."""
    payload = EditPayload(session=session, scope="tenant", turn="t")
    sequence = engine.admit(GenerationRequest(session, array("q", prompt), payload, reuse))
    logits = None
    while logits is None:
        logits = sequence.prefill_step()
    answers: list[torch.Tensor] = [logits, *(sequence.decode_step(token) for token in FORCED)]
    record = sequence.finish()
    engine.check_integrity()
    return Ran("t", (*prompt, *record.output_ids), tuple(answers), record.receipt)


class Scene:
    """Two sessions whose documents a third one has in another order, one of them twice."""

    def __init__(self, subject: OracleModel) -> None:
        rng = random.Random(60)
        self.subject = subject
        self.engine = start_engine(subject, chunk_tokens=64)
        self.docs = [draw_tokens(rng, length) for length in (90, 130, 70)]
        heads = [draw_tokens(rng, 50), draw_tokens(rng, 37)]
        self.turns: list[Remembered] = []
        self.starts: list[tuple[int, int]] = []
        for session, (head, docs) in enumerate(zip(heads, ([0, 1], [2]), strict=True)):
            prompt = [*head, 3]
            for doc in docs:
                self.starts.append((session, len(prompt)))
                prompt += [*self.docs[doc], 7 + doc]
            run(self.engine, f"s{session}", prompt)
            self.turns.append(long_way_round(subject, [Fresh(tuple(prompt))], FORCED).turn)
        self.head = [*draw_tokens(rng, 45), 4]  # no document has the same neighbours here
        self.tail = draw_tokens(rng, 6)

    def kept(self, doc: int, boundary: int = 0) -> list[Piece]:
        """A document as another session has it, but for its first ``boundary`` tokens."""
        session, start = self.starts[doc]
        end = start + len(self.docs[doc])
        first = Fresh(tuple(self.docs[doc][:boundary]))
        return [*([first] if boundary else []), Keep(self.turns[session], start + boundary, end)]

    def prompt(self) -> list[int]:
        """The third session's prompt; a token of its own follows each document."""
        order = [2, 0, 1, 0]
        parts = [[*self.docs[doc], 20 + place] for place, doc in enumerate(order)]
        return [*self.head, *(token for part in parts for token in part), *self.tail]

    def truth(self, boundary: int = 0) -> tuple[torch.Tensor, ...]:
        """The contract's logits."""
        pieces: list[Piece] = [Fresh(tuple(self.head))]
        for place, doc in enumerate([2, 0, 1, 0]):
            pieces += [*self.kept(doc, boundary), Fresh((20 + place,))]
        return long_way_round(self.subject, [*pieces, Fresh(tuple(self.tail))], FORCED).logits


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_reused_documents_give_the_contracts_logits(name: str, oracle_model: Models) -> None:
    """Documents of two sessions, in another order and one of them twice, are those of the source
    at new positions."""
    scene = Scene(oracle_model(name))
    ran = run(scene.engine, "own", scene.prompt())
    tokens, counts = ran.receipt.tokens, ran.receipt.reuse
    assert counts is not None
    assert tokens.reused == counts.tenant == 90 + 130 + 70 + 90
    assert tokens.prefix == tokens.spliced == 0
    assert relative_error(ran.logits, scene.truth()) <= BOUND


@pytest.mark.parametrize("name", ["stablelm-partial", "deepseek-v3-yarn"])
def test_the_first_tokens_of_a_reused_document_may_be_computed(
    name: str, oracle_model: Models
) -> None:
    """A boundary leaves that many tokens of each document to be computed in their new context."""
    scene = Scene(oracle_model(name))
    asked = ReusePayload(mode=ReuseMode.LIVE, boundary=16)
    ran = run(scene.engine, "own", scene.prompt(), asked)
    assert ran.receipt.tokens.reused == 90 + 130 + 70 + 90 - 4 * 16
    assert relative_error(ran.logits, scene.truth(16)) <= BOUND


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_observing_changes_no_bit(name: str, oracle_model: Models) -> None:
    """The same request, observed, has the logits of one that didn't ask, to the last bit."""
    scene, plain = Scene(oracle_model(name)), Scene(oracle_model(name))
    observed = run(scene.engine, "own", scene.prompt(), ReusePayload(mode=ReuseMode.OBSERVE))
    unasked = run(plain.engine, "own", plain.prompt(), None)
    assert observed.receipt.reuse is not None
    assert observed.receipt.reuse.tenant == 380
    assert observed.receipt.tokens == unasked.receipt.tokens
    for one, other in zip(observed.logits, unasked.logits, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_a_wrong_rotation_would_be_seen(name: str, oracle_model: Models) -> None:
    """Control: keys that keep the source's positions miss the contract's logits by far."""
    scene = Scene(oracle_model(name))
    tamper(scene.engine, "no_rotation", scene.subject)
    ran = run(scene.engine, "own", scene.prompt())
    assert ran.receipt.tokens.reused == 380
    assert relative_error(ran.logits, scene.truth()) > 10 * BOUND
