"""The finders of spliced KV in a real vLLM engine, and those who must not find it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_kit import (
    BLOCK,
    BOUND,
    CONTROL_FACTOR,
    Played,
    PlayedSession,
    distance,
    draw_tokens,
    expect,
    load_reference,
)
from msgspec.structs import replace
from oracle_models import OracleModel
from oracle_reference import Fresh, Keep
from splice_kit import Answer, SplicingEngine, splicing_engine
from vllm.v1.request import Request

from leyline_engine.contract import Directive, EditPayload, LineageRun, Outcome
from leyline_engine.vllm.block_keys import LineageKeys, PathHasher, RequestKeys, space_of

CUT = Directive(100, 140)
EXACT = CUT.start // BLOCK * BLOCK
"""Tokens in front of the first block that a cut makes private."""


@pytest.fixture(scope="module")
def engine(vllm_model: Path) -> Iterator[SplicingEngine]:
    """An engine with Leyline."""
    with splicing_engine(vllm_model) as started:
        yield started


@pytest.fixture(scope="module")
def subject(vllm_model: Path) -> OracleModel:
    """The same model in transformers."""
    return load_reference(vllm_model)


def spliced_turn(session: PlayedSession, cut: Directive = CUT) -> Played:
    """A turn whose KV remembers 40 tokens that its prompt doesn't show."""
    rng = random.Random(session.session)
    opened = session.open(draw_tokens(rng, 300))
    played = session.edit(opened, [cut], draw_tokens(rng, 3))
    assert played.receipt.tokens.spliced > 0
    return played


def clean_error(session: PlayedSession, answer: Answer) -> float:
    """The distance of an answer from a run that has seen its own tokens only."""
    return distance(answer, expect(session.subject, [Fresh(answer.prompt)], answer))


def foreign(played: Played, session: PlayedSession) -> dict[str, EditPayload | None]:
    """Payloads of those who send a turn's tokens but have no right to its spliced KV."""
    own = EditPayload(session=session.session, scope=session.scope, turn="x")
    lineage = played.receipt.lineage
    return {
        "nobody": None,
        "same session without its map": own,
        "another session": replace(own, session="other"),
        "another tenant with its map": replace(own, scope="other", lineage=lineage),
        "a map that begins a block later": replace(
            own, lineage=tuple(LineageRun(run.start + BLOCK, run.lineage) for run in lineage)
        ),
        "one who guesses the shared name": replace(own, share="anything"),
    }


def test_spliced_kv_is_served_to_nobody_else(engine: SplicingEngine, subject: OracleModel) -> None:
    """The same visible tokens get the exact prefix only, and the answer of a clean run."""
    session = PlayedSession(engine, subject, "private")
    played = spliced_turn(session)
    remembering = distance(
        played.answer, expect(subject, [Fresh(played.answer.prompt)], played.answer)
    )
    assert remembering > CONTROL_FACTOR * BOUND
    for who in foreign(played, session):
        engine.llm.reset_prefix_cache()
        session = PlayedSession(engine, subject, f"private {who}")
        played = spliced_turn(session)
        payload = foreign(played, session)[who]
        answer = engine.ask(played.answer.prompt, payload, scores=20)
        assert answer.cached == EXACT, who
        assert clean_error(session, answer) <= BOUND, who


def test_another_edit_to_the_same_tokens_finds_nothing_spliced(
    engine: SplicingEngine, subject: OracleModel
) -> None:
    """Two histories of one text don't meet, though the session, the turn and its tokens do."""
    rng = random.Random("histories")
    kept, one, two = draw_tokens(rng, 100), draw_tokens(rng, 40), draw_tokens(rng, 40)
    rest = draw_tokens(rng, 160)
    session = PlayedSession(engine, subject, "histories")
    first = session.open((*kept, *one, *rest))
    second = session.open((*kept, *two, *rest))
    shown = len(kept) + len(rest)
    for source in (first, second):
        # The answers differ; both edits lead to the tokens that both prompts end in.
        cut = [Directive(100, 140), Directive(300, len(source.tokens))]
        played = session.edit(source, cut, (77, 78, 79))
        assert played.answer.prompt[:shown] == (*kept, *rest)
        assert played.receipt.tokens.prefix == EXACT
        assert played.receipt.tokens.spliced > 0
        assert played.error <= BOUND
    assert session.turns[-1].receipt.lineage != session.turns[-2].receipt.lineage


def test_the_session_itself_goes_on_with_all_full_blocks(
    engine: SplicingEngine, subject: OracleModel
) -> None:
    """With its lineage map the next turn finds what was spliced and what was generated after it,
    which nobody else finds."""
    session = PlayedSession(engine, subject, "own", decode=70)
    played = spliced_turn(session)
    full = (len(played.tokens) - 1) // BLOCK * BLOCK
    assert full >= len(played.answer.prompt) + BLOCK
    prompt = (*played.tokens, 77, 78)
    payload = EditPayload(
        session="own", scope=session.scope, turn="next", lineage=played.receipt.lineage
    )
    answer = engine.ask(prompt, payload, scores=20)
    assert answer.record is not None
    receipt = answer.record.receipt
    assert (answer.cached, receipt.tokens.prefix) == (full, full)
    assert (receipt.outcome, receipt.lineage) == (Outcome.UNEDITED, played.receipt.lineage)
    plain = engine.ask(prompt, scores=20)
    assert plain.cached == EXACT
    assert clean_error(session, plain) <= BOUND
    pieces = [Keep(played.truth, 0, full), Fresh(prompt[full:])]
    assert distance(answer, expect(subject, pieces, answer)) <= BOUND


def test_a_salt_keeps_equal_prompts_apart(engine: SplicingEngine, subject: OracleModel) -> None:
    """Neither plain nor spliced KV is found under another cache salt."""
    session = PlayedSession(engine, subject, "salted")
    played = spliced_turn(session)
    lineage = played.receipt.lineage
    payload = EditPayload(session="salted", scope=session.scope, turn="s", lineage=lineage)
    assert engine.ask(played.answer.prompt, payload).cached > EXACT
    for each in (None, payload):
        salt = f"{each is None}"
        salted = {"prompt_token_ids": list(played.answer.prompt), "cache_salt": salt}
        answer = engine.run([engine.start_prompt(salted, each)])[0]
        assert answer.cached == 0


def request_of(tokens: list[int], engine: SplicingEngine, **options: object) -> Request:
    """A request of vLLM's with its own block hashes."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8)
    hasher = engine.core.request_block_hasher
    return Request("r", list(tokens), params, None, block_hasher=hasher, **options)  # type: ignore[arg-type]


def test_noted_paths_have_the_hashes_of_their_requests(engine: SplicingEngine) -> None:
    """A forget finds the blocks of an adapter, of a salt and of plain requests alike."""
    from vllm.lora.request import LoRARequest

    tokens = list(range(100, 260))
    hasher: PathHasher = engine.leyline._keys._hasher
    ways: list[dict[str, object]] = [
        {},
        {"lora_request": LoRARequest("a", 1, "/nowhere")},
        {"lora_request": LoRARequest("a", 2, "/elsewhere"), "cache_salt": "s"},
        {"cache_salt": "s"},
    ]
    requests = [request_of(tokens, engine, **options) for options in ways]
    for request in requests:
        assert hasher.plain(tokens, space_of(request)) == request.block_hashes
    assert len({request.block_hashes[0] for request in requests}) == len(ways)
    assert len({space_of(request) for request in requests}) == len(ways)


def test_a_taken_back_token_takes_its_blocks_key_with_it(engine: SplicingEngine) -> None:
    """Streamed input drops a sampled token: the keys after it are those of the tokens that stay."""
    request = request_of(list(range(100, 163)), engine)
    keys = RequestKeys(request, BLOCK)
    keys.use(request, (LineageRun(40, "l"),), "t")
    request.append_output_token_ids(5)
    assert len(request.block_hashes) == 2
    # vLLM's own steps, in Scheduler._update_request_as_session.
    del request._all_token_ids[63:]
    del request.block_hashes[63 // BLOCK :]
    request._all_token_ids.extend(range(500, 540))
    request.update_block_hashes()
    right = request_of([*range(100, 163), *range(500, 540)], engine).block_hashes
    assert keys.plain == right
    assert request.block_hashes == list(LineageKeys((LineageRun(40, "l"),), "t", BLOCK).over(right))


def test_keys_depend_on_tenant_name_and_place() -> None:
    """A block that contains the start of a run is private; so is all that follows."""
    plain = [bytes([number]) * 32 for number in range(6)]

    def keys(start: int, name: str, scope: str) -> list[bytes]:
        return list(LineageKeys((LineageRun(start, name),), scope, BLOCK).over(plain))

    base = keys(64, "l", "t")
    assert base[:2] == plain[:2]
    assert not set(base[2:]) & set(plain)
    assert keys(95, "l", "t")[:2] == plain[:2]
    assert keys(95, "l", "t")[2] not in (plain[2], base[2])
    assert keys(96, "l", "t")[:3] == plain[:3]
    for other in (keys(64, "m", "t"), keys(64, "l", "u"), keys(65, "l", "t"), keys(64, "tl", "")):
        assert not set(other[2:]) & set(base)
