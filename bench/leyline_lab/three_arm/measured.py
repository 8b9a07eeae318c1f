"""The server that the three-arm benchmark measures, SGLang or vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..engines.sglang import server_with_control
from ..engines.vllm import DEFAULT_BLOCK, vllm_server
from .clients import BenchClient, CompletionsClient, GenerateClient
from .running import BenchOptions

_RECURRENT_FLAGS = ("--mamba-radix-cache-strategy=extra_buffer", "--mamba-track-interval=64")
"""Flags with which an SGLang of recurrent layers holds most anchors."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A server that runs, or one that is started."""

    url: str | None
    api_key: str | None
    model: str | None
    flags: tuple[str, ...]
    """Flags for the server that is started."""
    log: Path | None
    vllm: bool
    kv_dtype: str
    """Value of SGLang's ``--kv-cache-dtype``."""
    stateful: bool = False
    """True if the model keeps state per sequence."""

    def built(self) -> Measured:
        """Return the same with a folder for the name of a model that keeps state per sequence."""
        from ..stand_ins.state_models import STATE_MODELS, StateKind, build_state_model

        kind = STATE_MODELS.get(self.model or "")
        if kind is None:
            return self
        folder = build_state_model(kind, Path("out") / "models" / str(self.model))
        own = () if kind is StateKind.MELLUM else _RECURRENT_FLAGS
        return replace(self, model=str(folder), flags=(*own, *self.flags), stateful=True)

    @property
    def default_page(self) -> int:
        """Tokens per page, unless they are chosen."""
        return DEFAULT_BLOCK if self.vllm else 1

    @property
    def has_reference(self) -> bool:
        """True if the replay engine can load the same model: vLLM's own has no weights."""
        if self.stateful:
            return False
        return self.model is not None or (self.url is None and not self.vllm)

    def client(self, address: str) -> BenchClient:
        """Return a client of the server, to be closed at the end."""
        kind = CompletionsClient if self.vllm else GenerateClient
        return kind(address, self.api_key)

    @contextmanager
    def serving(self, options: BenchOptions) -> Iterator[str]:
        """Yield the server's address, while it runs.

        Raises:
            EngineProcessError: it doesn't come up.
        """
        name = "vllm" if self.vllm else "sglang"
        log = self.log or Path(f"out/three_arm_{name}.log")
        pool, page = options.pool_tokens, options.page_tokens
        at_once = max(options.concurrency)
        if self.vllm and self.url is not None:
            yield self.url.rstrip("/")
        elif self.vllm:
            flags = (f"--max-num-seqs={at_once}", *self.flags)
            started = vllm_server(self.model, log, pool_tokens=pool, block=page, flags=flags)
            with started as server:
                yield server.url
        else:
            own = (
                f"--page-size={page}",
                f"--kv-cache-dtype={self.kv_dtype}",
                f"--max-total-tokens={pool}",
                f"--max-running-requests={at_once}",
            )
            with server_with_control(self.url, self.model, log, (*own, *self.flags)) as address:
                yield address
