"""Errors in OpenAI's shape."""

from __future__ import annotations

from starlette.responses import JSONResponse

from leyline_engine.contract import Reason
from leyline_replay.engine import PoolExhaustedError, PromptTooLongError, RefusedByClaimError
from leyline_replay.service import EngineOverloadedError, EngineStoppedError
from leyline_replay.text.chat import TemplateFailedError


class ApiError(Exception):
    """A request's answer is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = 1,
    ) -> None:
        """
        Args:
            retry_after_s: ``Retry-After`` of an answer with status 503; None leaves it out.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        tells = self.status == 503 and self.retry_after_s is not None
        headers = {"retry-after": str(self.retry_after_s)} if tells else None
        return JSONResponse(self.body(), self.status, headers)


def to_api_error(error: Exception) -> ApiError:
    """Return the answer to an error of the engine or of the parts around it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RefusedByClaimError):
        wait_ms = error.refusal.retry_after_ms
        seconds = None if wait_ms is None else max(1, -(-wait_ms // 1000))
        return _unavailable(str(error), Reason.REFUSED_BY_CLAIM, retry_after_s=seconds)
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


def _unavailable(message: str, code: str, *, retry_after_s: int | None = 1) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, retry_after_s=retry_after_s)
