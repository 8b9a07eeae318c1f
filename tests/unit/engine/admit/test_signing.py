"""Signed envelopes."""

from __future__ import annotations

import msgspec
import pytest

from leyline_engine.admit.hints import read_hints
from leyline_engine.contract import (
    EditPayload,
    Envelope,
    Reason,
    edit_envelope,
    is_signed,
    sign_envelope,
)

ENVELOPE = edit_envelope("m-1", EditPayload(session="s", scope="t", turn="t1"))


def over_the_wire(envelope: Envelope) -> dict[str, object]:
    """The envelope as it arrives: through JSON."""
    decoded: dict[str, object] = msgspec.json.decode(msgspec.json.encode({"kv_hints": envelope}))
    return decoded


def test_a_signed_envelope_is_taken() -> None:
    """The proxy's signed envelope reaches the engine whole."""
    hints = read_hints(over_the_wire(sign_envelope(ENVELOPE, "k")), "k")
    assert hints.invalid is None
    assert hints.payload == EditPayload(session="s", scope="t", turn="t1")


@pytest.mark.parametrize(
    "envelope",
    [
        ENVELOPE,
        sign_envelope(ENVELOPE, "another"),
        msgspec.structs.replace(sign_envelope(ENVELOPE, "k"), message_id="m-2"),
        msgspec.structs.replace(
            sign_envelope(ENVELOPE, "k"),
            actions=edit_envelope("m-1", EditPayload(session="x", scope="t", turn="t1")).actions,
        ),
        msgspec.structs.replace(ENVELOPE, signature="é"),
    ],
    ids=["unsigned", "another secret", "another message", "another payload", "no hexadecimal"],
)
def test_other_envelopes_are_refused_by_name(envelope: Envelope) -> None:
    """The request is served; its receipt says why the edit wasn't taken."""
    assert not is_signed(envelope, "k")
    hints = read_hints(over_the_wire(envelope), "k")
    assert hints.payload is None
    assert hints.invalid is Reason.INVALID_EDIT
    assert hints.message_id == envelope.message_id


def test_without_a_secret_envelopes_need_no_signature() -> None:
    """An engine that shares no secret takes envelopes as they are."""
    assert read_hints(over_the_wire(ENVELOPE)).payload is not None
