"""One running request: its slots, its working cache, and the steps it still has to run."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import torch

from leyline_engine.admit.plan import Prefill, page_floor
from leyline_engine.contract import (
    LineageRun,
    Receipt,
    ReusePayload,
    SpanLabel,
    TurnRecord,
)
from leyline_engine.records.ledger import Carried, Struck
from leyline_engine.records.lineage import fold_keys
from leyline_engine.records.retention import retain_turn, source_of
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_replay.cache.manager import CacheManager
from leyline_replay.cache.radix import Node
from leyline_replay.cache.slots import Slots
from leyline_replay.cache.working import WorkingCache

DECODED_PER_STATE = 256
"""Decoding leaves a state at multiples of so many tokens."""


class Forward(Protocol):
    """Runs the model over tokens at given positions and returns the last one's logits."""

    def __call__(self, tokens: list[int], start: int, cache: WorkingCache) -> torch.Tensor: ...


class PromptIndex(Protocol):
    """Makes prompts of running turns known for reuse."""

    def computed(self, scope: str, prompt: Callable[[], SourceTurn]) -> SourceTurn | None:
        """Record that a turn's prompt is cached; returns it if it is in the index from now on."""

    def ended(self, prompt: SourceTurn) -> None:
        """Record that the turn ended, or is withheld."""


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request on the engine's thread. Exactly one of finish and abort ends it."""

    forward: Forward
    cache: CacheManager
    working: WorkingCache
    prompt: array[int]
    lineage: tuple[LineageRun, ...]
    receipt: Receipt
    session: SessionKey | None
    held: Slots
    """One slot per position that has KV or will have it soon."""
    owned_from: int
    """Position from which on the slots are this request's own."""
    node: Node
    """The locked node at which the tree's part of the sequence ends."""
    pending: deque[Prefill]
    computed: int
    """Number of leading positions with complete KV; a prompt's count after its last chunk."""
    on_end: Callable[[Sequence], None]
    states: dict[int, int] = field(default_factory=dict)
    """Slots of its states that the tree hasn't got, by position."""
    spans: tuple[SpanLabel, ...] = ()
    """Labels of the parts of the prompt."""
    reuse: ReusePayload | None = None
    """The request for reuse, if any."""
    carried: Carried | None = None
    """Spans that this request's splice hides, until its KV is published."""
    publishable: bool = True
    """False once a forget made KV that this request read unfit to keep."""
    admits: bool = True
    """True if KV that this request computes is kept for reuse."""
    index: PromptIndex | None = None
    indexed: SourceTurn | None = None
    """Its prompt in the index, until it ends."""
    on_retained: Callable[[SourceTurn], None] | None = None
    """Called with the turn that this request became, when all else is done."""
    gate: Callable[[Sequence, torch.Tensor], bool] | None = None
    """Judges the logits of the whole prompt, before anything is published. It returns True if it
    undid the prefill; the prompt is pending again then."""
    fed: array[int] = field(default_factory=lambda: array("q"))
    """Generated tokens that were fed back, so that their KV exists."""
    ended: bool = False

    @property
    def output_ids(self) -> list[int]:
        return self.fed.tolist()

    @property
    def _scope(self) -> str:
        return self.session[0] if self.session is not None else ""

    @property
    def owned(self) -> Slots:
        """Slots that belong to this request and not to the tree."""
        return self.held[self.owned_from :]

    def keys(self) -> array[int]:
        """Return the radix keys of its prompt and of the tokens that were fed back."""
        return fold_keys(self.prompt + self.fed, self.lineage, self._scope)

    def prefill_step(self) -> torch.Tensor | None:
        """Run one chunk of the prompt.

        Returns:
            fp32 logits ``[vocab]`` of the last prompt position once the prompt is done, else None.
        """
        step = self.pending.popleft()
        logits = self._run(self.prompt[step.start : step.end].tolist(), step.start)
        self._keep_anchor(step.start, step.end)
        if self.pending:
            return None
        gate, self.gate = self.gate, None
        if gate is not None and gate(self, logits):
            return None
        self.computed = len(self.prompt)
        self._publish()
        self._offer()
        return logits

    def decode_step(self, token: int) -> torch.Tensor:
        """Feed one generated token back; returns fp32 logits ``[vocab]``.

        Raises:
            PoolExhaustedError: no slot for the token; the sequence can still be finished.
        """
        position = len(self.prompt) + len(self.fed)
        slot = self.cache.allocate(1, self.receipt.message_id)
        self.held = np.concatenate([self.held, slot])
        logits = self._run([token], position)
        self.fed.append(token)
        self.computed = position + 1
        if self.computed % DECODED_PER_STATE == 0:
            self._save_state(self.computed)
        return logits

    def _keep_anchor(self, start: int, end: int) -> None:
        """Keep what a later forward needs after a chunk of the prompt: a state, if it ends on the
        grid, and a window's rows."""
        anchors = self.cache.anchors
        if (end - start) % anchors.grid == 0:
            self._save_state(end)
        if anchors.window:
            self.cache.pool.drop(self.held[start : max(start, end - anchors.window)])

    def _save_state(self, position: int) -> None:
        """Save the state of the working cache, in place of an older one if there is no slot."""
        anchors, past = self.cache.anchors, [at for at in self.states if at < position]
        if anchors.states is None or position in self.states:
            return
        slot = anchors.take()
        if slot is None and past:
            slot = self.states.pop(min(past))
        if slot is not None:
            anchors.states.write(slot, self.working.state())
            self.states[position] = slot

    def _run(self, tokens: list[int], start: int) -> torch.Tensor:
        end = start + len(tokens)
        self.working.set_length(start)
        states = self.cache.anchors.states
        if states is not None and self.working.position != start:
            self.working.set_state(start, states.read(self.states[start]))
        self.working.position = end
        logits = self.forward(tokens, start, self.working)
        layers = range(self.cache.pool.layout.layers)
        self.cache.pool.write(
            self.held[start:end], start, [self.working.rows(layer, start, end) for layer in layers]
        )
        return logits

    def _publish(self) -> None:
        """Make the computed positions visible to other requests."""
        keeps = self.publishable and self.admits and not self._reads_doomed()
        if not keeps or self.computed <= self.owned_from:
            return
        if self.session is not None:
            self.cache.ledger.label(self.session, [label.span for label in self.spans])
        if self.carried is not None:
            self.cache.enter(self._scope, self.carried)
            self.carried = None
        window, decoded = self.cache.anchors.window, max(len(self.prompt), self.owned_from)
        if window:
            self.cache.pool.drop(self.held[decoded : max(decoded, self.computed - window)])
        keys, states = self.keys()[: self.computed], self.states
        self.states = {}
        match = self.cache.publish(
            keys,
            self.held[: self.computed],
            self.owned_from,
            self.node,
            self.session,
            request=self.receipt.message_id,
            states=states,
        )
        self.held = np.concatenate([match.slots, self.held[match.length :]])
        self.owned_from, self.node = match.length, match.node

    def _offer(self) -> None:
        """Make the prompt known for reuse, if it was published."""
        session, name = self.session, self.receipt.turn
        whole = page_floor(self.computed, self.cache.page_tokens)
        if self.index is None or session is None or not name or self.owned_from < whole:
            return

        def prompt() -> SourceTurn:
            return source_of(
                session,
                name,
                self.prompt,
                lineage=self.lineage,
                spans=self.spans,
                reuse=self.reuse,
            )

        self.indexed = self.index.computed(session[0], prompt)

    def _withdraw(self) -> None:
        """Take the prompt out of the index, unless that has all of the turn."""
        if self.index is not None and self.indexed is not None:
            self.index.ended(self.indexed)

    def _reads_doomed(self) -> bool:
        node: Node | None = self.node
        while node is not None:
            if node.detached:
                return True
            node = node.parent
        return False

    def finish(self, last_token: int | None = None) -> TurnRecord:
        """Publish the generated tokens' KV and retain the turn as a source.

        Args:
            last_token: a sampled token that was never fed back; it belongs to the turn, though
                no KV exists for it.
        """
        self._check_running()
        if self.cache.anchors.grid == 1:
            self._save_state(self.computed)
        self._publish()
        output = self.fed + (array("q", [last_token]) if last_token is not None else array("q"))
        retained: SourceTurn | None = None
        if self.session is not None and self.publishable and self.receipt.turn:
            retained = retain_turn(
                self.cache.registry,
                self.cache.ledger,
                self.session,
                self.receipt.turn,
                prompt=self.prompt,
                output=output,
                lineage=self.lineage,
                spans=self.spans,
                reuse=self.reuse,
            )
        self._end()
        if retained is not None and self.on_retained is not None:
            self.on_retained(retained)
        self._withdraw()
        return TurnRecord(receipt=self.receipt, finished=True, output_ids=tuple(output))

    def abort(self) -> TurnRecord:
        """Give up: unpublished slots are returned, and the turn is no source for later ones."""
        self._check_running()
        self._end()
        self._withdraw()
        return TurnRecord(receipt=self.receipt, finished=True, output_ids=tuple(self.fed))

    def _check_running(self) -> None:
        if self.ended:
            raise RuntimeError("a sequence ends once")

    def give_back(self) -> None:
        """Give back the slots that this request owns: what it computed doesn't count."""
        count = len(self.owned)
        self._drop_states()
        if self.publishable:
            self.cache.release(self.owned)
        else:
            # Forgets wait on: the request is about to read the same text again.
            self.cache.erase(self.owned)
        self.held = self.held[: self.owned_from]
        self.cache.listener.undone(self.receipt.message_id, count)

    def _end(self) -> None:
        self.ended = True
        count = len(self.owned)
        if self.publishable:
            self._drop_states()
            self.cache.release(self.owned)
        else:
            self.cache.ending(self, self.owned, self.keys(), self.owned_from, self.states)
            self._drop_states()
            self.cache.erase(self.owned, [self])
        self.held = self.held[: self.owned_from]
        self.cache.unlock(self.node)
        self.cache.listener.ended(self.receipt.message_id, count)
        self.on_end(self)

    def _drop_states(self) -> None:
        """Give back the states that the tree hasn't got."""
        if self.publishable:
            self.cache.release_states(self.states.values())
        else:
            self.cache.erase_states(list(self.states.values()))
        self.states = {}

    def draws_on(self, struck: Struck) -> bool:
        """Return True if KV of this request may have read content that a forget struck."""
        return self.cache.ledger.read_by(
            struck, self._scope, self.lineage, self.carried, len(self.prompt)
        )

    def withhold(self, ticket: str) -> None:
        """Publish nothing that this request computes, and overwrite it; see :attr:`publishable`."""
        self.publishable = False
        # Slots that others sent as well stay in the cache: the session offers them no more.
        self._withdraw()
        self.cache.await_erase(ticket, self, len(self.owned))
        self.receipt = msgspec.structs.replace(self.receipt, turn="")
