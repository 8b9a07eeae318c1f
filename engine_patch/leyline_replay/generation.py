"""One request on its way through the engine: its state, and the events for its reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from leyline_engine.contract import Reason, TurnRecord
from leyline_replay.engine import GenerationRequest
from leyline_replay.sequence import Sequence
from leyline_replay.text.detokenizer import IncrementalDetokenizer
from leyline_replay.text.sampling import SampledToken, Sampler, SamplingParams
from leyline_replay.text.stops import StopMatcher


class FinishReason(StrEnum):
    """The reason why a generation ended; the first two are OpenAI's own."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A caller's request, checked."""

    request: GenerationRequest
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer and aren't part of its text."""
    invalid: Reason | None = None
    """Set when the request's hints were malformed; it runs as an ordinary prefill."""
    invalid_detail: str = ""
    enveloped: bool = False
    """True if it brought an envelope, even a malformed one."""
    every_token: bool = False
    """True if events bring every sampled token, also those that end the answer or show no text."""

    @property
    def scope(self) -> str:
        """Tenant scope, for fairness; empty when the request names none."""
        return self.request.payload.scope if self.request.payload else ""


@dataclass(frozen=True, slots=True)
class TextEvent:
    """New text, and the tokens sampled for it if log probabilities were requested."""

    text: str
    tokens: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of an answer."""

    reason: FinishReason
    record: TurnRecord
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The last event of a request that got no answer, or no whole one."""

    error: Exception


Event = TextEvent | FinishEvent | ErrorEvent


class Channel:
    """Passes events from the engine's thread to one asyncio reader.

    It holds at most one event per generated token and one at the end, so ``max_new_tokens``
    bounds it; a slow reader holds no KV slots.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._ready = asyncio.Event()
        self.abandoned = False
        """True if the reader's event loop is closed: no reader is left."""

    def put(self, event: Event) -> None:
        """Add an event. Called on the engine's thread; never blocks."""
        with self._lock:
            self._events.append(event)
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            self.abandoned = True

    async def get(self) -> list[Event]:
        """Return all events since the last call; waits for at least one."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            with self._lock:
                events, self._events = self._events, []
            if events:
                return events


@dataclass(eq=False)
class Job:
    """A submitted request. ``cancelled`` is the only field that both threads touch."""

    spec: JobSpec
    channel: Channel
    cancelled: bool = False
    cleared: int = -1
    """Number of locks that claims had taken when they were last found to leave it room."""


class GeneratedAnswer:
    """Turns logits into tokens and text until the answer ends. Knows no engine and no thread."""

    def __init__(self, spec: JobSpec, decode: Callable[[list[int]], str]) -> None:
        self._spec = spec
        self._sampler = Sampler(spec.sampling)
        self._detokenizer = IncrementalDetokenizer(decode)
        self._stops = StopMatcher(spec.stops)
        self._unsent: list[SampledToken] = []
        self._announced = False
        self.sampled = 0
        self.last_token = -1
        """The token sampled last; fed back only if the answer continues."""
        self.finish: FinishReason | None = None

    def advance(self, logits: torch.Tensor) -> TextEvent | None:
        """Sample one token from fp32 ``logits [vocab]``; sets :attr:`finish` at the end.

        Returns:
            Text that may be sent now, if any.
        """
        sampled = self._sampler.sample(logits)
        self.last_token = sampled.token
        self.sampled += 1
        ends = sampled.token in self._spec.stop_tokens
        reported = self._spec.every_token or not ends
        if reported and self._spec.sampling.top_logprobs is not None:
            self._unsent.append(sampled)
        if ends:
            self.finish = FinishReason.STOP
            return self._event(self._flush())
        result = self._stops.feed(self._detokenizer.feed(sampled.token))
        if result.stopped:
            self.finish = FinishReason.STOP
            return self._event(result.text)
        if self.sampled >= self._spec.request.max_new_tokens:
            self.finish = FinishReason.LENGTH
            return self._event(result.text + self._flush())
        return self._event(result.text)

    def cut_short(self) -> TextEvent | None:
        """End the answer for lack of room; returns the text held back."""
        self.finish = FinishReason.LENGTH
        return self._event(self._flush())

    def _flush(self) -> str:
        result = self._stops.feed(self._detokenizer.flush())
        if result.stopped:
            self.finish = FinishReason.STOP
            return result.text
        return result.text + self._stops.flush()

    def _first_event(self) -> TextEvent | None:
        """Return the first token's event, even if its text is held back: a stream opens with it."""
        if self._announced:
            return None
        self._announced = True
        return TextEvent("")

    def _event(self, text: str) -> TextEvent | None:
        # Tokens are sent with the first text that is sent after them; those of a stop string,
        # whose text is never sent, stay behind. At the length limit no text may follow.
        ended = self.finish is FinishReason.LENGTH or (self._spec.every_token and self.finish)
        closing = ended and self._unsent
        if not (text or closing):
            return self._first_event()
        self._announced = True
        tokens, self._unsent = tuple(self._unsent), []
        return TextEvent(text, tokens)


@dataclass(eq=False, slots=True)
class RunningJob:
    """An admitted job, its sequence and its answer so far."""

    job: Job
    sequence: Sequence
    answer: GeneratedAnswer

    def forward(self) -> torch.Tensor | None:
        """Run the next step: a prefill chunk, or feed back the token sampled last."""
        if self.answer.sampled:
            return self.sequence.decode_step(self.answer.last_token)
        return self.sequence.prefill_step()
