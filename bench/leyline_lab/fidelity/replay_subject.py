"""A model on the replay engine, measured in several ways; no run finds anything of another's."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Outcome,
    RecurrentEdits,
    SourceRef,
    apply_directives,
    token_digest,
)
from leyline_engine.rotary.rotation import Rotary
from leyline_lab.errors import SubjectError
from leyline_lab.fidelity.rendering import Rendered, place_contents
from leyline_lab.fidelity.subject import Answer, Subject
from leyline_replay.cache.anchors import Anchoring
from leyline_replay.engine import GenerationRequest, ReplayEngine
from leyline_replay.models.loader import LoadedModel
from leyline_replay.text.chat import PromptEncoder, TemplateFailedError

_SCOPE = "eval"
_SMALLEST_POOL = 16_384


@dataclass(frozen=True, slots=True)
class _Held:
    """A source that an engine holds, and the slots that were used since it was empty."""

    source: array[int]
    used: int


class ReplaySubject(Subject):
    """One model, and the arms that answer with it; see :class:`~.subject.Subject`.

    Args:
        loaded: the model.
        length: maximum number of tokens of an answer.

    Raises:
        SubjectError: the engine can't splice its KV, or it has no chat template.
    """

    has_control = True

    def __init__(self, loaded: LoadedModel, length: int) -> None:
        self.name = loaded.name
        self.fingerprint = loaded.fingerprint
        self.length = length
        self.tokenizer: Any = loaded.tokenizer
        self._loaded = loaded
        self._encoder = PromptEncoder(loaded.tokenizer)
        self._ends = _end_tokens(loaded)
        self._engines: dict[bool, tuple[int, ReplayEngine]] = {}
        """Engines and the sizes of their pools: with rotation, and the control's."""
        self._held: dict[bool, _Held] = {}
        """Sources whose KV the engines still hold."""
        self._answers: dict[tuple[bool, tuple[Directive, ...], bytes], Answer] = {}
        """Answers over these sources, by edits and prompt."""
        if not self._encoder.has_template:
            raise SubjectError(f"{self.name} has no chat template, so no session can be rendered")
        capability = self._engine(0, rotated=True).capability
        self.check_splices(capability)
        special = set(self.tokenizer.all_special_ids)
        known = min(len(self.tokenizer), capability.vocab_size)
        self.ordinary = tuple(token for token in range(known) if token not in special)
        """Tokens that random text is made of."""
        self.max_context = int(
            getattr(loaded.model.config, "max_position_embeddings", None) or 2**20
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opened: bool = True,
    ) -> Rendered:
        """Render a conversation; see :meth:`~.subject.Subject.render`."""
        try:
            return render_chat(self._encoder, self.tokenizer, messages, tools, opened=opened)
        except TemplateFailedError as error:
            raise SubjectError(f"{self.name}: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special ones."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def prefilled(self, prompt: Sequence[int]) -> Answer:
        """See :meth:`~.subject.Subject.prefilled`."""
        wanted = array("q", prompt)
        self._held.clear()  # so that nothing depends on earlier cases
        engine = self._engine(len(wanted), rotated=True)
        request = GenerationRequest("plain", wanted, None, max_new_tokens=self.length + 1)
        return self._answer(engine, request)

    def spliced(
        self,
        source: Sequence[int],
        edits: Sequence[Directive],
        then: Sequence[int] = (),
        *,
        rotated: bool = True,
    ) -> Answer:
        """See :meth:`~.subject.Subject.spliced`."""
        whole = array("q", source)
        prompt = array("q", [*apply_directives(whole, edits), *then])
        engine = self._holding(whole, len(prompt), rotated=rotated)
        same = (rotated, tuple(edits), prompt.tobytes())
        if same in self._answers:  # the lineage is there, so it would find its own KV
            return self._answers[same]
        payload = EditPayload(
            session="s",
            scope=_SCOPE,
            turn="edited",
            sources=(SourceRef("source", len(whole), token_digest(whole)),),
            directives=tuple(edits),
            recurrent=RecurrentEdits.KEPT,
        )
        request = GenerationRequest("edited", prompt, payload, max_new_tokens=self.length + 1)
        answer = self._answer(engine, request)
        receipt = answer.receipt
        if receipt.outcome is not Outcome.SPLICED:
            raise SubjectError(
                f"{self.name}: the engine refused an edit ({receipt.reason}): {receipt.detail}"
            )
        if receipt.lineage[0].start < receipt.tokens.prefix:
            raise SubjectError(f"{self.name}: an arm found what another has spliced")
        self._answers[same] = answer
        return answer

    def _holding(self, source: array[int], prompt: int, *, rotated: bool) -> ReplayEngine:
        """Return an engine that holds a source's KV, with room for a prompt and an answer.

        Edits of the same source share it, up to the next prefill. Each makes a lineage of its own,
        so of another's KV it finds at most what was prefilled over an exact prefix.
        """
        needed = prompt + self.length + 1
        held, (slots, engine) = self._held.get(rotated), self._engines.get(rotated, (0, None))
        if engine is None or held is None or held.source != source or held.used + needed > slots:
            engine = self._engine(len(source) + prompt, rotated=rotated)
            payload = EditPayload(session="s", scope=_SCOPE, turn="source")
            sequence = engine.admit(GenerationRequest("source", source, payload))
            while sequence.prefill_step() is None:
                pass
            sequence.finish(None)
            held = _Held(source, len(source))
        self._held[rotated] = _Held(source, held.used + needed)
        return engine

    def _engine(self, tokens: int, *, rotated: bool) -> ReplayEngine:
        """Return an empty engine with room for so many prompt tokens and an answer."""
        needed = tokens + 2 * (self.length + 1)
        slots, engine = self._engines.get(rotated, (0, None))
        if engine is None or slots < needed:
            slots = max(_SMALLEST_POOL, 1 << needed.bit_length())
            engine = ReplayEngine(self._loaded, pool_tokens=slots, anchoring=Anchoring(grid=1))
            if not rotated:
                rotary = engine.cache.pool.rotary
                engine.cache.pool.rotary = Rotary.still(rotary.dim, rotary.pairing)
            self._engines[rotated] = slots, engine
        self._held.pop(rotated, None)
        for known in [each for each in self._answers if each[0] == rotated]:
            del self._answers[known]
        engine.flush()
        return engine

    def _answer(self, engine: ReplayEngine, request: GenerationRequest) -> Answer:
        self.check_fits(request.tokens)
        sequence = engine.admit(request)
        logits = None
        while logits is None:
            logits = sequence.prefill_step()
        first = logits.cpu()
        if not torch.isfinite(first).all():
            raise SubjectError(f"{self.name}: its logits aren't finite; load it in another dtype")
        tokens: list[int] = []
        while (token := int(logits.argmax())) not in self._ends:
            tokens.append(token)
            if len(tokens) == self.length:
                break
            logits = sequence.decode_step(token)
        receipt = sequence.finish(None).receipt
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=False))
        return Answer(first.numpy(), tuple(tokens), text, receipt)


def render_chat(
    encoder: PromptEncoder,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    opened: bool = True,
) -> Rendered:
    """Render a conversation with the model's own template.

    Args:
        opened: True if the assistant's next message begins at the end.

    Raises:
        TemplateFailedError: the template refuses the messages.
    """
    text = encoder.chat_text(messages, tools, {"add_generation_prompt": opened})
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    return place_contents(text, messages, encoding.ids, encoding.offsets)


def _end_tokens(loaded: LoadedModel) -> frozenset[int]:
    """Return the tokens that end a message."""
    configured = getattr(loaded.model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(each for each in (*listed, loaded.tokenizer.eos_token_id) if each is not None)
