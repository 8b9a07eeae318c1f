"""The state that an engine's model keeps per sequence: in words, and the cost of it."""

from __future__ import annotations

from leyline_engine.contract import Capability, StateFacts

RETAINED_TURNS = 4
"""Retained turns of a session at a proxy without settings."""
_FEW_SESSIONS = 16
"""With room for fewer, sessions push out one another's states."""
_COPY_SHARE = 1 / 50
"""Time to copy the memory of a token's rows, as a share of its prefill."""


def state_tokens(capability: Capability | None) -> int:
    """Return the tokens whose rows take as much memory as one recurrent state; 0 without any."""
    if capability is None or capability.state is None or capability.kv is None:
        return 0
    return -(-capability.state.bytes_per_state // max(1, capability.kv.bytes_per_token))


def anchor_tokens(capability: Capability | None) -> int:
    """Return the tokens between two anchors that a forward leaves; 1 if state is everywhere."""
    state = capability.state if capability is not None else None
    return state.anchor_tokens if state is not None else 1


def splice_overhead(capability: Capability | None) -> int:
    """Return the tokens that a splice must move to pay for state: half of those between two
    anchors, which it computes again on average, and the copy of one state."""
    return anchor_tokens(capability) // 2 + round(state_tokens(capability) * _COPY_SHARE)


def sessions_held(state: StateFacts, retained_turns: int) -> int:
    """Return an estimate of the sessions whose states fit: one for each retained turn's end, and
    one for a request that runs."""
    return state.slots // (retained_turns + 1)


def needs_slots(capability: Capability, retained_turns: int) -> str:
    """Return the remedy if the engine has few slots for recurrent states; empty if it has many."""
    state = capability.state
    if state is None or not state.recurrent_layers:
        return ""
    if sessions_held(state, retained_turns) >= _FEW_SESSIONS:
        return ""
    return (
        f"With states of fewer than {_FEW_SESSIONS} sessions, edits often find none, and prefill. "
        "Give the engine more slots (SGLang: --max-mamba-cache-size, --mamba-full-memory-ratio), "
        "or let sessions retain fewer turns (retained_turns)."
    )


def state_words(capability: Capability, retained_turns: int) -> str:
    """Return a model's kinds of state in a sentence's words; empty if it has none."""
    state, parts = capability.state, list[str]()
    if state is None:
        return ""
    if state.window:
        parts.append(f"sliding windows of {state.window:,} tokens, spliced as promised for all")
    if state.recurrent_layers:
        size = f"{state.bytes_per_state:,} bytes for a state"
        if (tokens := state_tokens(capability)) > 0:
            size += f" (the rows of {tokens:,} tokens)"
        held = sessions_held(state, retained_turns)
        parts.append(
            f"{state.recurrent_layers} recurrent layers, {size}, {state.slots:,} slots: about "
            f"{held:,} sessions of {retained_turns} retained turns; no recall by KV and no content "
            "reuse, as a state brings all that it has read (recurrent_state)"
        )
    return "; ".join(parts)
