"""Pool, radix tree and retained turns as one thing: allocation, publication, forgetting.

Conservation, checked when idle and after every test::

    free + cached (tree) + doomed (detached, still held) + in flight = capacity
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from leyline_engine.admit.anchors import StateTerms
from leyline_engine.admit.plan import page_floor
from leyline_engine.contract import ForgetCounts
from leyline_engine.metrics import EngineMetrics
from leyline_engine.occupancy import Cached, PoolLevels
from leyline_engine.proof.witness import ForgetWitness
from leyline_engine.records.ledger import (
    Carried,
    SpanKey,
    SpanLedger,
    Struck,
)
from leyline_engine.records.lineage import exact_length, first_under, lineage_bits
from leyline_engine.records.pending import PendingForgets
from leyline_engine.records.sources import SessionKey, SourceRegistry
from leyline_engine.reuse.index import ReuseIndex
from leyline_replay.cache.anchors import AnchorStore
from leyline_replay.cache.integrity import (
    check_anchors,
    check_locks,
    check_nodes,
    check_slots,
)
from leyline_replay.cache.listener import CacheListener
from leyline_replay.cache.radix import (
    EMPTY_SLOTS,
    Match,
    Node,
    RadixTree,
    slots_of,
    subtree,
)
from leyline_replay.cache.slots import (
    PoolExhaustedError,
    PoolStats,
    SlotAllocator,
    Slots,
)

if TYPE_CHECKING:  # tensors are needed only where there is KV
    from leyline_replay.cache.pool import KVPool

log = logging.getLogger(__name__)

_EVICTION_BATCH = 64


class CacheManager:
    """The owner of every slot that no running request owns.

    With pages of several tokens, the tree holds whole pages only, as in an engine that allocates
    those; here slots are still allocated one by one.
    """

    def __init__(
        self,
        pool: KVPool,
        capacity: int,
        registry: SourceRegistry,
        ledger: SpanLedger,
        metrics: EngineMetrics,
        *,
        page_tokens: int = 1,
        anchors: Callable[[RadixTree], AnchorStore] = lambda tree: AnchorStore(tree, None),
    ) -> None:
        self._metrics = metrics
        self.page_tokens = page_tokens
        self.pool = pool
        self.registry = registry
        self.ledger = ledger
        self.tree = RadixTree(page_tokens)
        self.anchors = anchors(self.tree)
        self.listener = CacheListener()
        self.witness = ForgetWitness()
        self.reuse: ReuseIndex | None = None
        """The index of content; learns which slots leave the tree."""
        self.peak_used = 0
        self._allocator = SlotAllocator(capacity)
        self.free_slots = self._allocator.free_slots
        self._unerased = EMPTY_SLOTS
        self._forgets = PendingForgets()

    @property
    def capacity(self) -> int:
        return self._allocator.capacity

    @property
    def free_count(self) -> int:
        """Number of free slots."""
        return self._allocator.free_count

    def match(self, keys: array[int], limit: int | None = None) -> Match:
        return self.tree.match(keys, limit)

    def peek(self, keys: array[int], limit: int | None = None) -> Slots:
        """Return the slots from which ``keys[:limit]`` can be continued; nothing is touched."""
        return self.tree.peek(keys, limit)[: self.native(keys, limit)]

    def native(self, keys: array[int], limit: int | None = None) -> int:
        """Return the last anchor of the cached part of ``keys[:limit]``."""
        end = len(keys) if limit is None else limit
        return self.anchors.of(keys, limit).last(end, step=self.page_tokens)

    def terms(self, sources: Sequence[array[int]], rows: int) -> StateTerms | None:
        """Return the terms of a plan; None if the model keeps nothing but rows.

        Args:
            sources: keys of each source.
            rows: cached tokens of the prompt.
        """
        anchors = self.anchors
        if not anchors.needed:
            return None
        return StateTerms(
            tuple(map(anchors.of, sources)), rows, window=anchors.window, grid=anchors.grid
        )

    def lock(self, node: Node) -> None:
        self.tree.lock(node)

    def unlock(self, node: Node) -> None:
        """Undo one lock; doomed slots that are free now are overwritten."""
        released = self.tree.unlock(node)
        self.erase(slots_of(released), released)

    def allocate(self, count: int, request: str = "") -> Slots:
        """Allocate slots for a running request; evicts the lowest rank and least recent use first.

        Args:
            request: its name, for the listener.

        Raises:
            PoolExhaustedError: nothing was taken.
        """
        missing = count - self.free_count
        if 0 < missing <= self.tree.evictable_count():
            gone = self.tree.evict_nodes(max(missing, _EVICTION_BATCH))
            self._unindex(freed := slots_of(gone))
            self.anchors.evicted(gone)
            self.release(freed)
            self._metrics.evicted(len(freed))
            self.listener.evicted(request, gone)
        slots = self._allocator.allocate(count)
        if slots is None:
            raise PoolExhaustedError(f"{count} slots wanted, {self.free_count} free")
        self.peak_used = max(self.peak_used, self.capacity - self.free_count)
        self.listener.allocated(request, count)
        return slots

    def _unindex(self, slots: Slots) -> None:
        if self.reuse is not None:
            self.reuse.freed(slots)

    def copy(self, source: Slots, target: Slots, start: int) -> None:
        """Splice slots' KV into others; see :meth:`KVPool.copy`."""
        self.pool.copy(source, target, start)
        self._metrics.copied(len(source) * self.pool.layout.bytes_per_token)

    def release(self, slots: Slots) -> None:
        """Take back slots; what they hold stays in them until it is overwritten."""
        self._allocator.release(slots)
        self.pool.leave(slots)

    def erase(self, slots: Slots, holders: Iterable[Hashable] = ()) -> None:
        """Take back slots whose content must not outlive them: overwrite, then free them.

        Slots that can't be overwritten stay out of use, and are tried again the next time.

        Args:
            holders: holders of the slots, see :meth:`await_erase`.
        """
        self._forgets.let_go(holders)
        if (error := self._erase(slots)) is not None:
            log.error("slots could not be overwritten: %s; they stay out of use", error)

    def ending(
        self,
        holder: Hashable,
        slots: Slots,
        keys: array[int],
        start: int,
        states: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Note that a holder is about to erase the slots of its ``keys[start:]``, and of states."""
        tickets = self._forgets.tickets(holder)
        self.witness.overwriting(tickets, slots, keys, start)
        for position, slot in states.items():
            number = np.array([self.capacity + slot], dtype=np.int64)
            self.witness.overwriting(tickets, number, keys[:position], position - 1)

    def _erase(self, slots: Slots) -> Exception | None:
        self._unerased = np.concatenate([self._unerased, slots])
        if len(self._unerased):
            try:
                self.pool.erase(self._unerased)
            except Exception as error:
                return error
            self.witness.overwritten(self._unerased)
            self._allocator.release(self._unerased)
            self._unerased = EMPTY_SLOTS
        self._forgets.settle()
        return None

    def await_erase(self, ticket: str, holder: Hashable, count: int) -> None:
        """Let a forget wait for ``count`` slots that ``holder`` will give back to :meth:`erase`."""
        self._forgets.wait(ticket, holder, count)

    def settled_forgets(self) -> dict[str, ForgetCounts]:
        """Return forgets of which more was overwritten since the last call, by ticket."""
        return self._forgets.take()

    def publish(
        self,
        keys: array[int],
        held: Slots,
        owned_from: int,
        node: Node,
        session: SessionKey | None,
        *,
        request: str = "",
        states: Mapping[int, int] = MappingProxyType({}),
    ) -> Match:
        """Hand a request's slots to the tree and move its lock along.

        ::

            keys   0 ───── tree's own ───── owned_from ───── request's ───── n
            insert 0 ───── already there ─────── dup ─┘──── becomes tree's ──┘

        Args:
            keys: keys of the whole sequence.
            held: one slot per key; those from ``owned_from`` on belong to the request.
            node: the node that the request holds locked.
            session: the request's session; None if no session claims it.
            request: its name, for the listener.
            states: slots of the request's states, by position; the tree takes them over, too.

        Returns:
            The sequence as the tree has it now, locked in place of ``node``. A partial page at its
            end isn't there: its slots stay the request's.
        """
        present, match = self.tree.insert(keys, held, session)
        self.tree.lock(match.node)
        spare = held[owned_from:present]
        self._revive(spare, match.slots[owned_from:present], owned_from)
        self.anchors.publish(keys, states)
        self.anchors.drop_windows()
        self.release(spare)
        self.unlock(node)
        self.listener.published(request, match.slots, len(spare))
        return match

    def _revive(self, computed: Slots, cached: Slots, start: int) -> None:
        """Give cached rows that windowed layers had dropped those of a request, which had to
        compute them again."""
        if not self.anchors.window:
            return
        alive = self.pool.alive
        for at in np.flatnonzero(alive[computed] & ~alive[cached]).tolist():
            self.pool.copy(computed[at : at + 1], cached[at : at + 1], start + at)

    def forget(
        self,
        session: SessionKey,
        spans: frozenset[SpanKey] | None,
        *,
        spared: Sequence[array[int]],
        ticket: str,
        before: ForgetCounts | None = None,
        struck: Callable[[Struck], None] = lambda _: None,
    ) -> ForgetCounts:
        """Erase what a session published that may have read ``spans``.

        That is all but the paths of ``spared`` keys and of turns that are known to have read none
        of them. Tokens that other sessions sent as well stay theirs, but no spliced KV that read
        the spans does: a session that continues such a lineage never sent what it remembers.

        Args:
            spans: spans to forget; None for all KV of the session.
            spared: keys that the session's new prompt may continue.
            ticket: names the forget in :meth:`settled_forgets`.
            before: reach of an earlier forget of this ticket.
            struck: called with what no KV can be found of any more, before slots are counted.

        Raises:
            Exception: the pool's own, if slots can't be overwritten; they are out of use then.
        """
        scope = session[0]
        turns = self.registry.turns(session)
        whole = spans is None
        if spans is not None:
            clean = [t for t in turns if self.ledger.first_reader(t, spans) == len(t.tokens)]
        else:
            spans, clean = self.ledger.hidden_spans(session), []
        kept: set[Node] = set()
        for keys in (*spared, *(turn.keys() for turn in clean)):
            kept.update(self.tree.path(self.tree.match(keys).node))
        lineages = self.ledger.lineages_reading(scope, spans)
        condemned = self._under_lineages(
            {lineage_bits(name, owner): at for (owner, name), at in lineages.items()}
        )
        shared = self._condemn_published(session, kept, condemned)
        released, held = self._remove(condemned, "forgotten")
        for node in held:
            self._forgets.wait(ticket, node, len(node.slots))
        slots = slots_of(released)
        states = self.anchors.pick(released + held)
        for failure in (self._erase(slots), self.erase_states(states)):
            if failure is not None:
                raise failure
        # Slots that were evicted, given up or computed twice may have read the spans, too.
        self.scrub()
        for turn in turns:
            if turn not in clean:
                self.registry.drop(session, turn.turn)
        self.ledger.strike(scope, spans, session if whole else None)
        struck(Struck(session, spans, lineages, whole))
        earlier = before or ForgetCounts()
        return self._forgets.open(
            ticket, len(slots) + earlier.overwritten, shared + earlier.shared_retained, session
        )

    def scrub(self) -> None:
        """Overwrite all that slots hold though nobody needs it."""
        self.pool.erase(self.pool.left())
        if self.anchors.states is not None:
            self.anchors.states.scrub()

    def release_states(self, slots: Iterable[int]) -> None:
        """Take back slots of states; what they hold stays in them until it is overwritten."""
        if self.anchors.states is not None and (released := list(slots)):
            self.anchors.states.release(released)

    def erase_states(self, slots: Sequence[int]) -> Exception | None:
        """Take back slots of states that must not outlive them; see :meth:`erase`."""
        states = self.anchors.states
        error = states.erase(slots) if states is not None else None
        if error is None:
            self.witness.overwritten(self.capacity + np.array(slots, dtype=np.int64))
        else:
            log.error("states could not be overwritten: %s; they stay out of use", error)
        return error

    def pending_of(self, session: SessionKey) -> int:
        """Return the slots of a session's forgets that running requests still hold."""
        return self._forgets.of(session)

    def _under_lineages(self, tainted: Mapping[int, int]) -> list[Node]:
        """Return the tops of KV cached under lineages, whatever its publisher.

        Args:
            tainted: by :func:`.lineage_bits`, the first position concerned.
        """
        tops: list[Node] = []
        stack = [(child, 0) for child in self.tree.root.children.values()] if tainted else []
        while stack:
            node, start = stack.pop()
            at = first_under(node.keys, start, tainted)
            if at == len(node.keys):
                stack.extend((child, start + at) for child in node.children.values())
                continue
            _, top = self.tree.split(node, at)
            if top is not None:
                tops.append(top)
        return tops

    def _condemn_published(
        self, session: SessionKey, kept: set[Node], condemned: list[Node]
    ) -> int:
        """Add the tops of a session's published KV, except ``kept``.

        Returns:
            Number of slots that stay because other sessions sent the same.
        """
        reached = {node for top in condemned for node in subtree(top)}
        shared = 0
        for node in list(self.tree.nodes()):
            if session not in node.owners or node in kept or node in reached:
                continue
            top: Node | None = node
            if len(node.owners) > 1:
                exact, top = self.tree.split(node, exact_length(node.keys))
                if exact is not None:
                    exact.owners.discard(session)
                    shared += len(exact.slots)
            if top is not None:
                condemned.append(top)
                reached.update(subtree(top))
        return shared

    def _remove(self, tops: Sequence[Node], cause: str) -> tuple[list[Node], list[Node]]:
        """Make subtrees unmatchable, whoever wants to keep them; see :meth:`RadixTree.detach`."""
        released: list[Node] = []
        held: list[Node] = []
        if tops:
            # First, so that nothing but running requests holds any of it.
            nodes = dict.fromkeys(node for top in tops for node in subtree(top))
            lost = slots_of(list(nodes))
            self._unindex(lost)
            self.listener.losing(lost, cause)
        for top in tops:
            free, locked = self.tree.detach(top)
            released += free
            held += locked
        return released, held

    def lose(self, keys: array[int], start: int, cause: str) -> None:
        """Give up the cached part of a path after its first ``start`` keys, and all below it."""
        start = page_floor(start, self.page_tokens)
        if len(self.tree.peek(keys)) <= start:
            return
        top = self.tree.cut(keys[:start]).children[self.tree.name(keys, start)]
        self._lose([top], cause)

    def _lose(self, tops: Sequence[Node], cause: str) -> None:
        released, held = self._remove(tops, cause)
        self.erase_states(self.anchors.pick(released + held))
        self.erase(slots_of(released))

    def enter(self, scope: str, carried: Carried) -> None:
        """Note in the ledger the spans that a splice carries, before its KV can be matched."""
        dropped = self.ledger.enter(scope, carried)
        if dropped:
            # Nobody could say any more what this KV has read.
            bits = {lineage_bits(lineage, owner): 0 for owner, lineage in dropped}
            tops = self._under_lineages(bits)
            self._lose(tops, "lineage_dropped")

    def flush(self) -> None:
        """Drop every cached sequence and retained turn that no running request holds."""
        self.registry.clear()
        if self.reuse is not None:
            self.reuse.clear()
        self.listener.flushing()
        gone = self.tree.evict_nodes(self.capacity)
        self.anchors.evicted(gone)
        self.release(slots_of(gone))
        self.listener.flushed()

    def levels(self, claimed: Cached) -> PoolLevels:
        """Return slots by owner, given what claims hold in the tree."""
        cached = Cached(self.tree.exact, self.tree.spliced)
        states = self.anchors.states
        free = states.free_count if states is not None else 0
        return PoolLevels(
            self.capacity,
            self.free_count,
            cached,
            claimed,
            self.peak_used,
            states=states.capacity - free if states is not None else 0,
            free_states=free,
        )

    def stats(self, in_flight: int) -> PoolStats:
        doomed = sum(len(node.slots) for node in self.tree.doomed()) + len(self._unerased)
        free, cached = self._allocator.free_count, self.tree.cached_count()
        return PoolStats(self.capacity, free, cached, doomed, in_flight)

    def check_integrity(
        self, in_flight: Iterable[Slots], held: Iterable[Node], states: Sequence[int] = ()
    ) -> None:
        """Check conservation, single ownership, node shape and lock counts.

        Args:
            in_flight: slots owned by each running request.
            held: the node that each running request has locked.
            states: state slots owned by running requests.

        Raises:
            IntegrityError: says what doesn't add up.
        """
        self.anchors.check(states)
        cached = [node.slots for node in self.tree.nodes()]
        doomed = [node.slots for node in self.tree.doomed()]
        free = self._allocator.free_slots()
        check_slots([free, self._unerased, *in_flight, *cached, *doomed], self.capacity)
        check_nodes(self.tree)
        check_locks(self.tree, held)
        if self.reuse is not None:
            check_anchors(self.reuse.anchors(), cached)
