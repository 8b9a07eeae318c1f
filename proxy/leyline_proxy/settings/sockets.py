"""Settings of WebSocket connections."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

Seconds = Annotated[float, Field(gt=0)]


class SocketSettings(BaseModel):
    """Limits of the connections on which agents ask for responses over WebSocket."""

    max_websockets: Annotated[int, Field(ge=0)] = 256
    """Open WebSocket connections of one tenant at one worker. With 0 there are none: the proxy
    answers 426, and agents such as Codex continue over HTTP."""
    websocket_idle_s: Seconds = 900.0
    """A WebSocket connection without a request for this long is closed."""
    websocket_life_s: Seconds = 3600.0
    """Longest life of a WebSocket connection. It ends after the response under way."""
