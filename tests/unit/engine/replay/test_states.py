"""States of recurrent layers in the replay engine: who has them, and what a forget leaves."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from proof_kit import begin, place_of, proven, settled, survivors
from support.replay_engine import SCOPE, LoadedModel, make_model, prefill, random_tokens, run
from transformers import GptOssConfig, PreTrainedModel, Qwen3NextConfig

from leyline_engine.contract import (
    CopySegment,
    EditPayload,
    LiteralSegment,
    RecurrentEdits,
    SourceRef,
    token_digest,
)
from leyline_engine.records.lineage import fold_keys
from leyline_replay.cache.anchors import Anchoring
from leyline_replay.engine import GenerationRequest, ReplayEngine

TEXT = random_tokens(150, 3)
OTHER = random_tokens(140, 4)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 2048,
}


@cache
def hybrid() -> PreTrainedModel:
    """A hybrid of four layers."""
    config = Qwen3NextConfig(
        **SIZES,
        num_hidden_layers=4,
        num_experts=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
    )
    return make_model(config)


@cache
def windowed() -> PreTrainedModel:
    """A model whose every other layer has a window of 16 tokens."""
    config = GptOssConfig(**SIZES, num_hidden_layers=2, num_local_experts=2, sliding_window=16)
    return make_model(config)


def make_engine(
    model: PreTrainedModel, *, grid: int = 16, slots: int = 24, window_tokens: int = 0
) -> ReplayEngine:
    """An engine with a fine grid."""
    loaded = LoadedModel("tiny", model, None, "f" * 32, "")
    anchoring = Anchoring(grid, slots, window_tokens)
    return ReplayEngine(loaded, pool_tokens=900, chunk_tokens=32, anchoring=anchoring)


def turn(name: str, session: str = "s") -> EditPayload:
    return EditPayload(session=session, scope=SCOPE, turn=name)


def cut(
    source: Iterable[int], start: int, end: int, name: str, session: str = "s"
) -> tuple[list[int], EditPayload]:
    """A prompt without ``[start, end)`` of a turn, and its payload."""
    tokens = list(source)
    prompt = [*tokens[:start], *tokens[end:], 9]
    payload = EditPayload(
        session=session,
        scope=SCOPE,
        turn=name,
        sources=(SourceRef("t1", len(tokens), token_digest(tokens)),),
        segments=(
            CopySegment(0, 0, start, 0),
            CopySegment(0, end, len(tokens), start),
            LiteralSegment(len(prompt) - 1, 1),
        ),
        recurrent=RecurrentEdits.KEPT,
    )
    return prompt, payload


def anchors_of(engine: ReplayEngine, tokens: Iterable[int]) -> list[int]:
    """Positions of a text at which a sequence can be continued."""
    return [end for _, end in engine.cache.anchors.of(fold_keys(array("q", tokens))).spans]


def nonzero_states(engine: ReplayEngine) -> set[int]:
    """State slots that hold anything."""
    states = engine.cache.anchors.states
    assert states is not None
    return {
        slot
        for tensor in states.tensors()
        for slot in torch.nonzero(tensor.flatten(1).any(dim=1)).flatten().tolist()
    }


def test_prefills_leave_a_state_per_chunk_on_the_grid() -> None:
    """150 tokens in chunks of 32: the last chunk has 22, of which 16 are on the grid."""
    engine = make_engine(hybrid())
    run(engine, TEXT, turn("t1"), decode=3)
    assert anchors_of(engine, TEXT) == [32, 64, 96, 128, 144]


def test_a_grid_of_one_leaves_exact_ends() -> None:
    """Each chunk ends with a state, and so does the answer."""
    engine = make_engine(hybrid(), grid=1)
    _, record = run(engine, TEXT, turn("t1"), decode=3)
    tokens = [*TEXT, *record.output_ids]
    assert anchors_of(engine, tokens) == [32, 64, 96, 128, 150, 153]


def test_decoding_leaves_a_state_every_256_tokens() -> None:
    """It is at the position, wherever the prompt ended."""
    engine = make_engine(hybrid())
    _, record = run(engine, random_tokens(254, 8), turn("t1"), decode=3)
    assert anchors_of(engine, [*random_tokens(254, 8), *record.output_ids])[-1] == 256


def test_states_are_evicted_alone_and_rows_outlive_them() -> None:
    """With too few slots the oldest states go; the rows stay, and are computed upon again."""
    engine = make_engine(hybrid(), slots=4)
    run(engine, TEXT, turn("t1"))
    run(engine, OTHER, turn("t1", session="z"))
    assert len(anchors_of(engine, TEXT)) + len(anchors_of(engine, OTHER)) == 4
    assert anchors_of(engine, TEXT) == []
    # Both begin with the same token.
    assert engine.cache.tree.cached_count() == len(TEXT) + len(OTHER) - 1
    _, record = run(engine, [*TEXT, 5], turn("t2"))
    assert record.receipt.tokens.prefix == 0
    engine.check_integrity()


def test_the_state_of_a_claimed_path_stays() -> None:
    """A claim holds its path's last state; the others make room."""
    engine = make_engine(hybrid(), slots=4)
    run(engine, TEXT, turn("t1"))
    pinned = engine.cache.anchors.pin(engine.cache.tree.cut(fold_keys(array("q", TEXT))))
    run(engine, OTHER, turn("t1", session="z"))
    assert anchors_of(engine, TEXT) == [144]
    assert anchors_of(engine, OTHER) == [64, 96, 128]
    assert pinned is not None
    assert pinned.pins == 1


def test_rows_that_a_window_lost_are_computed_again() -> None:
    """A turn starts over without a living window, and leaves the windows of its own chunks."""
    engine = make_engine(windowed(), window_tokens=40)
    run(engine, TEXT, turn("t1"))
    run(engine, OTHER, turn("t1", session="z"))
    run(engine, random_tokens(140, 5), turn("t1", session="y"))
    before = anchors_of(engine, TEXT)
    assert before == [0]
    _, record = run(engine, [*TEXT, 5], turn("t2"))
    assert record.receipt.tokens.prefix == 0
    assert anchors_of(engine, [*TEXT, 5])[-1] == len(TEXT) + 1


def test_a_forget_overwrites_every_state_of_the_session() -> None:
    """States of its nodes, copies of them, and freed ones go; another session's stay."""
    engine = make_engine(hybrid())
    run(engine, TEXT, turn("t1"), decode=0)
    run(engine, OTHER, turn("t1", session="z"))
    kept = len(anchors_of(engine, OTHER))
    prompt, payload = cut(TEXT, 40, 70, "t2")
    _, record = run(engine, prompt, payload)
    assert record.receipt.state == "kept"
    assert len(nonzero_states(engine)) > kept + 5
    proof = proven(engine, "s")
    assert survivors(proof) == {}
    assert place_of(proof, "state").scanned == 24
    assert len(nonzero_states(engine)) == kept == len(anchors_of(engine, OTHER))
    engine.check_integrity()


@pytest.mark.parametrize("where", ["free", "node"])
def test_a_proof_finds_a_state_that_stayed(where: str) -> None:
    """Control: a copy of one, in a free slot or as another session's, is a survivor."""
    engine = make_engine(hybrid())
    run(engine, TEXT, turn("t1"))
    run(engine, OTHER, turn("t1", session="z"))
    states, anchors = engine.cache.anchors.states, engine.cache.anchors
    assert states is not None
    source = anchors.slot(fold_keys(array("q", TEXT)), 64)
    target = anchors.slot(fold_keys(array("q", OTHER)), 64)
    if where == "free":
        target = int(states.free_slots()[0])
    for tensor in states.tensors():
        tensor[target] = tensor[source]
    assert survivors(proven(engine, "s")) == {"state": 1}


def test_states_of_a_withheld_request_are_overwritten() -> None:
    """A request that runs while its session forgets leaves no state."""
    engine = make_engine(hybrid())
    running = engine.admit(GenerationRequest("r", array("q", TEXT), turn("t1")))
    for _ in range(3):
        running.prefill_step()
    assert len(running.states) == 3
    asked = begin(engine, "s")
    assert settled(engine)[asked.receipt.message_id].pending
    prefill(running)
    running.finish()
    proof = settled(engine)[asked.receipt.message_id]
    assert (proof.pending, survivors(proof)) == (False, {})
    assert nonzero_states(engine) == set()
    prefill(asked)
    asked.finish()
    engine.check_integrity()


def test_a_failed_admission_gives_its_states_back() -> None:
    """A copy that fails leaves no state behind, and the request runs without it."""
    engine = make_engine(hybrid())
    run(engine, TEXT, turn("t1"), decode=0)
    states = engine.cache.anchors.states
    assert states is not None
    free = states.free_count

    def fail(*_: object) -> None:
        raise RuntimeError

    engine.cache.copy, copy = fail, engine.cache.copy  # type: ignore[method-assign]
    prompt, payload = cut(TEXT, 40, 70, "t2")
    sequence = engine.admit(GenerationRequest("r", array("q", prompt), payload))
    assert states.free_count == free
    assert (sequence.receipt.state, sequence.receipt.tokens.spliced) == ("", 0)
    sequence.abort()
    engine.cache.copy = copy  # type: ignore[method-assign]
    engine.check_integrity()
