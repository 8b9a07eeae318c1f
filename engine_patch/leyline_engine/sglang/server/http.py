"""Leyline's documents on SGLang's own HTTP application, behind SGLang's own API key.

``EngineHttp`` lives in the launching process, which also serves HTTP: it opens the channel before
SGLang starts the schedulers, and adds the routes before SGLang starts to serve. Where SGLang serves
from other processes (``--tokenizer-worker-num``, the Rust server, ``--use-ray``), the routes are
missing, and the proxy takes the engine for one that doesn't splice.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from leyline_engine.admit.hints import envelope_of
from leyline_engine.admit.packed_hints import hints_secret
from leyline_engine.contract import ChatDialect
from leyline_engine.server.answering import AnsweringWithRecords, note_envelope
from leyline_engine.server.channel import ENDPOINT_VARIABLE, ReceiptChannel
from leyline_engine.server.claim_clock import (
    ClaimAnswer,
    ClaimMessage,
    SchedulerSilentError,
)
from leyline_engine.server.endpoints import Endpoints, NoRendererError, special_tokens_of
from leyline_engine.server.leaving import LeavingEngine
from leyline_engine.server.unpacking import Unpacking
from leyline_engine.sglang.hints import CarriesHints, pack_hints
from leyline_engine.sglang.ranks import pin_session

log = logging.getLogger(__name__)

_SERVER = "sglang.srt.entrypoints.http_server"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
CLAIMS_METHOD = "leyline.claims"
"""Method that marks Leyline's messages among SGLang's own of the same kind."""


def register_http() -> None:
    """Hook into this process's HTTP server and tokenizer manager, should it ever start them.

    Does nothing in the processes that a launcher with a channel has started.
    """
    if ENDPOINT_VARIABLE in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    http = EngineHttp()
    for target, hook in (
        (f"{_SERVER}.launch_server", http.before_launch),
        (f"{_SERVER}._setup_and_run_http_server", http.before_serving),
        (f"{_TOKENIZER}._create_tokenized_object", http.before_tokenizing),
    ):
        HookRegistry.register(target, _logging_failures(hook), HookType.BEFORE)


class EngineHttp:
    """The hooks of the launching process, and their common state."""

    def __init__(self) -> None:
        self._channel: ReceiptChannel | None = None
        self._replicas = 1

    def before_launch(self, server_args: Any, *_: Any, **__: Any) -> None:
        """Open the channel; the processes that SGLang starts next inherit its address."""
        os.environ.pop(ENDPOINT_VARIABLE, None)
        if server_args.node_rank > 0:
            log.warning("node %d serves no HTTP: it listens for no receipts", server_args.node_rank)
            return
        self._channel = ReceiptChannel()
        atexit.register(self._channel.close)
        os.environ[ENDPOINT_VARIABLE] = self._channel.endpoint

    def before_serving(
        self, server_args: Any, tokenizer_manager: Any, template_manager: Any, *_: Any, **__: Any
    ) -> None:
        """Add the routes, once the schedulers run."""
        # Processes started from now on don't belong to this engine.
        os.environ.pop(ENDPOINT_VARIABLE, None)
        if self._channel is None:
            return
        if server_args.tokenizer_worker_num > 1:
            log.warning("Leyline's routes need --tokenizer-worker-num 1: none are served")
            return
        from sglang.srt.entrypoints.http_server import app
        from sglang.srt.runtime_context import get_parallel, get_serving

        self._replicas = get_parallel().num_dp_ranks
        endpoints = sglang_endpoints(
            self._channel,
            tokenizer_manager,
            template_manager,
            template_kwargs=get_serving().default_chat_template_kwargs or {},
            replicas=self._replicas,
            secret=hints_secret(),
        )
        app.router.routes.extend(endpoints.routes())
        app.add_middleware(AnsweringWithRecords, records=self._channel.records)
        app.add_middleware(Unpacking)
        app.add_middleware(LeavingEngine, leaving=lambda: tokenizer_manager.gracefully_exit)

    def before_tokenizing(self, _: Any, request: CarriesHints, *__: Any, **___: Any) -> None:
        """Note and bound the request's envelope, and send the request to its session's replica."""
        if isinstance(params := request.sampling_params, dict):
            note_envelope(envelope_of(params.get("custom_params")))
        pack_hints(request)
        pin_session(request, self._replicas)


def sglang_endpoints(
    channel: ReceiptChannel,
    tokenizer_manager: Any,
    template_manager: Any,
    *,
    template_kwargs: Mapping[str, Any],
    replicas: int = 1,
    secret: str | None = None,
) -> Endpoints:
    """Return the handlers of one SGLang server.

    Args:
        tokenizer_manager: SGLang's, with the tokenizer.
        template_manager: SGLang's, with the chat template.
        template_kwargs: arguments of templates, unless a request sets others.
        replicas: see :class:`Endpoints`, as for ``secret``.
    """
    return Endpoints(
        channel,
        partial(_send, tokenizer_manager),
        partial(_renderer_document, tokenizer_manager, template_manager, dict(template_kwargs)),
        replicas=replicas,
        secret=secret,
    )


async def _send(tokenizer_manager: Any, message: ClaimMessage) -> ClaimAnswer:
    """Send a message to the scheduler; :class:`~.claim_clock.ClaimClock` numbers them."""
    from sglang.srt.managers.io_struct import DumperControlReqInput

    body = msgspec.to_builtins(message)
    request: Any = DumperControlReqInput(method=CLAIMS_METHOD, body=body)
    while True:
        outputs = await tokenizer_manager.dumper_control(request)
        if not all(output.success for output in outputs):
            raise SchedulerSilentError("the scheduler failed to carry the command out")
        answers = [
            msgspec.json.decode(output.response[0]["answer"], type=ClaimAnswer)
            for output in outputs
        ]
        for answer in answers:
            if answer.order == message.order and (answer.ledger or not message.question):
                return answer
        # They are late answers to an abandoned message, maybe another tenant's.
        request = None


def _renderer_document(
    tokenizer_manager: Any, templates: Any, template_kwargs: dict[str, Any]
) -> dict[str, Any]:
    tokenizer = tokenizer_manager.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NoRendererError("this engine has no fast tokenizer to show")
    if templates.chat_template_name is not None or templates.python_chat_template is not None:
        raise NoRendererError("this engine renders chats without a Jinja template")
    template = tokenizer.chat_template
    return {
        "chat_template": template if isinstance(template, str) else "",
        "special_tokens": special_tokens_of(tokenizer),
        "tokenizer_json": backend.to_str(),
        "dialect": ChatDialect.SGLANG,
        "takes_parts": templates.jinja_template_content_format == "openai",
        "template_kwargs": template_kwargs,
    }


def _logging_failures(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose failure leaves SGLang running as it would without it."""

    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            log.exception("Leyline's hook %s failed", hook.__name__)

    return guarded
