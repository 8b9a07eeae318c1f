"""The reference to a turn that an engine retains."""

from __future__ import annotations

from typing import Annotated

import msgspec

Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Position = Annotated[int, msgspec.Meta(ge=0)]


class SourceRef(msgspec.Struct, frozen=True):
    """A retained turn from which this request takes KV."""

    turn: Identifier
    length: Position
    """Tokens of the turn: its prompt and the engine's output."""
    digest: str
    """:func:`~leyline_engine.contract.tokens.token_digest` over those tokens, sealed with the
    secret that proxy and engine share."""
    session: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Another session of the same tenant scope, for reuse; empty for the payload's own. An edit
    that names another session is refused."""
