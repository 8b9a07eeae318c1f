"""A chat request in the proxy's own form: checked only where it matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from leyline_policies import Policy

from ..errors import BadRequestError
from ..model.clock import TurnClock
from ..model.compaction import CompactionReport, CompactionWish
from ..model.fields import OPTIONS_FIELD, OptionError
from ..model.messages import Message, MessageError, check_messages, fingerprint
from ..model.text_memory import NO_SESSION, Reader
from ..tenants import Tenant
from .annotations import Annotation, annotations_of, check_forgets, shared_scope
from .bodies import BodyMemory, ReadBody
from .compaction import merged_wish
from .context_management import CONTEXT_FIELD, parse_context_management
from .declared import DeclaredEditError, check_declared
from .options import RequestOptions, parse_options
from .prewarm import prewarms
from .values import check_arguments, decode


@dataclass(frozen=True)  # no slots: fingerprints are computed once
class ChatRequest:
    """One checked request."""

    tenant: Tenant
    headers: Mapping[str, str]
    """Headers with lower-case names."""
    raw: bytes
    body: Mapping[str, Any]
    messages: tuple[Message, ...]
    options: RequestOptions
    requested: tuple[Policy, ...]
    """Edits that the member ``context_management`` asks for."""
    annotations: Mapping[int, Annotation]
    """Annotations by index of the message."""
    scope: str | None
    """Scope to share with, as named by messages."""
    model: str
    stream: bool
    clock: TurnClock = field(default_factory=TurnClock)
    read: ReadBody | None = field(default=None, repr=False)
    """The body as remembered for the next turn; None if it isn't."""
    moved_tools: int = 0
    """Number of tools at another place than the client's."""
    offers_recall: bool = False
    """True if the body offers the model the recall tool."""
    compaction: CompactionWish | None = None
    """The wish to replace the conversation by a summary; None for none."""
    compacted: CompactionReport | None = None
    """What became of that wish, once that is known."""
    reader: Reader = NO_SESSION
    """The session whose prompt it makes, once that is known."""
    continues: str | None = None
    """Id of the session whose compaction the request carries; None for none."""

    @cached_property
    def prewarms(self) -> bool:
        """True if its prompt is prefilled and nothing is generated."""
        return prewarms(self.body)

    @property
    def computed_by(self) -> str:
        """The model's name with that of a LoRA adapter: what computes the request's KV.

        SGLang takes an adapter in the model's name (``base:adapter``), or in ``lora_path``.
        """
        adapter = self.body.get("lora_path")
        return f"{self.model}:{adapter}" if adapter and ":" not in self.model else self.model

    @cached_property
    def fingerprints(self) -> tuple[int, ...]:
        """Fingerprints of the messages."""
        if self.read is not None:
            return self.read.fingerprints
        return tuple(map(fingerprint, self.messages))


def decode_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in ``raw``.

    Raises:
        BadRequestError: not JSON, or not an object; the message never quotes the body.
    """
    try:
        body = decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        position = str(error) if isinstance(error, msgspec.DecodeError) else type(error).__name__
        raise BadRequestError(
            f"The request body is not valid JSON: {position}", code="invalid_json"
        ) from error
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.", code="invalid_json")
    return body


def parse_chat(
    raw: bytes,
    headers: Mapping[str, str],
    tenant: Tenant,
    *,
    clock: TurnClock | None = None,
    bodies: BodyMemory | None = None,
) -> ChatRequest:
    """Check a chat request, but leave fields that the proxy doesn't use to the engine.

    Args:
        bodies: memory of the bodies that this one may continue.

    Raises:
        BadRequestError: names the field and the expected value.
    """
    read = bodies.read(tenant.name, raw) if bodies is not None else None
    body = decode_body(raw) if read is None else read.members
    if "messages" not in body and "input" in body:
        message = "messages must be a list of chat messages. input is that of POST /v1/responses."
        raise BadRequestError(message, param="messages")
    _check_count(body.get("messages"), tenant.limits.max_messages)
    try:
        messages = tuple(_checked(body, read))
        known = read.known if read is not None else 0
        check_arguments(messages, known, tenant.limits.max_body_values)
        options = parse_options(body.get(OPTIONS_FIELD), max_edits=tenant.limits.max_messages)
        requested, wish = parse_context_management(body.get(CONTEXT_FIELD))
        if wish is not None and options.compact is not None:
            raise OptionError(
                f"{OPTIONS_FIELD}.compact",
                f"{OPTIONS_FIELD}.compact and {CONTEXT_FIELD} both ask for a compaction.",
            )
        annotations = annotations_of(messages)
        check_forgets(messages, annotations)
        scope = shared_scope(annotations)
        check_declared(messages, options.edits)
    except (MessageError, OptionError, DeclaredEditError) as error:
        raise BadRequestError(str(error), param=error.param) from error
    _check_tools(body.get("tools"))
    if bodies is not None:
        read = read or ReadBody(raw, body, body["messages"])
        read.complete()
    return ChatRequest(
        tenant=tenant,
        headers=headers,
        raw=raw,
        body=body,
        messages=messages,
        options=options,
        requested=requested,
        annotations=annotations,
        scope=scope,
        model=model_of(body),
        stream=stream_of(body),
        clock=clock or TurnClock(),
        read=read,
        reader=Reader(tenant.name),
        compaction=merged_wish(options.compact, wish),
    )


def _checked(body: Mapping[str, Any], read: ReadBody | None) -> list[Message]:
    """Return the messages; those from an earlier body have been checked already."""
    if read is None:
        return check_messages(body.get("messages"))
    return check_messages(read.messages, read.known)


def model_of(body: Mapping[str, Any]) -> str:
    """Return the ``model`` field. Raises BadRequestError if it is missing or not a string."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequestError(
            "model must be the name of a model, as a string; GET /v1/models lists them.",
            param="model",
        )
    return model


def stream_of(body: Mapping[str, Any]) -> bool:
    """Return the ``stream`` field. Raises BadRequestError if it isn't a boolean."""
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequestError("stream must be true or false.", param="stream")
    return bool(stream)


def _check_count(messages: object, limit: int) -> None:
    if isinstance(messages, list) and len(messages) > limit:
        raise BadRequestError(
            f"messages has {len(messages)} entries; this proxy's limit is {limit} (max_messages).",
            param="messages",
            code="too_many_messages",
        )


def _check_tools(tools: object) -> None:
    if tools is None:
        return
    if not isinstance(tools, list):
        raise BadRequestError("tools must be a list of tool definitions.", param="tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise BadRequestError(
                f"tools[{index}] must be an object with type and function.", param=f"tools[{index}]"
            )
