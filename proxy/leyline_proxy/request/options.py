"""Options about edits in a request or from an operator."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from leyline_engine.contract import MAX_BOUNDARY, MAX_GROUPS, RecurrentEdits

from ..model.fields import OPTIONS_FIELD, GroupName, OptionError, ShareName, ToolOrder, field_error
from ..model.undeclared import UNDECLARED_KEYS, OwnMode, UndeclaredRules
from .compaction import CompactOption
from .declared import EDITS_FIELD, DeclaredEdit
from .working_set import ContextOption, check_context


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body field ``leyline`` of a request."""

    policy: str | None = None
    undeclared: Annotated[dict[str, str], msgspec.Meta(max_length=len(UNDECLARED_KEYS))] = {}
    reasoning_edits: OwnMode | None = None
    """The mode of thinking that the template strips; None for the tenant's setting."""
    compaction_edits: OwnMode | None = None
    """The mode of a history that gives way to a summary; None for the tenant's setting."""
    recurrent_edits: RecurrentEdits | None = None
    """The promise about recurrent states; None for the tenant's setting."""
    tool_order: ToolOrder | None = None
    """The order of the tools: as sent, or as the session had them first; None for the tenant's."""
    edits: list[DeclaredEdit] = []
    """At most as many as a request may have messages."""
    boundary: Annotated[int, msgspec.Meta(ge=0, le=MAX_BOUNDARY)] | None = None
    """Number of tokens after each edit to compute again; None for the model's fidelity profile."""
    share: ShareName | None = None
    """Scope within the tenant that may see this turn's splices; empty for this session alone."""
    recall: Literal["off", "hidden", "shown"] | None = None
    """``off`` puts nothing back in this turn; ``shown`` adds what is put back to the account."""
    reuse: Literal["off", "observe", "live"] | None = None
    """The use of content that the engine holds elsewhere; None for the tenant's setting."""
    reuse_groups: Annotated[tuple[GroupName, ...], msgspec.Meta(max_length=MAX_GROUPS)] | None = (
        None
    )
    """Those of the tenant's groups that the turn takes part in; None for all."""
    reuse_margin: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    """The smallest margin, in logits, at which that is trusted; None for the tenant's setting."""
    busts: Literal["off", "sums", "entries"] = "entries"
    """How much of ``leyline.busts`` the answer has."""
    context: ContextOption | None = None
    """Texts to have in the prompt, and to keep out of it; None for what policies leave."""
    compact: CompactOption | None = None
    """Replace a long conversation by a summary of it; None leaves it."""


def parse_options(raw: object, *, max_edits: int) -> RequestOptions:
    """Return the options of a request; None means none were given.

    Args:
        max_edits: most edits that it may declare.

    Raises:
        OptionError: names the field, as in ``leyline.edits[0].message``.
    """
    if raw is None:
        return RequestOptions()
    if not isinstance(raw, dict):
        raise OptionError(OPTIONS_FIELD, f"{OPTIONS_FIELD} must be an object.")
    edits = raw.get("edits")
    if isinstance(edits, list) and len(edits) > max_edits:
        raise OptionError(
            EDITS_FIELD,
            f"{EDITS_FIELD} has {len(edits)} entries; this proxy's limit is {max_edits} "
            "(max_messages).",
        )
    try:
        options = msgspec.convert(raw, RequestOptions)
    except msgspec.ValidationError as error:
        raise _option_error(str(error), raw) from error
    UndeclaredRules.parse(options.undeclared)
    for index, edit in enumerate(options.edits):
        _check_edit(index, edit)
    if options.context is not None:
        check_context(options.context)
    return options


def _option_error(text: str, value: object) -> OptionError:
    known = RequestOptions.__struct_fields__
    if ".edits[" in text:
        known = DeclaredEdit.__struct_fields__
    elif "`$.context" in text:
        known = ContextOption.__struct_fields__
    elif "`$.compact" in text:
        known = CompactOption.__struct_fields__
    return field_error(OPTIONS_FIELD, text, known, value)


def _check_edit(index: int, edit: DeclaredEdit) -> None:
    where = f"{EDITS_FIELD}[{index}]"
    if edit.message < 0:
        raise OptionError(f"{where}.message", f"{where}.message must not be negative.")
    if edit.drop and (edit.chars is not None or edit.replacement is not None):
        raise OptionError(
            f"{where}.drop", f"{where}.drop removes the whole message; leave out the other fields."
        )
    if edit.chars is None:
        return
    start, end = edit.chars
    if not 0 <= start <= end:
        raise OptionError(
            f"{where}.chars", f"{where}.chars must be [start, end], 0 <= start <= end."
        )
    if edit.replacement is None:
        raise OptionError(
            f"{where}.replacement",
            f'{where}.replacement must be the text for these chars; "" deletes them.',
        )
