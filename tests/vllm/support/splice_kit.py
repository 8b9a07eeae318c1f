"""A vLLM engine of this process with Leyline in it: turns, receipts, and the rows of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm_engine import engine

from leyline_engine.admit.packed_hints import packed_envelope
from leyline_engine.contract import (
    EditPayload,
    SourceRef,
    TurnRecord,
    edit_envelope,
    token_array,
    token_digest,
)
from leyline_engine.rows.paging import by_slot
from leyline_engine.server.channel import Sender
from leyline_engine.vllm.orders import block_slots

TRANSFER = {"kv_connector": "LeylineConnector", "kv_role": "kv_both"}
_names = count(1)


@dataclass
class KeptRecords:
    """A sender that keeps all messages, in place of the socket to an API server."""

    records: dict[str, TurnRecord] = field(default_factory=dict)
    forgot: dict[str, Any] = field(default_factory=dict)

    def announce(self, capability: Any) -> None:
        """Keep nothing."""

    def send(self, record: TurnRecord, scope: str = "") -> None:
        """Keep a record."""
        self.records[record.receipt.message_id] = record

    def update_forgot(self, message_id: str, counts: Any) -> None:
        """Keep the progress of a forget."""
        self.forgot[message_id] = counts

    def update_proof(self, message_id: str, proof: Any) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Close nothing."""


@dataclass
class Answer:
    """A finished request."""

    message: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    record: TurnRecord | None
    cached: int
    """Prompt tokens that vLLM reports as cached."""
    scores: list[dict[int, float]]
    """Log-probabilities of each output position's likeliest tokens."""
    error: str = ""
    """The reason of a request that ended with an error."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return (*self.prompt, *self.output)

    def ref(self, turn: str) -> SourceRef:
        """A payload's reference to this answer, as a turn of that name."""
        return SourceRef(turn, len(self.tokens), token_digest(token_array(self.tokens)))


class SplicingEngine:
    """Requests to an engine of this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self.leyline = self.connector.leyline
        self.sent = KeptRecords()
        sender: Sender = self.sent
        self.leyline._accounts._sender = sender
        self.held: dict[str, list[int]] = {}
        """By ended request, the ids of its blocks."""
        self._watch_ends()

    def _watch_ends(self) -> None:
        ended = self.leyline.ended

        def watched(request: Any, **options: Any) -> None:
            # vLLM appends to the names that its callers give.
            name = request.request_id.rpartition("-")[0]
            manager = self.scheduler.kv_cache_manager
            self.held[name] = list(manager.get_block_ids(request.request_id)[0])
            ended(request, **options)

        self.leyline.ended = watched

    @property
    def rows(self) -> Any:
        """The worker's rows."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().rows

    def start(
        self, prompt: Sequence[int], payload: EditPayload | None = None, **options: Any
    ) -> str:
        """Queue a request; see :meth:`start_prompt`."""
        return self.start_prompt({"prompt_token_ids": list(prompt)}, payload, **options)

    def start_prompt(
        self,
        prompt: dict[str, Any],
        payload: EditPayload | None = None,
        *,
        decode: int = 8,
        scores: int = 0,
        answers: int = 1,
        allowed: Sequence[int] | None = None,
        envelope: Any = None,
        **options: Any,
    ) -> str:
        """Queue a request; returns its name, which is its message's, too.

        Args:
            allowed: the only tokens that may be decoded.
            envelope: returns another envelope than the payload's, by the message's name.
        """
        from vllm import SamplingParams

        name = f"m{next(_names)}"
        extra = {}
        if payload is not None or envelope is not None:
            raw = envelope(name) if envelope else msgspec.to_builtins(edit_envelope(name, payload))
            extra = {"extra_args": {"leyline": packed_envelope(raw)}}
        params = SamplingParams(
            temperature=0 if answers == 1 else 1,
            max_tokens=decode,
            ignore_eos=True,
            logprobs=scores or None,
            n=answers,
            allowed_token_ids=None if allowed is None else list(allowed),
            **extra,
        )
        self.llm.llm_engine.add_request(name, prompt, params, **options)
        return name

    def run(self, names: Sequence[str]) -> list[Answer]:
        """Step until these requests have ended."""
        done: dict[str, Any] = {}
        while not set(names) <= done.keys():
            for output in self.llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = output
        self.settle()
        return [self._answer(name, done[name]) for name in names]

    def run_out(self, names: Sequence[str]) -> None:
        """Step until nothing is to be done, whatever has become of these requests."""
        self.settle()
        assert not set(names) & {each.rpartition("-")[0] for each in self.scheduler.requests}

    def settle(self) -> None:
        """Step until nothing is to be done: rows that were given back are overwritten."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()

    def _answer(self, name: str, output: Any) -> Answer:
        best = output.outputs[0]
        scores = [{t: s.logprob for t, s in at.items()} for at in best.logprobs or ()]
        return Answer(
            name,
            tuple(output.prompt_token_ids),
            tuple(best.token_ids),
            self.sent.records.get(name),
            output.num_cached_tokens or 0,
            scores,
            str(best.stop_reason) if best.finish_reason == "error" else "",
        )

    def ask(
        self, prompt: Sequence[int], payload: EditPayload | None = None, **options: Any
    ) -> Answer:
        """Run one request alone."""
        (answer,) = self.run([self.start(prompt, payload, **options)])
        return answer

    def ask_for_rows(
        self, prompt: Sequence[int], payload: EditPayload | None = None, **options: Any
    ) -> tuple[Answer, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Run one request alone; returns the rows that it held at its end, too.

        They are those of all its tokens but the last, which was never fed.
        """
        answer = self.ask(prompt, payload, **options)
        length = len(answer.tokens) - 1
        slots = block_slots(self.held[answer.message], self.leyline.cache.block)[:length]
        return answer, self.rows_in(slots)

    def rows_in(self, slots: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values in slots, in every layer: ``[n, heads, dim]`` each."""
        tensors, at = self.rows.pool.tensors, torch.as_tensor(slots)
        keys = [by_slot(layer, tensors.key_paging)[at].clone() for layer in tensors.keys]
        values = [by_slot(layer, tensors.value_paging)[at].clone() for layer in tensors.values]
        return keys, values


@contextmanager
def splicing_engine(folder: Path, **settings: Any) -> Iterator[SplicingEngine]:
    """Start an engine with Leyline on a model's folder."""
    with engine(folder, kv_transfer_config=TRANSFER, **settings) as llm:
        yield SplicingEngine(llm)
