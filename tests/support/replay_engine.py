"""A tiny random model, and short ways to drive the engine over it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig

from leyline_engine.contract import (
    Directive,
    EditPayload,
    LineageRun,
    Recompute,
    ReuseMode,
    ReusePayload,
    SourceRef,
    TurnRecord,
    apply_directives,
    lower_directives,
    token_digest,
)
from leyline_engine.records.lineage import fold_keys
from leyline_engine.reuse.fingerprints import MatcherKind
from leyline_replay.cache.radix import Node
from leyline_replay.cache.slots import Slots
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.models.loader import LoadedModel
from leyline_replay.sequence import Sequence as Running

VOCAB = 256
LIVE = ReusePayload(mode=ReuseMode.LIVE)
OBSERVE = ReusePayload(mode=ReuseMode.OBSERVE)
_REQUESTS = count()
SCOPE = "tenant"
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}


def make_model(config: Any, seed: int = 0) -> Any:
    """An fp32 model with weights wide enough for attention to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    wide = "embed" in name or "lm_head" in name
                    parameter.normal_(0, 0.5 if wide else 0.2)
    return model


@cache
def tiny_model(kind: str = "gqa") -> Any:
    """Two layers, hidden width 32: ``gqa`` (Llama) or ``mla`` (DeepSeek-V2)."""
    if kind == "gqa":
        return make_model(LlamaConfig(**BASE, num_key_value_heads=1))
    return make_model(DeepseekV2Config(**BASE, **MLA))


def make_engine(
    kind: str = "gqa",
    *,
    pool: int = 600,
    page: int = 1,
    chunk: int = 32,
    splicing: bool = True,
    matcher: MatcherKind = MatcherKind.WINNOW,
    recompute: Recompute = Recompute(),  # noqa: B008 - immutable
) -> ReplayEngine:
    """An engine over the tiny model."""
    tokenizer: Any = None
    loaded = LoadedModel("tiny", tiny_model(kind), tokenizer, "f" * 32, "")
    return ReplayEngine(
        loaded,
        pool_tokens=pool,
        page_tokens=page,
        chunk_tokens=chunk,
        splicing=splicing,
        matcher=matcher,
        recompute=recompute,
    )


def ids(values: Iterable[int]) -> array[int]:
    """Token ids as the engine takes them."""
    return array("q", values)


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids without the end-of-text token 0."""
    generator = random.Random(seed)
    return [generator.randrange(1, VOCAB) for _ in range(count)]


def reference(tokens: Sequence[int], kind: str = "gqa") -> torch.Tensor:
    """fp32 logits ``[vocab]`` after ``tokens`` from the model alone, without any cache."""
    with torch.inference_mode():
        output = tiny_model(kind)(torch.tensor([list(tokens)]), use_cache=False)
    return torch.as_tensor(output.logits[0, -1]).float()


def same_logits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for the order of summation."""
    return bool(torch.allclose(one, other, rtol=1e-3, atol=1e-3))


def prefill(sequence: Running) -> torch.Tensor:
    """Run the whole prompt; the last position's logits."""
    logits = sequence.prefill_step()
    while logits is None:
        logits = sequence.prefill_step()
    return logits


def admit(
    engine: ReplayEngine,
    tokens: Iterable[int],
    payload: EditPayload | None = None,
    room: int = 8,
    reuse: ReusePayload | None = None,
) -> Running:
    """Admit one request with ``room`` tokens of output."""
    name = f"r{next(_REQUESTS)}"
    return engine.admit(GenerationRequest(name, ids(tokens), payload, reuse, max_new_tokens=room))


def run(
    engine: ReplayEngine,
    tokens: Iterable[int],
    payload: EditPayload | None = None,
    decode: int = 0,
    reuse: ReusePayload | None = None,
) -> tuple[torch.Tensor, TurnRecord]:
    """One request from admission to finish; first logits and record, integrity checked."""
    sequence = admit(engine, tokens, payload, reuse=reuse)
    first = logits = prefill(sequence)
    for _ in range(decode):
        logits = sequence.decode_step(int(logits.argmax()))
    record = sequence.finish(int(logits.argmax()) if decode else None)
    engine.check_integrity()
    return first, record


def register(turn: str, *, session: str = "s", scope: str = SCOPE) -> EditPayload:
    """A payload that only retains its turn."""
    return EditPayload(session=session, scope=scope, turn=turn)


def edit(
    source: Sequence[int],
    directives: Sequence[Directive],
    *,
    tail: Sequence[int] = (),
    source_turn: str = "t1",
    turn: str = "t2",
    session: str = "s",
    lineage: tuple[LineageRun, ...] = (),
    sink: int = 32,
) -> tuple[list[int], EditPayload]:
    """Prompt and payload for directives over one retained turn."""
    prompt = apply_directives(source, directives) + list(tail)
    payload = EditPayload(
        session=session,
        scope=SCOPE,
        turn=turn,
        sources=(SourceRef(source_turn, len(source), token_digest(source)),),
        directives=tuple(directives),
        segments=lower_directives(directives, len(source), len(prompt)),
        lineage=lineage,
        sink=sink,
    )
    return prompt, payload


def snapshot(engine: ReplayEngine) -> object:
    """Tree with locks and owners, allocator, registry and ledger, however nodes are split."""
    ledger = engine.cache.ledger
    known = {key: frozenset(names) for key, names in ledger._names.items()}
    readers = {key: tuple(sorted(found.items())) for key, found in ledger._readers.items()}
    return held(engine), known, readers


def held(engine: ReplayEngine) -> object:
    """The same without the ledger, which may know more than is held."""
    cache_ = engine.cache
    paths: set[tuple[tuple[object, ...], ...]] = set()

    def walk(node: Node, path: tuple[tuple[object, ...], ...]) -> None:
        held = (node.locks, frozenset(node.owners))
        path += tuple(
            (key, slot, *held) for key, slot in zip(node.keys, node.slots.tolist(), strict=True)
        )
        if not node.children:
            paths.add(path)
        for child in node.children.values():
            walk(child, path)

    walk(cache_.tree.root, ())
    free = frozenset(free_slots(engine).tolist())
    turns = {key: tuple(value.items()) for key, value in cache_.registry._sessions.items()}
    return paths, free, cache_.tree.root.locks, len(cache_.tree.doomed()), repr(turns)


def free_slots(engine: ReplayEngine) -> Slots:
    """Slots of the pool without an owner."""
    return engine.cache._allocator.free_slots()


def contents(engine: ReplayEngine) -> dict[int, bytes]:
    """The stored content of every slot in use, in all layers: tensors, original keys, positions."""
    cache_ = engine.cache
    free = set(free_slots(engine).tolist())
    pool = cache_.pool
    stored = [tensor for pair in pool._tensors for tensor in pair]
    stored += [*pool._as_computed, pool._computed_at]
    return {
        slot: b"".join(tensor[slot].numpy().tobytes() for tensor in stored)
        for slot in range(cache_.capacity)
        if slot not in free
    }


def cached(
    engine: ReplayEngine, tokens: Sequence[int], lineage: tuple[LineageRun, ...] = ()
) -> Slots:
    """Slots of what is cached of a sequence."""
    return engine.cache.match(fold_keys(tokens, lineage, SCOPE)).slots


def blank(engine: ReplayEngine, slots: Slots) -> bool:
    """Return True if nothing is left in these slots, in any layer or tensor."""
    index = torch.from_numpy(slots)
    pool = engine.cache.pool
    stored = [t[index] for pair in pool._tensors for t in pair]
    stored += [tensor[index] for tensor in pool._as_computed]
    return not any(bool(tensor.any()) for tensor in stored)


def retained(engine: ReplayEngine, session: str = "s") -> list[str]:
    """Names of the turns that the engine keeps as sources for a session."""
    return [turn.turn for turn in engine.cache.registry.turns((SCOPE, session))]


def fail_at(original: Callable[..., Any], call: int, error: BaseException) -> Callable[..., Any]:
    """``original``, but its ``call``-th call (from 1) raises."""
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return original(*args, **kwargs)

    return wrapper
