"""Models that keep state per sequence: conversations against the engine, and ways to get it wrong.

What the engine copied is read from its receipts, for where it can copy depends on what it holds.
The contract's version of the same copies is computed the long way round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from oracle_check import BOUND, copied_by, relative_error
from oracle_engine import Conversation, Edit, Ran, Treatment, start_engine
from oracle_models import VOCAB, OracleModel, randomized
from oracle_reference import Fresh, Remembered, amortized_pieces, long_way_round
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    NemotronHConfig,
    Olmo3Config,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from leyline_replay.cache.anchors import Anchoring
from leyline_replay.cache.slots import Slots
from leyline_replay.engine import ReplayEngine

WINDOW = 24
GRID = 16
_LAYERS = 4
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_DELTA = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _layered(**options: Any) -> dict[str, Any]:
    return {**_BASE, "num_hidden_layers": _LAYERS, **options}


WINDOWED: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt-oss": lambda: GptOssConfig(
        **_layered(head_dim=32, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)
    ),
    "gemma-3": lambda: Gemma3TextConfig(
        **_layered(head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32),
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
    "olmo-3": lambda: Olmo3Config(**_layered(sliding_window=WINDOW)),
}
RECURRENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-next": lambda: Qwen3NextConfig(
        **_layered(**_DELTA, **_EXPERTS, rope_parameters=_PARTIAL),
        num_experts=4,
        shared_expert_intermediate_size=32,
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(
        **_layered(**_DELTA),
        rope_parameters={**_PARTIAL, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    ),
    "kimi-linear": lambda: KimiLinearConfig(
        **_layered(num_key_value_heads=4, **_EXPERTS),
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_local_experts=4,
        linear_head_dim=16,
        linear_num_heads=4,
        n_group=1,
        topk_group=1,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "nemotron-h": lambda: NemotronHConfig(
        **_BASE,
        head_dim=16,
        layers_block_type=["mamba", "mlp", "attention", "mamba", "attention", "mamba"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=32,
        conv_kernel=4,
        expand=1,
    ),
    "granite-h": lambda: GraniteMoeHybridConfig(
        **_layered(),
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        position_embedding_type="nope",
    ),
    "lfm2": lambda: Lfm2Config(
        **_layered(), layer_types=["conv", "full_attention"] * 2, conv_L_cache=3
    ),
}
UNTURNED = frozenset({"kimi-linear", "nemotron-h", "granite-h"})


def anchored_model(name: str) -> OracleModel:
    """A tiny random model; its recurrences remember tokens for tens to thousands of others."""
    subject = randomized(name, (WINDOWED | RECURRENT)[name](), seed=7)
    with torch.no_grad():
        for path, weight in subject.model.named_parameters():
            if path.endswith("A_log"):
                slopes = torch.linspace(-7.5, -2.5, weight.numel())
                weight.copy_(slopes.view(weight.shape))
            elif path.endswith("sinks"):
                weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(3))
            elif "conv" in path and weight.dim() > 1:
                weight.mul_(3.0)
            elif path.endswith("q_layernorm.weight"):
                weight.mul_(4.0)
    return subject


def anchored_engine(subject: OracleModel, **options: Any) -> ReplayEngine:
    """An engine with a fine grid, in which rows that a window has dropped are no numbers."""
    engine = start_engine(subject, **{"chunk_tokens": 64, "anchoring": Anchoring(GRID), **options})
    pool = engine.cache.pool
    drop = pool.drop

    def poison(slots: Slots) -> None:
        drop(slots)
        for window, pair in zip(pool.layout.windows, pool.tensors_of_layers(), strict=True):
            for tensor in pair if window else ():
                tensor[torch.from_numpy(slots)] = float("nan")

    pool.drop = poison  # type: ignore[method-assign]
    return engine


@dataclass(slots=True)
class AnchoredConversation:
    """A conversation on both sides."""

    subject: OracleModel
    engine: ReplayEngine
    session: str = "s"
    conversation: Conversation = field(init=False)
    truth: Remembered = field(init=False)

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.engine, session=self.session)

    def open(self, prompt: Sequence[int], forced: Sequence[int], unfed: int) -> float:
        """The first turn; returns how far it is off."""
        ran = self.conversation.open(prompt, forced, unfed)
        truth = long_way_round(self.subject, [Fresh(tuple(prompt))], forced, unfed)
        self.truth = truth.turn
        return relative_error(ran.logits, truth.logits)

    def edit(
        self,
        edits: Sequence[Edit],
        tail: Sequence[int],
        forced: Sequence[int],
        unfed: int,
        *,
        treatments: Sequence[Treatment] = (),
    ) -> tuple[float, Ran]:
        """An edited turn; returns how far it is off, and what the engine made of it.

        Nothing is copied from the first token on that an edit forgets.
        """
        ran = self.conversation.edit(edits, tail, forced, unfed, treatments=treatments)
        shift = 0
        for (start, end, new), how in zip(edits, treatments, strict=bool(treatments)):
            if how is Treatment.FORGET:
                assert max(copied_by(ran), default=0) < start + shift
            shift += len(new) - (end - start)
        truth = long_way_round(
            self.subject,
            amortized_pieces(self.truth, edits, tail),
            forced,
            unfed,
            copied=copied_by(ran),
        )
        self.truth = truth.turn
        return relative_error(ran.logits, truth.logits), ran


def draw(rng: random.Random, count: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(rng.randrange(4, VOCAB) for _ in range(count))


def draw_edits(rng: random.Random, source: Sequence[int]) -> list[Edit]:
    """One to three deletions or stubs, none of which begins as what it takes away does."""
    while True:
        cuts = sorted(rng.sample(range(8, len(source)), 2 * rng.randint(1, 3)))
        edits: list[Edit] = [
            (start, min(end, start + 90), draw(rng, rng.choice([0, 0, 1, 7, 20])))
            for start, end in zip(cuts[::2], cuts[1::2], strict=True)
        ]
        if all((*new, *source[end:], -1)[0] != source[start] for start, end, new in edits):
            return edits


def play_session(subject: OracleModel, seed: int) -> tuple[int, int]:
    """A session of random edits, some of which forget, on an engine with little room for state.

    Returns:
        Tokens that its engine spliced, and the turns that forgot.
    """
    rng = random.Random(seed)
    engine = anchored_engine(
        subject,
        chunk_tokens=rng.choice([32, 48, 128]),
        anchoring=Anchoring(rng.choice([1, 16]), rng.choice([6, 64]), rng.choice([0, 100])),
        page_tokens=rng.choice([1, 1, 16]),
    )
    conversation = AnchoredConversation(subject, engine)
    assert conversation.open(draw(rng, rng.randint(150, 350)), draw(rng, 2), 3) <= BOUND
    spliced = forgot = 0
    for turn in range(4):
        edits = draw_edits(rng, conversation.truth.tokens)
        hows = [Treatment.AMORTIZE] * len(edits)
        if turn == 2 and rng.random() < 0.5:
            hows[-1] = Treatment.FORGET
            forgot += 1
        tail = draw(rng, rng.choice([1, 9, 60]))
        error, ran = conversation.edit(edits, tail, draw(rng, 2), 3, treatments=hows)
        assert error <= BOUND, f"seed {seed}, turn {turn}: {error:.1e}"
        spliced += ran.receipt.tokens.spliced
    return spliced, forgot


def tamper_state(engine: ReplayEngine, how: str) -> None:
    """Make an engine continue from a wrong state, whenever it starts from a copied one.

    ``no_state`` takes that of a sequence's start, ``early`` the one at the first anchor of the
    source, ``other_convolution`` its convolutions' inputs alone.
    """
    admitter: Any = engine._admitter
    copy_states, states = admitter._copy_states, engine.cache.anchors.states
    assert states is not None
    pool = states

    def wrong(plan: Any, keys: Any, start: Any) -> dict[int, int]:
        copied: dict[int, int] = copy_states(plan, keys, start)
        first = engine.cache.anchors.of(keys[0]).spans[0][0]
        early = pool.read(engine.cache.anchors.slot(keys[0], first))
        for slot in copied.values():
            right = [tensor.clone() for tensor in pool.read(slot)]
            pool.write(
                slot,
                [
                    torch.zeros_like(ours)
                    if how == "no_state"
                    else theirs
                    if how == "early" or form.kind == "conv_states"
                    else ours
                    for form, ours, theirs in zip(pool.forms, right, early, strict=True)
                ],
            )
        return copied

    admitter._copy_states = wrong


def shorten_windows(engine: ReplayEngine) -> None:
    """Make attention read one row less than its window has, from the next request on."""
    layout = engine._layout
    engine._layout = replace(layout, windows=tuple(max(0, window - 1) for window in layout.windows))
