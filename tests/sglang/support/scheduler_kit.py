"""A scheduler without a model: SGLang's own tree, pools, requests and admission, and a stand-in
for the forward that writes down what each token's KV has read.

A pool row holds three numbers in its position-free part: the token, a digest of all tokens that
were before it when it was computed, and a nonce of that computation. So a test can ask of every
position of a request whose KV it is, and whether that KV remembers anything but the request's own
visible history. The rotary part is a fixed vector turned to the row's position. In eight bits,
it is rounded where it is computed, and once more after all splices.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from census_kit import Seen, check_census
from pool_kit import FP8, roundings, turned
from sglang.srt.managers.schedule_batch import FINISH_ABORT, NextBatchPlan, Req
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from leyline_engine.claims.limits import Limits
from leyline_engine.contract import (
    Capability,
    EditPayload,
    Recompute,
    ReusePayload,
    TurnRecord,
    edit_envelope,
    token_array,
    token_digest,
)
from leyline_engine.records.publications import Space
from leyline_engine.rows.pool import SplicePool
from leyline_engine.sglang import plugin
from leyline_engine.sglang.adder import LeylinePrefillAdder
from leyline_engine.sglang.engine import SchedulerEngine
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.ranks import Replica
from leyline_engine.sglang.rows.layouts import read_pool
from leyline_engine.sglang.stage_row import StageRow
from leyline_lab.engine_cost.scheduler.store import (
    LAYERS,
    ROTARY,
    Batch,
    Receipts,
    Store,
    rotary_facts,
)

SALT = b"salt of the test"
"""Of the names of lineages."""
VOCABULARY = 500
SECRETS = 1000
"""Tokens from here on are secrets, each a text of its own."""
_LONGEST = 4096
_CENSUS_EVERY = 8
"""Forwards between two looks at every slot, which take as long as a few."""
_HISTORY = 1 << 20
"""Digests of histories stay below this, so that fp32 holds them exactly."""
CAPABILITY = Capability(
    engine="sglang",
    engine_version="test",
    model="none",
    model_fingerprint="none",
    architecture="none",
    vocab_size=VOCABULARY,
    max_context=4096,
    splices=True,
)


def histories(tokens: Sequence[int]) -> list[int]:
    """For each position, a digest of the tokens before it."""
    found, state = [], 7
    for token in tokens:
        found.append(state)
        state = (state * 31 + token + 1) % _HISTORY
    return found


@dataclass(eq=False)
class Running:
    """A request that was admitted."""

    req: Req
    decoded: int = 0
    tokens_to_decode: int = 0


class Scheduler(Store):
    """One pool, one tree, and requests that run on command.

    Args:
        capacity: slots of the pool.
        chunk: prefill tokens per round; None for as many as fit.
        core: tree core, ``rust`` or ``python``.
        events: whether the tree publishes KV events.
        min_copy: shorter copies are prefilled.
        stage_cost: tokens that one more forward is worth.
        limits: how much may be claimed.
        replica: which of several it is.
        recompute: tokens after edits that aren't copied.
        page: tokens per page; as in SGLang, the pool has whole pages only.
        dtype: of the pool: fp32, or FP8, where a row's numbers are four bytes each.
        origins: as-computed keys that are kept beside the pool.
        eagle: whether the tree's keys are pairs of tokens.
        tree: makes the tree.
        overlap: whether a forward's result is processed after the next one is launched.
    """

    def __init__(
        self,
        capacity: int = 2000,
        *,
        chunk: int | None = None,
        core: str | None = None,
        events: bool = False,
        min_copy: int = 1,
        stage_cost: int = 0,
        splices: bool = True,
        rows: int = 16,
        limits: Limits | None = None,
        replica: Replica = Replica(),  # noqa: B008 - immutable
        recompute: Recompute = Recompute(),  # noqa: B008 - immutable
        page: int = 1,
        dtype: torch.dtype = torch.float32,
        origins: int | None = None,
        eagle: bool = False,
        tree: Callable[[Any], LeylineRadixCache] = LeylineRadixCache,
        overlap: bool = False,
    ) -> None:
        super().__init__(
            tree,
            capacity,
            _LONGEST,
            page=page,
            dtype=dtype,
            rows=rows,
            tree_core_backend=core,
            enable_kv_cache_events=events,
            is_eagle=eagle,
        )
        self.tree_cache = self.cache  # as SGLang's own scheduler calls it
        self.chunk = chunk
        self.sender = Receipts()
        self.seen = Seen()
        self.rotary = rotary = rotary_facts()
        tensors = read_pool(self.pool).turning(self.latent, ROTARY)
        self.splicing = SplicePool(tensors, rotary, origins=origins) if splices else None
        self._attach_host()
        self.engine = SchedulerEngine(
            self.cache,
            self.splicing,
            CAPABILITY,
            self.sender,
            self.seen,
            secret=None,
            salt=SALT,
            min_copy=min_copy,
            stage_cost=stage_cost,
            recompute=recompute,
            limits=limits,
            replica=replica,
        )
        places = torch.arange(_LONGEST)
        ones = torch.ones(_LONGEST, 1, ROTARY)
        self.keys = rotary.rotate(ones, torch.zeros_like(places), places)[:, 0]
        """fp32 ``[positions, ROTARY]``: the rotary key of any token, by its position."""
        self.waiting: list[Req] = []
        self.running: list[Running] = []
        self.chunked: Req | None = None
        self.overlap = overlap
        self.launched: list[Req] = []
        """Requests of a prefill whose result wasn't processed."""
        self.forwards = 0
        self.margin = 5.0
        """The margin of each prompt's first token."""
        self._wanted: dict[str, int] = {}
        self.has_read: dict[int, frozenset[int]] = {0: frozenset()}
        """Secrets that each computation's KV has read, by nonce."""
        self.homes: dict[int, int] = {0: 0}
        """The position of each computation, by nonce."""
        self._nonce = itertools.count(1)
        self._names = itertools.count(1)

    def _attach_host(self) -> None:
        """A pool in the host's memory; see :mod:`hosted_scheduler`."""

    # The interface of a client.

    def submit(
        self,
        prompt: Sequence[int],
        payload: EditPayload | None = None,
        *,
        decode: int = 2,
        message_id: str | None = None,
        answers: int = 1,
        hints: object = None,
        reuse: ReusePayload | None = None,
        space: Space = Space(),  # noqa: B008 - immutable
    ) -> Req:
        """Queue a request.

        Args:
            answers: how many the client wants; this is the request for one of them.
            hints: an envelope as it comes, instead of one around ``payload``.
            space: the request's namespace of the cache.
        """
        number = next(self._names)
        custom: dict[str, Any] | None = None
        if payload is not None:
            hints = edit_envelope(message_id or f"m{number}", payload, reuse=reuse)
        if hints is not None:
            custom = {"kv_hints": msgspec.json.encode(hints).decode()}
        parameters = SamplingParams(
            max_new_tokens=decode, ignore_eos=True, custom_params=custom, n=answers
        )
        parameters.normalize(None)
        req = Req(f"r{number:05d}", "", token_array(prompt), parameters, vocab_size=VOCABULARY)
        req.extra_key, req.cache_salt = space
        self._wanted[req.rid] = decode
        self.engine.receive(req)
        self.queue(req)
        return req

    def queue(self, req: Req, *, first: bool = False) -> None:
        """Let a request wait."""
        self.waiting.insert(0 if first else len(self.waiting), req)

    def serve(
        self,
        prompt: Sequence[int],
        payload: EditPayload | None = None,
        *,
        decode: int = 2,
        reuse: ReusePayload | None = None,
        space: Space = Space(),  # noqa: B008 - immutable
    ) -> tuple[Req, TurnRecord | None]:
        """Run one request to its end, alone."""
        name = f"only{next(self._names)}"
        req = self.submit(prompt, payload, decode=decode, message_id=name, reuse=reuse, space=space)
        turn = self.engine.turn_of(req)
        self.drain()
        return req, None if turn is None else self.sender.records.get(turn.message_id)

    def drain(self, rounds: int = 400) -> None:
        """Run until nothing is left to do."""
        for _ in range(rounds):
            if self.waiting or self.running or self.chunked or self.launched:
                self.step()
            elif not self.engine.chores.step():
                return
        raise AssertionError("a request is stuck")

    def abort(self, req: Req) -> None:
        """A client went away."""
        if req in self.waiting:
            self.waiting.remove(req)
            self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
            return
        if req is self.chunked:
            self.chunked = None
            req.finished_reason = FINISH_ABORT("gone")
            self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
            release_kv_cache(req, self.cache, checkpoint=False)
            return
        if req in self.launched or any(running.req is req for running in self.running):
            req.to_finish = FINISH_ABORT("gone")

    def retract(self, running: Running) -> None:
        """Memory ran out in decoding: a request goes back to the queue."""
        self.running.remove(running)
        release_kv_cache(running.req, self.cache, checkpoint=False)
        running.req.reset_for_retract()
        self.queue(running.req, first=True)

    def flush(self) -> None:
        """Flush as ``/flush_cache`` does, when nothing runs."""
        assert not (self.waiting or self.running or self.chunked or self.launched)
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()

    # A round.

    def step(self) -> None:
        """Admit and prefill what can be; else decode."""
        batch = plugin._next_batch(type(self)._choose, self).batch_to_run
        before, self.launched = self.launched, []
        if batch is not None:
            self._prefill(batch)
            if self.overlap:
                self.launched = batch.reqs
            else:
                self._process(batch.reqs)
        if before:
            self._process(before)
        elif batch is None:
            self._decode()
        self.check()

    def _choose(self) -> NextBatchPlan:
        reqs = self._admit()
        batch = SimpleNamespace(reqs=reqs, forward_mode=ForwardMode.EXTEND) if reqs else None
        return NextBatchPlan(batch_to_run=batch, running_batch=None)

    def _admit(self) -> list[Req]:
        adder = LeylinePrefillAdder(
            self.page,
            self.cache,
            self.allocator,
            Batch([running.req for running in self.running]),
            1.0,
            1 << 20,
            self.chunk,
        )
        if self.chunked is not None:
            if self.overlap:
                checkpoint_kv_cache(self.chunked, self.cache)
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for req in self.waiting:
            if len(adder.can_run_list) + len(self.running) >= self.rows.available_size():
                break
            req.init_next_round_input(self.cache)
            result = adder.add_one_req(req, self.chunked is not None, None)
            if result.name != "CONTINUE":
                self._passed_over(req, adder)
                break
        self.waiting = [req for req in self.waiting if req not in adder.can_run_list]
        if adder.new_chunked_req is not None:
            self.chunked = adder.new_chunked_req
        if self.chunked is not None:
            self.chunked.inflight_middle_chunks += 1
        return list(adder.can_run_list)

    def _passed_over(self, req: Req, adder: LeylinePrefillAdder) -> None:
        """A waiting request was not admitted; see :mod:`state_scheduler`."""

    def _prefill(self, batch: SimpleNamespace) -> None:
        self.forwards += 1
        self._prefill_slots(batch.reqs)
        for req in batch.reqs:
            self._compute(req, req.prefix_len, req.extend_end)
        output = SimpleNamespace(next_token_logits=self._logits(batch.reqs))
        plugin._capture_logits(lambda *_: None, batch, None, output)
        output.next_token_logits.zero_()  # as sampling overwrites them

    def _process(self, reqs: list[Req]) -> None:
        batch = SimpleNamespace(reqs=reqs, forward_mode=ForwardMode.EXTEND)
        plugin._process_result(lambda *_: self._processed(reqs), self, batch, None)

    def _logits(self, batch: list[Req]) -> torch.Tensor:
        """Logits of two tokens; those of a chunk that isn't the last have no margin."""
        ends = [req.extend_end == len(req.origin_input_ids) for req in batch]
        return torch.tensor([[self.margin if end else 0.0, 0.0] for end in ends])

    def _processed(self, batch: list[Req]) -> None:
        for req in batch:
            self._prefilled(req)

    def _prefill_slots(self, batch: list[Req]) -> None:
        for req in batch:
            req.is_retracted = False
            if not req.kv.holds_kv:
                self.begin(req)
        for req in batch:
            self.take(req, req.prefix_len, req.extend_end)

    def _prefilled(self, req: Req) -> None:
        if req.finished():  # between two chunks, after the next one was launched
            return
        if req.inflight_middle_chunks > 0:
            req.inflight_middle_chunks -= 1
            if not self.overlap:
                checkpoint_kv_cache(req, self.cache)
            return
        if req is self.chunked:
            self.chunked = None
        self._sample(req)
        if req.finished():
            release_kv_cache(req, self.cache, checkpoint=True)
        else:
            checkpoint_kv_cache(req, self.cache)
            self.running.append(Running(req, 1, self._wanted[req.rid]))

    def _decode(self) -> None:
        if self.running:
            self.forwards += 1
        for running in tuple(self.running):
            req = running.req
            position = req.kv.kv_committed_len
            if self._room() < self.page and position % self.page == 0:
                self.retract(running)
                continue
            self.take(req, position, position + 1)
            self._compute(req, position, position + 1)
            self._sample(req)
            if req.finished():
                release_kv_cache(req, self.cache, checkpoint=True)
                self.running.remove(running)

    def _room(self) -> int:
        """Slots that a decode may take."""
        return int(self.allocator.available_size() + self.cache.evictable_size())

    def _sample(self, req: Req) -> None:
        """Choose the next token, which depends on what the KV of the sequence remembers."""
        if not isinstance(req, StageRow):
            assert self.rows_of(req)[-1][0] >= 0
        req.output_ids.append(int(sum(self._remembered(req)) % VOCABULARY))
        req.update_finish_state()

    def _remembered(self, req: Req) -> list[int]:
        return [history for _, history, _ in self.rows_of(req)[-8:]]

    # The stand-in for a forward, and its rows in the pool.

    def _compute(self, req: Req, start: int, end: int) -> None:
        tokens = (req.origin_input_ids + req.output_ids)[:end]
        state = 7
        secrets: frozenset[int] = frozenset()
        for position, (token, history, nonce) in enumerate(self.rows_of(req)[:start]):
            assert token == tokens[position], f"KV of another token at {position}"
            state = (history * 31 + token + 1) % _HISTORY
            secrets |= self.has_read[nonce]
        rows = []
        for position in range(start, end):
            nonce = next(self._nonce)
            if tokens[position] >= SECRETS:
                secrets |= {tokens[position]}
            self.has_read[nonce] = secrets
            self.homes[nonce] = position
            rows.append([tokens[position], state, nonce, 0])
            state = (state * 31 + tokens[position] + 1) % _HISTORY
        slots = self.slots_of(req)[start:end].long()
        parts = torch.tensor(rows, dtype=torch.float32), self.keys[start:end].to(self.pool.dtype)
        stored = self.pool.store_dtype
        written = torch.cat([part.view(stored) for part in parts], dim=-1)
        for layer in range(LAYERS):
            self.pool.kv_buffer[layer][slots, 0] = written

    def slots_of(self, req: Req) -> torch.Tensor:
        """Slots of a request's tokens, in position order."""
        return self.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]

    def rows_of(self, req: Req) -> list[tuple[int, int, int]]:
        """(token, history, nonce) of each position of a request."""
        return self.read(self.slots_of(req))

    def read(self, slots: torch.Tensor) -> list[tuple[int, int, int]]:
        """(token, history, nonce) of each slot."""
        latents = self.pool.kv_buffer[0][slots.long(), 0, : self.latent].contiguous()
        rows = latents.view(torch.float32)[:, :3].long()
        return [(int(t), int(h), int(n)) for t, h, n in rows]

    def remembered(self, slots: torch.Tensor | None = None) -> frozenset[int]:
        """Every secret that the KV in ``slots`` has read; by default in all that is cached."""
        where = self.cache.all_values_flatten() if slots is None else slots
        found: set[int] = set()
        for _, _, nonce in self.read(where):
            found |= self.has_read[nonce]
        return frozenset(found)

    def everywhere(self) -> frozenset[int]:
        """Every secret that any slot has read, free ones included."""
        # The first page is SGLang's padding.
        return self.remembered(torch.arange(self.page, self.capacity + self.page))

    # What must always hold.

    def check(self) -> None:
        """Check that every slot is accounted for once, and every key is where it should be."""
        private = self.private()
        total = (
            self.cache.row_allocator.available_size()
            + self.cache.full_evictable_size()
            + self.cache.full_protected_size()
            + private
        )
        assert total == self.capacity, f"{total} of {self.capacity} slots accounted for"
        if self.forwards % _CENSUS_EVERY == 0:
            check_census(self, self.seen, private)
        for req in self.holders():
            self.check_rows(req)

    def holders(self) -> list[Req]:
        """Requests that hold KV."""
        own = [running.req for running in self.running]
        own += [req for req in self.launched if req is not self.chunked and req.kv.holds_kv]
        if self.chunked is not None and self.chunked.kv.holds_kv:
            own.append(self.chunked)
        return own

    def private(self) -> int:
        """Slots of pages that requests hold and the tree doesn't have."""
        return sum(
            self.cache.in_pages(req.kv.kv_allocated_len) - req.kv.cache_protected_len
            for req in self.holders()
        )

    def check_rows(self, req: Req) -> None:
        """A request's KV is that of its tokens, at their positions, and remembers only its own
        history unless it runs under a lineage."""
        tokens = (req.origin_input_ids + req.output_ids)[: req.kv.kv_committed_len]
        turn = self.engine.turn_of(req)
        exact = len(tokens)
        if turn is not None and turn.lineage:
            exact = turn.lineage[0].start
        rows = self.rows_of(req)[: len(tokens)]
        assert [token for token, _, _ in rows] == list(tokens)
        assert [h for _, h, _ in rows[:exact]] == histories(tokens)[:exact], "foreign memory"
        slots = self.slots_of(req)[: len(tokens)].long()
        places = torch.arange(len(tokens))
        assert torch.equal(slots % self.page, places % self.page), "a page isn't whole"
        homes = torch.tensor([self.homes[nonce] for _, _, nonce in rows], dtype=torch.int64)
        for layer in range(LAYERS):
            keys = self.pool.kv_buffer[layer][slots, :, self.latent :]
            assert self._stand(keys, homes, places), "a key stands where it doesn't belong"

    def _stand(self, keys: torch.Tensor, homes: torch.Tensor, places: torch.Tensor) -> bool:
        """Return True if keys are what was computed at ``homes``, turned once to ``places``."""
        if self.pool.dtype != FP8:
            return torch.allclose(keys[:, 0], self.keys[places], atol=1e-4)
        computed = self.keys[homes, None].to(FP8).view(torch.uint8)
        return roundings(keys, turned(computed, self.rotary, homes, places)) <= 1.0001

    def check_idle(self) -> None:
        """Nothing is locked or waits when nothing runs."""
        assert self.cache.protected_size() == 0
        assert not self.cache.condemned
        self.check()


def text(length: int, seed: int) -> list[int]:
    """Random tokens."""
    rng = Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def source_of(req: Req) -> array[int]:
    """All tokens of a finished turn."""
    return req.origin_input_ids + req.output_ids_through_stop


def sealed(req: Req) -> str:
    """The digest by which a payload names a finished turn."""
    return token_digest(source_of(req))
