"""The end of vLLM requests that claims leave no room for, as the HTTP server's clients see it.

The scheduler ends such a request with an error and the reason. vLLM would answer any such error
with 500; this one is 503, and names the claims in the way. A stream, which has begun by then, ends
with an error of the same words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import wraps
from typing import Any

from leyline_engine.contract import Reason

_PREFIX = f"{Reason.REFUSED_BY_CLAIM.value}: "


def explaining_refusals(
    generate: Callable[..., AsyncIterator[Any]],
) -> Callable[..., AsyncIterator[Any]]:
    """Wrap the generation of vLLM's client of its engine.

    Raises:
        RetryableRequestError: from the wrapped generation, if the scheduler refused the request.
    """
    from vllm.exceptions import RetryableRequestError

    @wraps(generate)
    async def generated(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for output in generate(*args, **kwargs):
            for each in output.outputs if output.finished else ():
                if each.finish_reason == "error" and str(each.stop_reason).startswith(_PREFIX):
                    raise RetryableRequestError(str(each.stop_reason))
            yield output

    return generated
