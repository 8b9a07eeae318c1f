"""The policies and rules of a request: the tenant's, unless the request may choose."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Protocol

from leyline_engine.contract import FidelityProfile, RecurrentEdits
from leyline_policies import Policy, PolicyError, Registry, load_pipeline
from leyline_policies.allowance import Allowance

from ..admission.turn_threads import TurnThreads
from ..errors import BadRequestError, ForbiddenError
from ..model.fields import OPTIONS_FIELD, OptionError
from ..model.undeclared import OwnMode, UndeclaredRules
from ..request.parse import ChatRequest
from ..tenants import Tenant

LONGEST_SPEC = 4096
_CACHED_SPECS = 128
"""Specs whose policies are kept, of all tenants; the one with the most loses one first."""
_CACHED_OF_ONE = 16


class Chooser(Protocol):
    """A source of policies for tenants and models."""

    def choose(self, tenant: str, model: str) -> tuple[Policy, ...]:
        """Return the policies of a tenant's requests for a model."""


class PolicyCatalog:
    """The policies of requests; the same choice gives the same objects.

    Args:
        chooser: chooses if the request doesn't; None for the tenant's policies.
        threads: where specs are read: compiling a pattern may take long.
    """

    def __init__(self, chooser: Chooser | None = None, threads: TurnThreads | None = None) -> None:
        self._chooser = chooser
        self._threads = threads or TurnThreads()
        self._registry: Registry | None = None
        self._loaded: dict[str, OrderedDict[str, tuple[Policy, ...]]] = {}
        self._joined: OrderedDict[
            tuple[int, tuple[Policy, ...]], tuple[tuple[Policy, ...], tuple[Policy, ...]]
        ] = OrderedDict()

    async def load(self, tenant: Tenant, spec: str) -> tuple[Policy, ...]:
        """Return the policies of a request's ``spec``.

        Raises:
            BadRequestError: the spec can't be read, names no policy, or has patterns that a request
                may not bring.
        """
        param = f"{OPTIONS_FIELD}.policy"
        if len(spec) > LONGEST_SPEC:
            raise BadRequestError(f"{param} is longer than {LONGEST_SPEC} characters.", param=param)
        if spec not in self._loaded.get(tenant.name, ()):
            try:
                policies = await self._threads.run(tenant, partial(self._read, spec))
            except PolicyError as error:
                raise BadRequestError(f"{param}: {error}", param=param) from error
            self._keep(tenant.name, spec, policies)
        own = self._loaded[tenant.name]
        own.move_to_end(spec)
        return own[spec]

    def _read(self, spec: str) -> tuple[Policy, ...]:
        if self._registry is None:
            self._registry = Registry.discover()
        return load_pipeline(spec, self._registry, allowance=Allowance())

    def _keep(self, tenant: str, spec: str, policies: tuple[Policy, ...]) -> None:
        """Keep the policies, unless another request has brought the same meanwhile."""
        own = self._loaded.setdefault(tenant, OrderedDict())
        own.setdefault(spec, policies)
        if len(own) > _CACHED_OF_ONE:
            own.popitem(last=False)
        if sum(map(len, self._loaded.values())) > _CACHED_SPECS:
            largest = max(self._loaded, key=lambda name: (len(self._loaded[name]), name != tenant))
            self._loaded[largest].popitem(last=False)
            if not self._loaded[largest]:
                del self._loaded[largest]

    async def chosen(self, request: ChatRequest) -> tuple[Policy, ...]:
        """Return the policies of a request, those of ``context_management`` last.

        Raises:
            BadRequestError: the request names policies that can't be read or don't exist.
        """
        if request.options.policy is not None:
            policies = await self.load(request.tenant, request.options.policy)
        elif self._chooser is not None:
            policies = self._chooser.choose(request.tenant.name, request.model)
        else:
            policies = request.tenant.policies
        return self.joined(policies, request.requested)

    def joined(
        self, policies: tuple[Policy, ...], requested: tuple[Policy, ...]
    ) -> tuple[Policy, ...]:
        """Return ``policies`` followed by ``requested``; the same tuple for equal ones, because
        results computed for it are found by its identity."""
        if not requested:
            return policies
        key = (id(policies), requested)
        known = self._joined.get(key)
        # The stored tuple keeps its identity from being reused.
        if known is None or known[0] is not policies:
            self._joined[key] = known = (policies, (*policies, *requested))
        self._joined.move_to_end(key)
        if len(self._joined) > _CACHED_SPECS:
            self._joined.popitem(last=False)
        return known[1]


async def effective_rules(
    request: ChatRequest, catalog: PolicyCatalog
) -> tuple[tuple[Policy, ...], UndeclaredRules]:
    """Return the policies and the rules for undeclared edits of this request.

    Raises:
        ForbiddenError: the request chooses, and its tenant may not.
        BadRequestError: it chooses something that doesn't exist.
    """
    options, tenant = request.options, request.tenant
    for field, chosen in (
        (f"{OPTIONS_FIELD}.policy", options.policy is not None),
        (f"{OPTIONS_FIELD}.undeclared", options.undeclared),
        (f"{OPTIONS_FIELD}.reasoning_edits", options.reasoning_edits is not None),
        (f"{OPTIONS_FIELD}.compaction_edits", options.compaction_edits is not None),
        (f"{OPTIONS_FIELD}.recurrent_edits", options.recurrent_edits is not None),
        (f"{OPTIONS_FIELD}.context", options.context is not None),
        (f"{OPTIONS_FIELD}.share", options.share is not None),
        (f"{OPTIONS_FIELD}.reuse", options.reuse is not None),
        (f"{OPTIONS_FIELD}.reuse_groups", options.reuse_groups is not None),
        (f"{OPTIONS_FIELD}.reuse_margin", options.reuse_margin is not None),
        ("messages", request.scope is not None),
    ):
        if chosen and not tenant.allow_request_policy:
            raise ForbiddenError(
                f"This tenant's requests may not set {field}; its operator has fixed it.",
                param=field,
            )
    if options.recall in ("hidden", "shown") and not tenant.recall:
        raise ForbiddenError(
            "leyline.recall: this tenant has no recall; its operator can switch it on (recall).",
            param=f"{OPTIONS_FIELD}.recall",
        )
    if not set(options.reuse_groups or ()).issubset(tenant.reuse_groups):
        raise ForbiddenError(
            "A request may leave groups of its tenant, not enter others; they are set by the "
            "operator, as reuse_groups of the tenant.",
            param=f"{OPTIONS_FIELD}.reuse_groups",
        )
    return await catalog.chosen(request), _undeclared(request)


def reasoning_edits(
    request: ChatRequest, rules: UndeclaredRules, profile: FidelityProfile | None
) -> OwnMode:
    """Return the mode of thinking that the template strips: as the request says, or else exact if
    the model's profile says so, or as the tenant has it."""
    asked = request.options.reasoning_edits
    if asked is None and profile is not None and profile.reasoning_edits == "exact":
        return "exact"
    return asked or rules.reasoning


def recurrent_edits(request: ChatRequest) -> RecurrentEdits:
    """Return the promise about recurrent states: as the request says, or as its tenant has it."""
    return request.options.recurrent_edits or request.tenant.recurrent_edits


def effective_share(request: ChatRequest, scope: str | None) -> str:
    """Return the scope that may see this turn's splices; empty for the session alone.

    Args:
        scope: scope that messages name, by the caller's annotation or a policy's.
    """
    own = request.options.share if request.options.share is not None else scope
    return request.tenant.share if own is None else own


def _undeclared(request: ChatRequest) -> UndeclaredRules:
    rules, wanted = request.tenant.undeclared, request.options.undeclared
    rules = replace(rules, compaction=request.options.compaction_edits or rules.compaction)
    if not wanted:
        return rules
    try:
        own = UndeclaredRules.parse(wanted)
    except OptionError as error:
        raise BadRequestError(str(error), param=error.param) from error
    said = frozenset(wanted)
    return replace(
        rules, roles=(rules.roles - said) | own.roles, exact=(rules.exact - said) | own.exact
    )
