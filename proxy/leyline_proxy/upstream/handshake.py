"""The proxy's knowledge of its engine, kept up to date in the background.

An engine whose plugin failed to load looks healthy, so the proxy asks whether it splices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

import structlog

from leyline_engine.contract import (
    ACTION_VERSION,
    CLAIM_ACTION,
    UNPACKS,
    Capability,
    FidelityProfile,
    Mismatch,
    judge,
    profile_of,
)

from ..errors import ProxyError
from ..render.renderer import TEXT_MEMORY_BYTES
from ..telemetry.metrics import Metrics
from .client import NoCapability, UpstreamClient
from .proof import Rendering, examine_rendering

log = structlog.get_logger("leyline.handshake")

PLAIN_ENGINE = "plain"
"""Engine label of one without a capability document: everything passes through."""

CLAIMS = f"{CLAIM_ACTION}@{ACTION_VERSION}"
"""The action of engines that take claims, in a capability."""

UNKNOWN_MODEL = "unknown"
"""Metric label of models that the engine doesn't list: labels are never the caller's text."""


_CONTINUING = frozenset({"sglang", "vllm"})
"""Owners of models on servers that can go on with an answer's beginning."""


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """One finding about the engine; replaced as a whole by the next one."""

    up: bool = False
    problem: str = "not asked yet"
    """The reason that it isn't up."""
    models: tuple[str, ...] | None = None
    """Ids of its models; None if it doesn't report them."""
    owners: frozenset[str] = frozenset()
    """Owners of its models; a server puts its own name there."""
    capability: Capability | None = None
    capability_problem: str = "not asked yet"
    """The reason that there is none."""
    settled: bool = True
    """False if the engine may soon report something else."""
    mismatch: Mismatch | None = None
    """Versions of plugin, engine and proxy that don't fit: edits become ordinary prefills."""
    rendering: Rendering = field(default_factory=Rendering)
    splicing_allowed: bool = True
    profile: FidelityProfile | None = None
    """Fidelity profile of the engine's model."""

    @property
    def splices(self) -> bool:
        """True if edits are sent as directives."""
        return not self.obstacle

    @property
    def obstacle(self) -> str:
        """The reason that edits aren't spliced; empty if they are."""
        if not self.up:
            return f"the engine is down: {self.problem}"
        if self.capability is None:
            return self.capability_problem
        if self.mismatch is not None:
            return str(self.mismatch)
        if not self.capability.splices:
            return self.capability.unsupported_reason or "the engine says that it can't splice"
        if self.rendering.renderer is None:
            return self.rendering.problem
        return "" if self.splicing_allowed else "splicing is switched off (splice: false)"

    @property
    def fix(self) -> str:
        """The remedy for versions that don't fit, or the one that the engine names for what keeps
        it from splicing; empty if none."""
        if self.up and self.mismatch is not None:
            return self.mismatch.fix
        capability = self.capability if self.up else None
        return "" if capability is None or capability.splices else capability.unsupported_fix

    @property
    def engine(self) -> str:
        """The engine's name for labels."""
        return self.capability.engine if self.capability else PLAIN_ENGINE

    @property
    def retains_as(self) -> str:
        """Model and run of the engine; turns retained under another aren't sources. Empty if it
        retains nothing."""
        if self.capability is None:
            return ""
        return f"{self.capability.model_fingerprint}@{self.capability.instance}"

    @property
    def takes_claims(self) -> bool:
        """True if KV can be claimed."""
        capability = self.capability if self.mismatch is None else None
        return capability is not None and CLAIMS in capability.actions

    @property
    def reuses_within(self) -> bool:
        """True if reuse can be asked for in parts of a prompt, of a session's own KV alone."""
        capability = self.capability if self.splices else None
        return capability is not None and capability.reuses and capability.reuse_within

    @property
    def recurrent(self) -> bool:
        """True if the model has recurrent layers, whose states no rotation corrects."""
        state = self.capability.state if self.capability is not None else None
        return state is not None and state.recurrent_layers > 0

    @property
    def continues(self) -> bool:
        """True if it takes ``continue_final_message``; other servers may refuse what they don't
        know."""
        return self.capability is not None or not _CONTINUING.isdisjoint(self.owners)

    @property
    def unpacks(self) -> bool:
        """True if it reads members that are carried through a router."""
        return self.capability is not None and UNPACKS in self.capability.actions

    @property
    def instance(self) -> str:
        """Name of the engine's run; empty if it gives none."""
        return self.capability.instance if self.capability is not None else ""

    def serves(self, model: str) -> bool:
        """Return True if ``model`` (or the base of ``base:adapter``) is on the engine's list."""
        base = model.partition(":")[0]
        return self.models is None or model in self.models or base in self.models


class Handshake:
    """Asks the engine repeatedly for its state; ``status`` is the latest answer.

    Args:
        client: has its own connections; otherwise callers' requests could make the engine look
            down.
        name: the engine's, as a metric label.
        text_memory_bytes: memory for texts that were rendered and tokenised before.
        profiles: fidelity profiles of models.
    """

    def __init__(
        self,
        client: UpstreamClient,
        metrics: Metrics,
        *,
        name: str = "engine",
        text_memory_bytes: int = TEXT_MEMORY_BYTES,
        splice: bool,
        profiles: Sequence[FidelityProfile] = (),
        interval_s: float,
        retry_s: float,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._name = name
        self._text_memory_bytes = text_memory_bytes
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._wake = asyncio.Event()
        self._asking = asyncio.Lock()
        self._splice = splice
        self._profiles = tuple(profiles)
        self._asked_at = float("-inf")
        self._shown: dict[tuple[str, str], None] = {}
        """Model and engine of the existing series."""
        self._facts: tuple[str, ...] = ()
        """Labels of the series that describes the engine."""
        self.status = UpstreamStatus(splicing_allowed=splice)
        self.asked = False
        """True once the engine was asked, whatever it answered."""
        self.news = asyncio.Event()
        """Set when the engine comes up, or another run of it."""

    async def refresh(self) -> UpstreamStatus:
        """Ask now. Never raises for the engine's faults, which are in the status."""
        async with self._asking:
            return await self._refresh()

    async def refresh_if_older(self, age_s: float) -> UpstreamStatus:
        """Return the status, asked again if the last answer is older than ``age_s``."""
        if monotonic() - self._asked_at > age_s:
            return await self.refresh()
        return self.status

    async def current(self) -> UpstreamStatus:
        """Return the status; ask first if the engine was down, as it may be back.

        Callers that arrive during a request share the next one.
        """
        if self.status.up:
            return self.status
        called = monotonic()
        async with self._asking:
            if self._asked_at >= called:
                return self.status
            return await self._refresh()

    async def run(self) -> None:
        """Ask until cancelled: often while the engine is down, seldom while it is up."""
        while True:
            await self.refresh()
            calm = self.status.up and self.status.settled
            pause = self._interval_s if calm else self._retry_s
            self._wake.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue
            # A burst of failing requests must not cause a burst of handshakes.
            await asyncio.sleep(min(self._retry_s, 0.2))

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    def report_failure(self) -> None:
        """Report that a request couldn't reach the engine: ask again soon."""
        self._wake.set()

    async def _refresh(self) -> UpstreamStatus:
        before, self._asked_at = self.status, monotonic()
        try:
            self.status = await self._ask(before)
        except ProxyError as error:
            # Proven renderings are kept: the same engine may be back in a moment.
            self.status = replace(before, up=False, problem=error.message)
        self.asked = True
        self._publish(before)
        return self.status

    async def _ask(self, before: UpstreamStatus) -> UpstreamStatus:
        listed = await self._client.models()
        models = None if listed is None else listed.ids
        found = UpstreamStatus(
            up=True,
            problem="",
            models=models,
            owners=frozenset() if listed is None else listed.owners,
            splicing_allowed=self._splice,
        )
        answer = await self._client.capability()
        if isinstance(answer, NoCapability):
            if before.capability is not None and not answer.settled:
                # A busy engine is the same engine.
                return replace(before, up=True, problem="", models=models, settled=False)
            return replace(found, capability_problem=answer.why, settled=answer.settled)
        rendering = before.rendering
        if before.capability != answer or rendering.renderer is None:
            rendering = await examine_rendering(
                self._client, answer.model, memory_bytes=self._text_memory_bytes
            )
        return replace(
            found,
            capability=answer,
            capability_problem="",
            mismatch=judge(answer),
            rendering=rendering,
            profile=self._profile_of(answer, before.capability),
        )

    def _profile_of(self, now: Capability, before: Capability | None) -> FidelityProfile | None:
        """Return the profile of an engine's model; log a new model that has none."""
        found = profile_of(self._profiles, now.model, now.model_fingerprint)
        model = before.model if before is not None else None
        if self._profiles and found is None and now.model != model:
            log.warning("fidelity_profile_missing", upstream=self._name, model=now.model)
        return found

    def _publish(self, before: UpstreamStatus) -> None:
        status = self.status
        self._metrics.upstream_up.labels(self._name).set(status.up)
        models = status.models or (UNKNOWN_MODEL,)
        shown = dict.fromkeys((model, status.engine) for model in models)
        for model, engine in self._shown.keys() - shown.keys():
            self._metrics.engine_splices.remove(self._name, model, engine)
        for model, engine in shown:
            self._metrics.engine_splices.labels(self._name, model, engine).set(status.splices)
        self._shown = shown
        self._publish_facts(status.capability if status.up else None)
        if (status.up, status.retains_as) != (before.up, before.retains_as):
            self.news.set()
        told = (status.up, status.engine, status.obstacle, status.rendering.source)
        if told != (before.up, before.engine, before.obstacle, before.rendering.source):
            emit = log.info if status.up else log.warning
            emit(
                "engine_status",
                upstream=self._name,
                up=status.up,
                engine=status.engine if status.up else None,
                splices=status.splices,
                obstacle=status.obstacle or None,
                mismatch=status.mismatch.reason.value if status.mismatch else None,
                fix=status.fix or None,
                rendering=status.rendering.source,
                rendering_problem=status.rendering.problem or None,
            )
        if before.retains_as and status.retains_as not in ("", before.retains_as):
            log.warning("engine_restarted", upstream=self._name, engine=status.engine)

    def _publish_facts(self, capability: Capability | None) -> None:
        facts: tuple[str, ...] = ()
        if capability is not None:
            kv, rotary = capability.kv, capability.rotary
            facts = (
                self._name,
                capability.engine,
                capability.engine_version,
                capability.model,
                kv.pool_class if kv is not None else "",
                kv.dtype if kv is not None else "",
                rotary.rope_type if rotary is not None else "",
                capability.protocol_version,
            )
        if self._facts and self._facts != facts:
            self._metrics.engine_info.remove(*self._facts)
        if facts:
            self._metrics.engine_info.labels(*facts).set(1)
        self._facts = facts
