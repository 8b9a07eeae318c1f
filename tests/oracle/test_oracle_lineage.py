"""The readers of spliced KV: only its own lineage, in bits and in slots.

A conversation reads a span, the span is cut, and the text after it is spliced: that KV remembers
the span. Others then send the very tokens that are visible now.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from oracle_cases import draw_tokens
from oracle_check import BOUND, CONTROL_FACTOR, relative_error
from oracle_engine import Conversation, Ran, run_request, start_engine
from oracle_models import OracleModel

from leyline_engine.contract import EditPayload, LineageRun
from leyline_engine.records.lineage import fold_keys
from leyline_replay.engine import GenerationRequest, ReplayEngine

Models = Callable[[str], OracleModel]

NAMES = ("llama", "qwen3", "glm-partial-interleaved", "deepseek-v2-yarn", "deepseek-v3")
FORCED = (5, 6, 7)
HEAD, SPAN, REST = 133, 50, 140
"""Tokens before the span (a turn and its answer), of the span, and after it."""


@dataclass(frozen=True, slots=True)
class Poisoned:
    """An engine that holds spliced KV."""

    engine: ReplayEngine
    opening: tuple[int, ...]
    visible: tuple[int, ...]
    """The conversation after the cut, and two more tokens."""
    lineage: tuple[LineageRun, ...]

    def lineage_slots(self) -> set[int]:
        """Slots of everything that was spliced, or computed upon it."""
        keys = fold_keys(self.visible, self.lineage, "tenant")
        return set(self.engine.cache.match(keys).slots[HEAD:].tolist())


def poison(subject: OracleModel, chunk_tokens: int) -> Poisoned:
    """Read a span, cut it, splice the rest."""
    rng = random.Random(4)
    conversation = Conversation(start_engine(subject, chunk_tokens))
    opening = draw_tokens(rng, HEAD - len(FORCED))
    conversation.open(opening, FORCED)
    # Span and rest begin with different tokens, so that the exact prefix ends before the span.
    span, rest = (1, *draw_tokens(rng, SPAN - 1)), (2, *draw_tokens(rng, REST - 1))
    conversation.open((*opening, *FORCED, *span, *rest), FORCED)
    spliced = conversation.edit([(HEAD, HEAD + SPAN, ())], (8, 8), FORCED)
    assert spliced.receipt.tokens.spliced == REST + len(FORCED)
    return Poisoned(conversation.engine, opening, (*spliced.tokens, 9, 9), spliced.receipt.lineage)


def visit(
    poisoned: Poisoned, session: str, scope: str, lineage: tuple[LineageRun, ...] = ()
) -> tuple[list[torch.Tensor], set[int]]:
    """Send the visible tokens as somebody; logits, and every slot that the request ever held."""
    payload = EditPayload(session=session, scope=scope, turn="visit", lineage=lineage)
    prompt = array("q", poisoned.visible)
    running = poisoned.engine.admit(GenerationRequest(session, prompt, payload))
    slots = set(running.held.tolist())
    logits = None
    while logits is None:
        logits = running.prefill_step()
        slots |= set(running.held.tolist())
    answers = [logits, *(running.decode_step(token) for token in FORCED)]
    slots |= set(running.held.tolist())
    running.finish()
    poisoned.engine.check_integrity()
    return answers, slots


def clean_run(subject: OracleModel, poisoned: Poisoned, chunk_tokens: int) -> Ran:
    """The same tokens on an engine that never saw the span, split into the same forwards."""
    engine = start_engine(subject, chunk_tokens)
    run_request(engine, poisoned.opening, FORCED)
    ran = run_request(engine, poisoned.visible, FORCED)
    assert ran.receipt.tokens.prefix == HEAD
    return ran


def same_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Logits equal to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("chunk_tokens", [48, 128, 512])
@pytest.mark.parametrize("scope", ["tenant", "another tenant"])
@pytest.mark.parametrize("name", NAMES)
def test_another_session_with_equal_tokens_sees_nothing_of_a_splice(
    name: str, scope: str, chunk_tokens: int, oracle_model: Models
) -> None:
    """The same visible tokens get a clean run's logits to the bit, and none of the lineage's
    slots."""
    poisoned = poison(oracle_model(name), chunk_tokens)
    private = poisoned.lineage_slots()
    assert len(private) == REST + 2 * len(FORCED) + 2
    logits, slots = visit(poisoned, "other", scope)
    clean = clean_run(oracle_model(name), poisoned, chunk_tokens)
    assert same_bits(logits, clean.logits)
    assert slots.isdisjoint(private)
    assert poisoned.lineage_slots() == private


@pytest.mark.parametrize("chunk_tokens", [48, 512])
@pytest.mark.parametrize("name", NAMES)
def test_another_tenant_finds_nothing_by_a_lineages_name(
    name: str, chunk_tokens: int, oracle_model: Models
) -> None:
    """A lineage map learnt from elsewhere opens nothing outside the tenant."""
    poisoned = poison(oracle_model(name), chunk_tokens)
    private = poisoned.lineage_slots()
    logits, slots = visit(poisoned, "s", "another tenant", poisoned.lineage)
    assert same_bits(logits, clean_run(oracle_model(name), poisoned, chunk_tokens).logits)
    assert slots.isdisjoint(private)


@pytest.mark.parametrize("chunk_tokens", [48, 512])
@pytest.mark.parametrize("name", NAMES)
def test_the_lineage_itself_sees_what_others_are_spared(
    name: str, chunk_tokens: int, oracle_model: Models
) -> None:
    """Control: continuing under its lineage, the conversation gets the slots and shows the span."""
    poisoned = poison(oracle_model(name), chunk_tokens)
    private = poisoned.lineage_slots()
    logits, slots = visit(poisoned, "s", "tenant", poisoned.lineage)
    assert private <= slots
    clean = clean_run(oracle_model(name), poisoned, chunk_tokens)
    assert relative_error(logits, clean.logits) >= CONTROL_FACTOR * BOUND


@pytest.mark.parametrize("name", NAMES)
def test_a_visitor_leaves_only_clean_kv_behind(name: str, oracle_model: Models) -> None:
    """The other session's published KV serves a third one, and equals a clean run's."""
    poisoned = poison(oracle_model(name), 128)
    private = poisoned.lineage_slots()
    _, published = visit(poisoned, "other", "tenant")
    logits, slots = visit(poisoned, "third", "another tenant")
    assert len(slots & published) == len(poisoned.visible)
    assert slots.isdisjoint(private)
    clean = clean_run(oracle_model(name), poisoned, 128)
    assert relative_error(logits, clean.logits) <= BOUND
