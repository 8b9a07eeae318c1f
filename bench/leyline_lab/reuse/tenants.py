"""The content that tenants of a group share, and that tenants without one don't.

Documents are asked for by a Zipf law: the first is by far the most popular, with every tenant. A
prompt is a header of the tenant's own, three documents in any order, and a question. Each workload
is served twice on the replay engine: by empty caches (cold), then again with other questions by
the caches that the first round left (warm).

"shareable" are tokens in runs of 64 or more that only other tenants have cached as the request
arrives, and "shared" is the share of them that isn't prefilled. "foreign" are read
or copied slots that another tenant wrote.

Requests of several tenants run at once, a step of each in turn, with a record of who computed each
slot. Shareable tokens are counted independently of the engine's index.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from leyline_engine.contract import (
    ATTENTION_SINK,
    EditPayload,
    ReuseMode,
    ReusePayload,
)
from leyline_engine.records.lineage import MAX_TOKEN
from leyline_replay.cache.listener import CacheListener
from leyline_replay.cache.radix import Node, RadixTree
from leyline_replay.cache.slots import Slots
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.models.loader import LoadedModel, load_model
from leyline_replay.sequence import Sequence as Running

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.report import progress, show
from ..tables import share
from ..traces.texts import demo_material
from .verbatim_runs import MIN_RUN, Mask, Windows

DOCUMENTS = 24
CHARACTERS = 700
"""Length of a document."""
PER_PROMPT = 3
EXPONENT = 1.1
NAMES = ("Ash", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Ginkgo", "Hazel")
ROUNDS = ("cold", "warm")
_SPARE = 4096
_COLUMNS = ("tenants", "at once", "caches", "group", "prompt", "own", "taken")
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class TenantRequest:
    """A prompt in tokens, and the tenant and session that send it."""

    tenant: int
    session: str
    tokens: array[int]


@dataclass(frozen=True, slots=True)
class TenantSample:
    """The tokens of one request, by the origin of their KV."""

    prompt: int
    prefix: int
    own: int
    """Reused from the tenant's own sessions."""
    group: int
    """Reused from other tenants."""
    shareable: int
    """In runs that only other tenants' live sequences have."""
    shared: int
    """Those of them that aren't prefilled."""
    foreign_slots: int
    """Slots of other tenants that it read or copied, by the record of who wrote them."""


class _SlotRecord(CacheListener):
    """Notes which tenant wrote each slot, and counts what tenants read of others' slots."""

    def __init__(self, engine: ReplayEngine) -> None:
        self.writer = np.full(engine.cache.capacity, _NOBODY)
        self.tenant = _NOBODY
        """Tenant on whose behalf the engine works now."""
        self.foreign = 0
        """Number of others' slots that were read since the last reset."""
        self._pool = pool = engine.cache.pool
        self._write, self._copy = pool.write, pool.copy
        pool.write, pool.copy = self.write, self.copy  # type: ignore[method-assign]
        engine.cache.listener = self

    def write(
        self, slots: Slots, start: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Note who wrote slots."""
        self._write(slots, start, layers)
        self.writer[slots] = self.tenant

    def copy(self, source: Slots, target: Slots, start: int) -> None:
        """Note whose slots are copied, and for whom."""
        self.foreign += self._others(source)
        self._copy(source, target, start)
        self.writer[target] = self.tenant

    def matched(self, request: str, slots: Slots) -> None:
        """Note whose slots are read as a prefix."""
        self.foreign += self._others(slots)

    def _others(self, slots: Slots) -> int:
        return int((self.writer[slots] != self.tenant).sum())


class TenantBench:
    """Serves requests on one engine, whose caches stay from one round to the next.

    Args:
        groups: groups that every request names; none: nothing is shared.
        slots: size of the pool.
        length: number of tokens that are generated for each request.
    """

    def __init__(
        self, model: LoadedModel, slots: int, *, groups: tuple[str, ...], length: int = 4
    ) -> None:
        self.engine = ReplayEngine(model, pool_tokens=slots)
        self._record = _SlotRecord(self.engine)
        self._reuse = ReusePayload(mode=ReuseMode.LIVE, groups=groups)
        self._length = length
        self._count = 0

    def serve(
        self, requests: Sequence[TenantRequest], concurrency: int, advance: Callable[[], None]
    ) -> list[TenantSample]:
        """Serve requests in order, ``concurrency`` at once.

        Args:
            advance: called after each request.
        """
        waiting, running = deque(requests), deque[tuple[int, Running, list[int]]]()
        samples = []
        while waiting or running:
            while waiting and len(running) < concurrency:
                request = waiting.popleft()
                sample, sequence = self._admit(request)
                samples.append(sample)
                running.append((request.tenant, sequence, []))
            tenant, sequence, tokens = running.popleft()
            self._record.tenant = tenant
            if self._step(sequence, tokens):
                running.append((tenant, sequence, tokens))
            else:
                sequence.finish(tokens[-1])
                advance()
        return samples

    def _admit(self, request: TenantRequest) -> tuple[TenantSample, Running]:
        self._count += 1
        self._record.tenant, self._record.foreign = request.tenant, 0
        theirs, own = self._live(request)
        payload = EditPayload(session=request.session, scope=f"tenant{request.tenant}", turn="t")
        wanted = GenerationRequest(
            f"r{self._count}", request.tokens, payload, self._reuse, max_new_tokens=self._length
        )
        sequence = self.engine.admit(wanted)
        return self._sample(sequence, theirs & ~own), sequence

    def _live(self, request: TenantRequest) -> tuple[Mask, Mask]:
        """Return which of a prompt's tokens other tenants' sequences have, and which the own."""
        pieces: dict[bool, list[array[int]]] = {True: [], False: []}
        for tokens, last in live_paths(self.engine.cache.tree):
            own = self.writer_of(last) == request.tenant
            if len(tokens) >= ATTENTION_SINK + MIN_RUN:
                pieces[own].append(tokens[ATTENTION_SINK:])
        prompt = request.tokens[ATTENTION_SINK:-1]
        theirs, own_mask = (Windows(pieces[own], MIN_RUN).covered(prompt) for own in (False, True))
        return theirs, own_mask

    def writer_of(self, slot: int) -> int:
        """Return the tenant that wrote a slot."""
        return int(self._record.writer[slot])

    def _sample(self, sequence: Running, shareable: Mask) -> TenantSample:
        """Return the sample of a request that was admitted; nothing of it ran yet."""
        counts, reuse = sequence.receipt.tokens, sequence.receipt.reuse
        group = reuse.group if reuse is not None else 0
        served = np.ones(counts.prompt, dtype=np.bool_)
        for step in sequence.pending:
            served[step.start : step.end] = False
        shareable[: max(0, counts.prefix - ATTENTION_SINK)] = False
        return TenantSample(
            prompt=counts.prompt,
            prefix=counts.prefix,
            own=counts.reused - group,
            group=group,
            shareable=int(shareable.sum()),
            shared=int((shareable & served[ATTENTION_SINK:-1]).sum()),
            foreign_slots=self._record.foreign,
        )

    def _step(self, sequence: Running, tokens: list[int]) -> bool:
        """Run one step; returns False when the request has its tokens."""
        if tokens:
            logits: torch.Tensor | None = sequence.decode_step(tokens[-1])
        else:
            logits = sequence.prefill_step()
        if logits is not None:
            tokens.append(int(logits.argmax()))
        return len(tokens) < self._length


def live_paths(tree: RadixTree) -> Iterator[tuple[array[int], int]]:
    """Yield the token ids of every sequence in a tree, and its last slot."""
    stack: list[tuple[Node, array[int]]] = [(tree.root, array("q"))]
    while stack:
        node, before = stack.pop()
        path = before + node.keys
        if node.children:
            stack.extend((child, path) for child in node.children.values())
        elif path:
            yield array("q", (key & MAX_TOKEN for key in path)), int(node.slots[-1])


class Documents:
    """Recorded text, cut into documents of unequal popularity."""

    def __init__(self, tokenise: Callable[[str], list[int]]) -> None:
        text = demo_material().text
        self._tokenise = tokenise
        self._pieces = [
            tokenise(text[n * CHARACTERS : (n + 1) * CHARACTERS]) for n in range(DOCUMENTS)
        ]
        self._weights = [1 / rank**EXPONENT for rank in range(1, DOCUMENTS + 1)]

    def prompt(self, tenant: int, number: int, chance: random.Random) -> array[int]:
        """Return a tenant's prompt."""
        chosen: list[int] = []
        while len(chosen) < PER_PROMPT:
            (drawn,) = chance.choices(range(DOCUMENTS), self._weights)
            if drawn not in chosen:
                chosen.append(drawn)
        name = NAMES[tenant]
        header = (
            f"{name} & Sons. Ticket {chance.randrange(10**6)} of {name}, for its own use only.\n"
        )
        tokens = self._tokenise(header * 3)
        for place, document in enumerate(chosen):
            tokens += [*self._tokenise(f"\nSource {place}, {name}:\n"), *self._pieces[document]]
        tokens += self._tokenise(f"\nQuestion {number}: what did {chance.random()} change?")
        return array("q", tokens)


def requests(documents: Documents, tenants: int, count: int, label: str) -> list[TenantRequest]:
    """Return ``count`` requests of each tenant, in random order."""
    chance = random.Random(f"{tenants} {label}")
    order = [tenant for tenant in range(tenants) for _ in range(count)]
    chance.shuffle(order)
    return [
        TenantRequest(tenant, f"{label}{number}", documents.prompt(tenant, number, chance))
        for number, tenant in enumerate(order)
    ]


def figures(samples: Sequence[TenantSample]) -> dict[str, Any]:
    """Return sums over requests, and the share of what could be shared."""
    sums = {
        name: sum(getattr(sample, name) for sample in samples)
        for name in ("prompt", "prefix", "own", "group", "shareable", "shared", "foreign_slots")
    }
    part = sums["shared"] / sums["shareable"] if sums["shareable"] else None
    return {**sums, "share": None if part is None else round(part, 4)}


def measure(
    model: LoadedModel, tenants: int, concurrency: int, count: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Return the figures of one workload, with sharing on and off."""

    def tokenise(text: str) -> list[int]:
        ids: list[int] = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    documents = Documents(tokenise)
    asked = {label: requests(documents, tenants, count, label) for label in ROUNDS}
    slots = sum(len(request.tokens) + 8 for each in asked.values() for request in each) + _SPARE
    found: dict[str, Any] = {"tenants": tenants, "concurrency": concurrency}
    for name, groups in (("on", ("documents",)), ("off", ())):
        bench = TenantBench(model, slots, groups=groups)
        found[name] = {
            label: figures(bench.serve(asked[label], concurrency, advance)) for label in ROUNDS
        }
    return found


def main() -> None:
    """Measure each workload, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--tenants", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 8], metavar="N")
    parser.add_argument("--requests", type=int, default=12, help="of each tenant, per round [12]")
    given = parser.parse_args()
    if not 1 < min(given.tenants) <= max(given.tenants) <= len(NAMES):
        parser.error(f"--tenants takes 2 to {len(NAMES)}")
    model = load_model(None, dtype="float32")
    total = 4 * sum(given.tenants) * len(given.concurrency) * given.requests
    with progress("requests", total) as step:
        found = [
            measure(model, tenants, concurrency, given.requests, step)
            for tenants, concurrency in product(given.tenants, given.concurrency)
        ]
    rows = [
        (
            *(result["tenants"], result["concurrency"], label, name),
            *(f"{row[key]:,}" for key in ("prompt", "own", "group", "shareable")),
            *(share(row["share"], nothing="–"), f"{row['foreign_slots']:,}"),
        )
        for result in found
        for label, name in product(ROUNDS, ("on", "off"))
        for row in [result[name][label]]
    ]
    title = "Content that tenants share (tokens)"
    show((*_COLUMNS, "shareable", "shared", "foreign"), rows, title=title, words=0)
    write_json(given.json, {"workloads": found})
