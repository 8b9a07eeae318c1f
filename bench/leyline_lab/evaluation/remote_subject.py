"""A model behind a running engine, measured in several ways.

Each answer has a session, a scope and a namespace of its own, so that no arm finds anything of
another's. Of an engine that knows no namespaces, the cache is emptied before each answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import count
from secrets import token_hex
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import (
    Capability,
    Directive,
    EditPayload,
    Outcome,
    Reason,
    Receipt,
    SourceRef,
    apply_directives,
    common_prefix,
    lower_directives,
    sealed_digest,
    token_digest,
)
from leyline_lab.errors import NothingCopiedError, SubjectError
from leyline_lab.fidelity.rendering import Rendered
from leyline_lab.fidelity.subject import Answer, Subject
from leyline_lab.three_arm.unrotated import PREFIX as UNROTATED

from .endpoint import AGAIN, EngineEndpoint, Generated
from .rendering import ModelRenderer

LIKELIEST = 4096
"""Maximum number of log probabilities that are asked for at each token."""


class RemoteSubject(Subject):
    """One model behind an endpoint; see :class:`leyline_lab.fidelity.subject.Subject`.

    Args:
        capability: the engine's account of itself.
        length: maximum number of tokens of an answer.
        hints_secret: secret that proxy and engine share.
        has_control: True if the server leaves keys of the control's sessions unrotated.

    Raises:
        SubjectError: the engine can't splice this model's KV.
    """

    def __init__(
        self,
        endpoint: EngineEndpoint,
        capability: Capability,
        renderer: ModelRenderer,
        length: int,
        *,
        hints_secret: str | None = None,
        has_control: bool = False,
    ) -> None:
        self.name = capability.model
        self.fingerprint = capability.model_fingerprint
        self.length = length
        self.has_control = has_control
        self.tokenizer: Any = renderer.tokenizer
        self.likeliest = min(capability.vocab_size, LIKELIEST)
        self._endpoint = endpoint
        self._capability = capability
        self._renderer = renderer
        self._secret = hints_secret
        self._run = token_hex(8)
        self._numbers = count()
        self.check_splices(capability)
        self.ordinary = renderer.ordinary(capability.vocab_size)
        kv = capability.kv
        # The pool holds a whole history and its edited copy.
        room = kv.capacity_tokens // 2 if kv is not None else capability.max_context
        self.max_context = min(capability.max_context, room)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opened: bool = True,
    ) -> Rendered:
        """Render a conversation with the model's own template.

        Raises:
            SubjectError: the template refuses the messages, or the tokens aren't the engine's.
        """
        found = self._renderer.render(messages, tools, opened=opened)
        if max(found.tokens, default=0) >= self._capability.vocab_size:
            raise SubjectError(
                f"{self.name} has {self._capability.vocab_size} tokens, and the tokenizer has "
                "more: give --model the folder of the model that the engine serves"
            )
        return found

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special ones."""
        return self._renderer.encode(text)

    def prefilled(self, prompt: Sequence[int]) -> Answer:
        """Answer a prompt that is prefilled from an empty cache.

        Raises:
            SubjectError: it doesn't fit, or the engine found some of it in its cache.
        """
        answer = self._answer(prompt, self._payload(self._begin(), "plain"))
        self._check_found(answer.receipt, prompt, 0)
        return answer

    def spliced(
        self,
        source: Sequence[int],
        edits: Sequence[Directive],
        then: Sequence[int] = (),
        *,
        rotated: bool = True,
    ) -> Answer:
        """Answer an edited prompt over the KV of the whole one.

        Raises:
            NothingCopiedError: too little follows the edits for this engine.
            SubjectError: the engine didn't splice, a prompt doesn't fit, or there is no control.
        """
        if not rotated and not self.has_control:
            raise SubjectError(f"{self.name}: this endpoint can't run without rotation")
        whole = array("q", source)
        prompt = array("q", [*apply_directives(whole, edits), *then])
        session = self._begin(rotated=rotated)
        retained = whole + self._retain(whole, session)
        digest = sealed_digest(token_digest(retained), self._secret)
        payload = msgspec.structs.replace(
            self._payload(session, "edited"),
            sources=(SourceRef("source", len(retained), digest),),
            directives=tuple(edits),
            segments=lower_directives(edits, len(whole), len(prompt)),
        )
        answer = self._answer(prompt, payload)
        receipt = answer.receipt
        self._check_found(receipt, prompt, common_prefix(whole, prompt))
        if receipt.reason is Reason.NOTHING_TO_REUSE:
            raise NothingCopiedError(f"{self.name}: the engine copies nothing after this edit")
        if receipt.outcome is not Outcome.SPLICED:
            why = f"({receipt.reason}): {receipt.detail}"
            fix = AGAIN
            if self._secret is not None and receipt.reason is Reason.TOKEN_MISMATCH:
                fix = "is LEYLINE_HINTS_SECRET the engine's own?"
            raise SubjectError(f"{self.name}: the engine refused an edit {why}; {fix}")
        return answer

    def _begin(self, *, rotated: bool = True) -> str:
        """Return the name of a session for which the cache is empty."""
        if not self._capability.isolates:
            self._endpoint.flush()
        return f"{'eval' if rotated else UNROTATED}.{self._run}.{next(self._numbers)}"

    def _payload(self, session: str, turn: str) -> EditPayload:
        return EditPayload(session=session, scope=f"scope.{session}", turn=turn)

    def _retain(self, prompt: array[int], session: str) -> array[int]:
        """Prefill a prompt as a source, and return the tokens that the engine put after it."""
        payload = self._payload(session, "source")
        self.check_fits(prompt)
        self._endpoint.generate(prompt, 1, message_id=f"{session}.source", payload=payload)
        record = self._endpoint.record(f"{session}.source")
        self._check_understood(record.receipt)
        return array("q", record.output_ids)

    def _answer(self, prompt: Sequence[int], payload: EditPayload) -> Answer:
        self.check_fits(prompt)
        message_id = f"{payload.session}.{payload.turn}"
        generated = self._endpoint.generate(
            prompt,
            self.length,
            message_id=message_id,
            payload=payload,
            likeliest=self.likeliest,
        )
        first, tokens = self._first(generated), _message(generated)
        receipt = self._endpoint.record(message_id).receipt
        self._check_understood(receipt)
        self._check_same_engine()
        return Answer(first, tokens, self._renderer.decode(tokens), receipt)

    def _first(self, generated: Generated) -> NDArray[np.float32]:
        """Return log probabilities ``[vocab]`` of the first token, NaN where unreported."""
        values = np.full(self._capability.vocab_size, np.nan, dtype=np.float32)
        try:
            for logprob, token, _ in generated.meta_info.first():
                if logprob is not None and 0 <= token < len(values):
                    values[token] = logprob
        except msgspec.DecodeError:
            raise self._endpoint.malformed("/generate, log probabilities") from None
        reported = values[~np.isnan(values)]
        if not len(reported) or not np.isfinite(reported).all() or reported.max() > 0.01:
            raise self._endpoint.malformed("/generate, log probabilities")
        return values

    def _check_understood(self, receipt: Receipt) -> None:
        """Raise if the engine refused the envelope itself, as without the secret."""
        if receipt.reason is Reason.INVALID_EDIT and "signature" in receipt.detail:
            raise SubjectError(
                f"{self._endpoint.url} wants signed envelopes: set LEYLINE_HINTS_SECRET to the "
                "engine's"
            )

    def _check_found(self, receipt: Receipt, prompt: Sequence[int], most: int) -> None:
        """Raise if the engine found more than so many tokens of a prompt: another arm's."""
        if receipt.tokens.prompt != len(prompt):
            raise self._endpoint.malformed("receipt, prompt tokens")
        found = receipt.tokens.prefix + receipt.tokens.reused
        if found > most:
            raise SubjectError(
                f"{self.name}: the engine found {found} tokens of a prompt in its cache, where "
                f"{most} can be known: evaluate an engine that serves nobody else, and {AGAIN}"
            )

    def _check_same_engine(self) -> None:
        """Raise if another model answers at the address now."""
        if self._endpoint.capability().model_fingerprint != self.fingerprint:
            raise SubjectError(
                f"{self._endpoint.url} serves another model now: give another --json to measure it"
            )


def _message(generated: Generated) -> tuple[int, ...]:
    """Return the tokens of an answer without the one that ends it."""
    tokens = generated.output_ids
    matched = generated.meta_info.finish_reason.get("matched")
    return tuple(tokens[:-1] if tokens and tokens[-1] == matched else tokens)
