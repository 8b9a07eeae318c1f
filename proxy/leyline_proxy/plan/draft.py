"""A turn up to its prompt: its messages, and their tokens as far as the engine isn't needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from leyline_engine.contract import TOKENS_PATH

from ..edits.editing import Edited
from ..errors import BadRequestError
from ..model.messages import has_media
from ..model.prepared import Prepared
from ..model.rendered import Rendered
from ..model.verdicts import Verdict
from ..overflow import CODE
from ..render import PROMPT_MEMBERS, PromptTooLargeError, RenderError
from ..telemetry.metrics import Metrics
from .plan_input import PlanInput

log = structlog.get_logger("leyline.turn")

LONGEST_TOKEN = 16
"""Bytes of a prompt's text per token of the context window; with more, it won't fit."""


class LongPromptError(BadRequestError):
    """The prompt can't fit into the model's context.

    Args:
        size: bytes of the prompt's text.
        context: tokens of the context.
    """

    code = CODE

    def __init__(self, size: int, context: int) -> None:
        super().__init__(
            f"The prompt is too long: its text has {size:,} bytes, and the model's context is "
            f"{context:,} tokens. Send fewer or shorter messages.",
            param="messages",
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """A turn up to its prompt."""

    edited: Edited
    rendered: Rendered | None
    """None if the prompt can't be rendered here as the engine would."""
    size: int | None = None
    """Bytes of the prompt's text, if it was too long to be tokenised."""
    question: Mapping[str, Any] | None = field(default=None, repr=False)
    """The question to the engine for the tokens; None if they are known, or of no use."""
    standing: Mapping[int, Verdict] = field(default_factory=dict)
    """Verdicts of earlier turns, by index in the client's list."""


def draft_turn(given: PlanInput, edited: Edited, metrics: Metrics, *, runs: bool = True) -> Draft:
    """Render a turn's messages, as far as possible without the engine.

    Args:
        runs: False if the turn is only counted. The engine is then asked whether it splices or
            not, and about prompts of any size.
    """
    with metrics.stage("render"):
        try:
            rendered = _render(given, edited.prepared)
        except PromptTooLargeError as error:
            return Draft(edited, None, error.size)
        if rendered is not None:
            return Draft(edited, rendered)
        prepared, status = edited.prepared, given.status
        known = status.up and status.rendering.renderer is not None
        if not (status.splices if runs else known) or not _is_of(given):
            return Draft(edited, None)
        question = _question(given, prepared)
        if not runs or (size := _question_size(given, prepared, question)) <= _longest(given):
            return Draft(edited, None, question=question)
        # The data of pictures isn't text.
        return Draft(edited, None, None if has_media(prepared.messages) else size)


def _question(given: PlanInput, prepared: Prepared) -> Mapping[str, Any]:
    """Return the question to the engine for the tokens of a prompt."""
    status, body = given.status, given.request.body
    names = body if status.rendering.tokens_path == TOKENS_PATH else PROMPT_MEMBERS
    steering = {name: body[name] for name in names if body.get(name) is not None}
    return {**steering, "model": given.request.model, "messages": prepared.messages}


def _question_size(given: PlanInput, prepared: Prepared, question: Mapping[str, Any]) -> int:
    """Return the bytes of a question, or more if these are few enough."""
    size = len(given.request.raw)
    if size > _longest(given) or not prepared.sent_as_given:
        return len(msgspec.json.encode(question))
    return size


def _render(given: PlanInput, prepared: Prepared) -> Rendered | None:
    """Return a turn's prompt; None if it can't be rendered here.

    Raises:
        PromptTooLargeError: its text is too long for the context.
    """
    rendering = given.status.rendering
    if rendering.renderer is None or not rendering.proven or not _is_of(given):
        return None
    try:
        return rendering.renderer.read_by(given.request.reader).render_request(
            prepared.messages, given.request.body, lasting=True, max_bytes=_longest(given)
        )
    except PromptTooLargeError:
        raise
    except RenderError:
        return None  # left to the engine, which renders or refuses
    except Exception as error:  # a chat template may raise anything; the engine will report it
        log.warning("render_failed", error=type(error).__name__)
        return None


def _is_of(given: PlanInput) -> bool:
    """Return True if the known facts of the engine's model apply to the request's."""
    capability = given.status.capability
    return capability is not None and capability.is_of(given.request.model)


def _longest(given: PlanInput) -> int:
    """Return the bytes of the longest text that is tokenised for the engine's context."""
    capability = given.status.capability
    return capability.max_context * LONGEST_TOKEN if capability is not None else 0
