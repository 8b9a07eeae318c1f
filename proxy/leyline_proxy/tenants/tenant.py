"""A tenant with its effective rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from leyline_engine.contract import RecurrentEdits
from leyline_policies import Policy, SpecError, load_pipeline

from ..model.budgets import WindowLimit
from ..model.fields import ToolOrder
from ..model.undeclared import UndeclaredRules
from ..settings import Settings, TenantSettings, secret_of
from ..settings.budgets import window_limits
from ..settings.cache_scope import cache_salt
from ..settings.off import Reuse

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's limits. The defaults are those of a proxy without settings."""

    max_concurrent: int | None = None
    """Requests under way; None for as many as the proxy can take."""
    max_queued: int = 128
    queue_timeout_s: float = 60.0
    weight: float = 1.0
    """Share of free places among tenants with waiting requests."""
    requests_per_minute: float | None = None
    max_body_bytes: int = 32 * 1024 * 1024
    max_messages: int = 20_000
    max_body_values: int = 200_000
    budgets: tuple[WindowLimit, ...] = ()
    """What it may use, by window."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant with its effective rules."""

    name: str
    policies: tuple[Policy, ...]
    undeclared: UndeclaredRules
    allow_request_policy: bool
    recurrent_edits: RecurrentEdits = RecurrentEdits.EXACT
    """The promise of its amortized edits about recurrent states."""
    tool_order: ToolOrder = "sent"
    """The order of a request's tools: as sent, or as its session had them first."""
    share: str = ""
    """Scope that may see the splices of the tenant's turns; empty for each session alone."""
    reuse: Reuse = "off"
    """The use of content that its engine holds elsewhere."""
    reuse_groups: tuple[str, ...] = ()
    """Groups of tenants that may take KV of its content, and it of theirs."""
    reuse_margin: float = 0.0
    """The smallest margin, in logits, at which that is trusted; 0 trusts it always."""
    upstreams: frozenset[str] | None = None
    """Names of the upstreams that may serve it; None for all."""
    cache_salt: str | None = None
    """Separates its KV from other tenants'; None shares equal prefixes with all."""
    limits: TenantLimits = TenantLimits()
    warm_start: bool = True
    """False if none of its prompts are kept for a warm start."""
    recall: bool = False
    """True if texts that policies evict can be brought back."""
    forward_credentials: bool = False
    """True if the caller's own credentials go upstream, in place of the proxy's."""


def build_tenant(name: str, settings: Settings, *, alone: bool = False) -> Tenant:
    """Return the tenant called ``name``, with its own settings and defaults from the proxy's.

    Args:
        alone: True if there can be no other.

    Raises:
        leyline_policies.PolicyError: an unknown policy or a bad parameter.
        leyline_proxy.request.parse.OptionError: a bad rule for undeclared edits.
    """
    own = settings.tenants.get(name, TenantSettings())
    policy = settings.policy if own.policy is None else own.policy
    undeclared = settings.undeclared if own.undeclared is None else own.undeclared
    allow = own.allow_request_policy
    scope = settings.cache_scope if own.cache_scope is None else own.cache_scope
    fair_part = max(1, int(settings.max_concurrent * settings.max_tenant_share))
    return Tenant(
        name=name,
        policies=_policies(
            policy, ("policy",) if own.policy is None else ("tenants", name, "policy")
        ),
        undeclared=replace(
            UndeclaredRules.parse(undeclared),
            reasoning=own.reasoning_edits or settings.reasoning_edits,
            compaction=own.compaction_edits or settings.compaction_edits,
        ),
        allow_request_policy=settings.allow_request_policy if allow is None else allow,
        recurrent_edits=own.recurrent_edits or settings.recurrent_edits,
        tool_order=own.tool_order or settings.tool_order,
        share=own.share,
        reuse=settings.reuse if own.reuse is None else own.reuse,
        reuse_groups=own.reuse_groups,
        reuse_margin=_own(own.reuse_margin, settings.reuse_margin),
        upstreams=frozenset(own.upstreams) if own.upstreams is not None else None,
        cache_salt=(
            cache_salt(name, secret_of(settings.hints_secret)) if scope == "tenant" else None
        ),
        limits=TenantLimits(
            max_concurrent=own.max_concurrent or (None if alone else fair_part),
            max_queued=_own(own.max_queued, settings.max_queued),
            queue_timeout_s=_own(own.queue_timeout_s, settings.queue_timeout_s),
            weight=own.weight,
            requests_per_minute=own.requests_per_minute,
            max_body_bytes=_own(own.max_body_bytes, settings.max_body_bytes),
            max_messages=_own(own.max_messages, settings.max_messages),
            max_body_values=_own(own.max_body_values, settings.max_body_values),
            budgets=window_limits(settings.budgets if own.budgets is None else own.budgets),
        ),
        warm_start=own.warm_start,
        recall=(settings.recall if own.recall is None else own.recall) == "on",
        forward_credentials=own.forward_credentials,
    )


class PolicySettingError(SpecError):
    """Policies of a setting that are wrong.

    Args:
        loc: path of the setting.
    """

    def __init__(self, loc: tuple[str, ...], problem: SpecError) -> None:
        super().__init__(f"{'.'.join(loc)}: {problem}")
        self.loc = loc


def _policies(spec: str | None, loc: tuple[str, ...]) -> tuple[Policy, ...]:
    """Return a setting's policies.

    Raises:
        PolicySettingError: they are wrong.
    """
    try:
        return tuple(load_pipeline(spec)) if spec else ()
    except SpecError as error:
        raise PolicySettingError(loc, error) from error


def _own(own: N | None, of_proxy: N) -> N:
    return of_proxy if own is None else own
