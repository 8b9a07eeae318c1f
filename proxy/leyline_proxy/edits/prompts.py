"""Removal of forgotten text from bare prompts, which aren't messages.

Each text is searched as a user's only message. Nothing of it is remembered, so other edits would
save nothing and aren't made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from leyline_policies import Policy
from leyline_policies.faults import may_forget

from ..admission.turn_threads import TurnThreads
from ..errors import BadRequestError, PolicyFailedClosedError
from ..model.fields import OPTIONS_FIELD
from ..request.declared import EDITS_FIELD
from ..request.parse import ChatRequest, parse_chat
from ..request.wire import replace_members
from ..tenants import Tenant
from ..upstream.handshake import UpstreamStatus
from .editing import EditInput
from .editor import Editor
from .rules import PolicyCatalog, effective_rules

SEARCHED = ("prompt", "suffix")
"""Members of a bare completion that the model reads."""


class PromptSearch:
    """Removes from bare prompts the text that policies forget."""

    def __init__(
        self, editor: Editor, catalog: PolicyCatalog, threads: TurnThreads | None = None
    ) -> None:
        self._editor = editor
        self._catalog = catalog
        self._threads = threads or TurnThreads()

    async def searched(
        self, tenant: Tenant, raw: bytes, body: Mapping[str, Any], status: UpstreamStatus
    ) -> bytes:
        """Return the body of a completion for the engine; ``raw`` if nothing is removed.

        Args:
            body: ``raw``, decoded.
            status: status of the intended engine.

        Raises:
            BadRequestError, ForbiddenError: the request's ``leyline`` options are wrong, or a
                prompt has token ids, which can't be searched.
            PolicyFailedClosedError: a policy that forgets failed.
        """
        asked = _request(tenant, body)
        if asked.options.edits:
            raise BadRequestError(
                f"{EDITS_FIELD} are edits of messages, and a bare completion has none; "
                "use /v1/chat/completions.",
                param=EDITS_FIELD,
            )
        policies, _ = await effective_rules(asked, self._catalog)
        forgetting = tuple(filter(may_forget, policies))
        if not forgetting:
            return raw
        changed: dict[str, bytes] = {}
        for name in SEARCHED:
            value = body.get(name)
            if value is None:
                continue
            texts = [
                await self._text(_saying(asked, text), forgetting, status)
                for text in _texts(name, value, tenant.limits.max_messages)
            ]
            after = texts[0] if isinstance(value, str) else texts
            if after != value:
                changed[name] = msgspec.json.encode(after)
        return replace_members(raw, changed) if changed else raw

    async def _text(
        self, request: ChatRequest, policies: tuple[Policy, ...], status: UpstreamStatus
    ) -> str:
        given = EditInput(request, policies, None, status, 0)
        work = partial(self._editor.edit, given, None, only_forgets=True)
        messages = (await self._threads.run(request.tenant, work)).prepared.messages
        text = messages[0].get("content") if len(messages) == 1 else None
        if not isinstance(text, str):
            raise PolicyFailedClosedError(policies[0].name, "bad_message")
        return text


def _request(tenant: Tenant, body: Mapping[str, Any]) -> ChatRequest:
    """Return a chat request with the completion's options."""
    members = {"model": body.get("model"), "messages": [{"role": "user", "content": ""}]}
    if OPTIONS_FIELD in body:
        members[OPTIONS_FIELD] = body[OPTIONS_FIELD]
    return parse_chat(msgspec.json.encode(members), {}, tenant)


def _saying(request: ChatRequest, text: str) -> ChatRequest:
    """Return the request with the text of a prompt as its message."""
    return replace(request, messages=({"role": "user", "content": text},))


def _texts(name: str, value: object, most: int) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRequestError(
            f"{name} must be text, or a list of texts: policies that hold here take out what the "
            "model must not read, and can't search token ids.",
            param=name,
        )
    if len(texts) > most:
        raise BadRequestError(f"{name} has more than {most} texts.", param=name)
    return texts
