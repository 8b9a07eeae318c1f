"""Errors in OpenAI's shape."""

from __future__ import annotations

from starlette.responses import JSONResponse

from leyline_engine.replay.engine import PoolExhaustedError, PromptTooLongError
from leyline_engine.replay.service import EngineOverloadedError, EngineStoppedError
from leyline_engine.replay.text.chat import TemplateFailedError


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {"retry-after": "1"} if self.status == 503 else None
        return JSONResponse(self.body(), self.status, headers)


def to_api_error(error: Exception) -> ApiError:
    """The answer to an error of the engine or of the parts around it."""
    if isinstance(error, ApiError):
        return error
    return _engine_error(error)


def _engine_error(error: Exception) -> ApiError:
    match error:
        case PromptTooLongError():
            return ApiError(400, str(error), param="messages", code="context_length_exceeded")
        case TemplateFailedError():
            return ApiError(400, str(error), param="messages", code="invalid_messages")
        case EngineOverloadedError():
            return _unavailable(str(error), "engine_overloaded")
        case EngineStoppedError():
            return _unavailable(str(error), "engine_stopped")
        case PoolExhaustedError():
            return _unavailable("the KV pool has no room for this request", "kv_pool_exhausted")
        case _:
            return ApiError(
                500,
                "the engine failed on this request",
                kind="server_error",
                code="internal_error",
            )


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code)
