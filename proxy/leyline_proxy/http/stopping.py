"""The refusal of a proxy that is about to stop."""

from __future__ import annotations

from ..errors import TryLaterError


class StoppingError(TryLaterError):
    """The proxy is about to stop; another one may answer."""

    status = 503
    kind = "server_error"
    code = "stopping"

    def __init__(self) -> None:
        super().__init__("This proxy is about to stop. Send the request again.", 1)
