"""All parts of one application instance, created once from its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from secrets import token_hex

from starlette.types import ASGIApp

from ..admission import AdmissionGate, FairPlaces
from ..admission.turn_threads import TurnThreads
from ..apis.anthropic.diagnostics import RequestPrints
from ..budgets import BudgetReports, Budgets
from ..claims.pinning import Pinning
from ..claims.service import ClaimService
from ..claims.watch import ClaimWatch
from ..edits.costs import CostBooks
from ..edits.editor import Editor
from ..edits.policy_file import PolicyFile
from ..edits.prompts import PromptSearch
from ..edits.rules import PolicyCatalog
from ..edits.schedule import Timing
from ..edits.sensitive import sensitive_content
from ..hub.budgets import BudgetsOfAll
from ..hub.fleet import Fleet
from ..hub.places import SharedPlaces
from ..live.feed import LiveFeed
from ..model.history import history_key
from ..observe.auditor import Auditor
from ..observe.eviction_rates import EvictionRates
from ..observe.live import LiveTurns
from ..observe.log import TurnLog
from ..observe.turn_metrics import RecallMetrics, TurnMetrics
from ..observe.turn_traces import TurnTraces
from ..parts.recallable_parts import RecallableParts
from ..plan.planner import Planner
from ..request.bodies import BodyMemory
from ..sessions import SessionStore
from ..sessions.compactions import CompactionSeal
from ..sessions.contents import ContentIndex
from ..sessions.stored_responses import AllResponses, ResponseStore
from ..settings import Settings, secret_of
from ..shutdown import Shutdown
from ..telemetry.claim_metrics import ClaimMetrics
from ..telemetry.metrics import Metrics
from ..telemetry.tracing import Tracing
from ..tenants import KeyFile, TenantDirectory, build_directory
from ..turns import TurnOpener, TurnSettler, TurnsUnderWay
from ..turns.charging import TurnCharges
from ..turns.erasure import Erasures
from ..turns.forgets import SessionForgets
from ..turns.named import NamedSources
from ..turns.placing import Placing
from ..turns.predecessors import Predecessors
from ..turns.proving import ForgetProofs
from ..turns.quarantine import Quarantines
from ..turns.recalling import Recalls
from ..turns.replanning import RecallPlans
from ..turns.routing import Routing
from ..turns.writing import Writing
from ..upstream.pool import ReplicaPool
from ..warm_start.service import WarmStart
from .audit import build_auditor
from .identity import build_tokens
from .memories import Kept, build_kept
from .recall import build_recall
from .stores import build_charges, build_debts, build_stores
from .tls import TlsContexts, build_tls
from .tracing import build_tracing
from .upstreams import build_pool
from .warm_start import build_warm_start
from .workers import Files, Worker, build_feed, build_fleet


def _side_places() -> FairPlaces:
    return FairPlaces(64, of_tenant=8, waiting=64, wait_s=30.0)


def _scrapes() -> FairPlaces:
    return FairPlaces(1, of_tenant=1, waiting=32, wait_s=10.0)


@dataclass(frozen=True, slots=True)
class Services:
    """The parts that routes use."""

    settings: Settings
    tenants: TenantDirectory
    store: SessionStore
    responses: ResponseStore
    connected: ResponseStore
    """Responses that only their own connection may continue."""
    metrics: Metrics
    pool: ReplicaPool
    turns: TurnOpener
    ends: TurnSettler
    budgets: Budgets
    budget_reports: BudgetReports
    """What callers and operators see of budgets, with what other workers know."""
    charges: TurnCharges
    routing: Routing
    prompts: PromptSearch
    erasures: Erasures
    named: NamedSources
    quarantines: Quarantines
    proofs: ForgetProofs
    recalls: Recalls
    recall_metrics: RecallMetrics
    evictions: EvictionRates
    kept: Kept
    """What forgets and deletions reach beside the store."""
    files: Files
    claims: ClaimService
    claim_watches: tuple[ClaimWatch, ...]
    policy_file: PolicyFile | None
    key_file: KeyFile | None
    gate: AdmissionGate
    audit: Auditor
    feed: LiveFeed
    tracing: Tracing
    warm_start: WarmStart | None = None
    recall: RecallableParts | None = None
    compactions: CompactionSeal = field(default_factory=CompactionSeal)
    shutdown: Shutdown = field(default_factory=Shutdown)
    bodies: BodyMemory = field(default_factory=BodyMemory)
    prints: RequestPrints = field(default_factory=RequestPrints)
    side_places: FairPlaces = field(default_factory=_side_places)
    """For routes besides the turns'."""
    scrapes: FairPlaces = field(default_factory=_scrapes)
    """For the text of all metrics, which nobody needs a key for."""
    tls: TlsContexts = field(default_factory=TlsContexts)
    fleet: Fleet | None = None
    """What operators tell all workers; None if there are no others."""


def build_services(
    settings: Settings,
    engine_app: ASGIApp | None,
    tracing: Tracing | None = None,
    worker: Worker | None = None,
) -> Services:
    """Wire the parts together; nothing is connected or started yet.

    Args:
        tracing: replaces the tracing of the settings.
        worker: this process's place among others of one proxy; None if it is alone.

    Raises:
        leyline_policies.PolicyError: the policy file, or the setting ``sensitive``, is wrong.
        ValueError: neither ``settings.upstream`` nor an engine application is given; also the
            errors of :func:`~leyline_proxy.tenants.build_directory` and
            :func:`~leyline_proxy.wiring.tracing.build_tracing`.
    """
    metrics = Metrics()
    metrics.build_info.labels(version("leyline-kv")).set(1)
    tenants = build_directory(settings, build_tokens(settings, metrics))
    hints_secret = secret_of(settings.hints_secret)
    link = worker.link if worker is not None else None
    tls = build_tls(settings, metrics)
    engine_socket = worker.engine_socket if worker is not None else None
    pool = build_pool(settings, engine_app, metrics, engine_socket, tls.engines)
    store, responses, connected = build_stores(settings, link)
    erasable = responses if connected is responses else AllResponses(responses, connected)
    file = settings.policies_file
    policy_file = (
        PolicyFile(file, metrics, tenants=lambda: tenants.names) if file is not None else None
    )
    keys = settings.api_keys_file
    costs = CostBooks()
    editor = Editor(
        metrics,
        costs,
        policy_timeout_s=settings.policy_timeout_s,
        timing=_timing(settings),
        sensitive=sensitive_content(settings.sensitive),
        on_fault=settings.on_fault,
    )
    # Without a shared secret, chains and verdicts are valid only in this proxy.
    own_secret = link.secret if link is not None else token_hex()
    history = history_key(settings.history_secret() or own_secret)
    planner = Planner(metrics, editor, threads := TurnThreads(), verdict_key=history)
    audit = build_auditor(settings, metrics, link)
    leads = link is None or link.leads
    shown = ClaimMetrics(metrics, tenants)
    watches = {
        replica.name: ClaimWatch(
            replica,
            metrics,
            shown,
            interval_s=settings.claims_interval_s,
            audit=audit if leads else Auditor(),
            counts=leads,
        )
        for replica in pool
    }
    claims = ClaimService(
        store=store,
        pool=pool,
        watches=watches,
        hints_secret=hints_secret,
        allowed=lambda name: tenant.upstreams if (tenant := tenants.get(name)) else None,
    )
    erasures = Erasures(
        pool,
        store,
        metrics,
        audit,
        build_debts(settings, link),
        hints_secret=hints_secret,
        retry_s=settings.handshake_interval_s,
        max_owed=settings.max_owed_forgets,
    )
    warm_start = build_warm_start(
        settings, tenants=tenants, pool=pool, store=store, erasures=erasures, metrics=metrics
    )
    keeping = (warm_start.keeper,) if warm_start is not None else ()
    recall = build_recall(settings, metrics, link)
    evictions = EvictionRates(metrics)
    fleet = build_fleet(link, pool) if link is not None else None
    bodies = BodyMemory(settings.text_memory_bytes // 8)
    places = build_kept(
        bodies=bodies,
        editor=editor,
        pool=pool,
        store=store,
        evictions=evictions if recall is not None else None,
        fleet=fleet,
        at_rest=(*keeping, *((recall,) if recall is not None else ())),
    )
    feed = build_feed(metrics, link)
    placing = Placing(pool)
    under_way = TurnsUnderWay(store, placing, audit)
    catalog = PolicyCatalog(policy_file, threads)
    named = NamedSources(ContentIndex())
    predecessors = Predecessors(store, history)
    recalls = Recalls(recall, calls=settings.recall_calls, tokens=settings.recall_tokens)
    routing = Routing(pool, metrics, affinity_header=settings.affinity_header)
    turns = TurnOpener(
        under_way=under_way,
        store=store,
        pool=pool,
        planner=planner,
        catalog=catalog,
        metrics=metrics,
        named=named,
        hints_secret=hints_secret,
        history_key=history,
        plans=RecallPlans(planner, recalls, erasures, places.everywhere, places.of_workers),
        bodies=bodies,
        predecessors=predecessors,
        routing=routing,
        erasures=erasures,
    )
    forgets = SessionForgets(
        store=store,
        responses=erasable,
        placing=placing,
        erasures=erasures,
        named=named,
        kept=places.everywhere,
        parts=recall,
    )
    pinning = Pinning(claims)
    recall_metrics = RecallMetrics(metrics, evictions)
    counts = (TurnMetrics(metrics), recall_metrics)
    shows = (*counts, TurnTraces(), audit, LiveTurns(feed), pinning, TurnLog())
    charges = build_charges(settings, metrics, link)
    ends = TurnSettler(
        under_way=under_way,
        pool=pool,
        costs=costs,
        erasures=erasures,
        routing=routing,
        writing=Writing(
            store,
            metrics,
            opener=turns,
            hints_secret=hints_secret,
            erasures=erasures,
            routing=routing,
        ),
        pinning=pinning,
        metrics=metrics,
        observers=(named, predecessors, *shows, *keeping),
        retained_turns=settings.retained_turns,
        history_key=history,
        charges=charges,
        price_of=settings.price_of,
        memories=places.of_workers,
    )
    key_file = KeyFile(keys, tenants.replace, metrics) if keys is not None else None
    return Services(
        settings,
        tenants,
        store,
        responses,
        connected,
        metrics,
        pool,
        turns,
        ends,
        charges.budgets,
        BudgetsOfAll(charges.budgets, fleet) if fleet is not None else charges.budgets,
        charges,
        routing,
        PromptSearch(editor, catalog, threads),
        erasures,
        named,
        Quarantines(forgets, audit=audit, key=history),
        ForgetProofs(forgets, pool, audit=audit, hints_secret=hints_secret),
        recalls,
        recall_metrics,
        evictions,
        places,
        Files(key_file, policy_file, fleet, tls, tenants.tokens),
        claims,
        tuple(watches.values()),
        policy_file,
        key_file,
        AdmissionGate(
            settings.max_concurrent,
            metrics,
            places=SharedPlaces(link) if link is not None else None,
        ),
        audit,
        feed,
        tracing or build_tracing(settings, grace_s=settings.shutdown_grace_s),
        warm_start,
        recall,
        CompactionSeal(
            [secret.get_secret_value() for secret in settings.session_secret], own_secret
        ),
        bodies=bodies,
        tls=tls,
        fleet=fleet,
    )


def _timing(settings: Settings) -> Timing | None:
    if settings.edit_timing == "now":
        return None
    return Timing(
        carry=settings.edit_carry,
        need=settings.edit_need,
        pressure=settings.edit_pressure,
        splicing_waits=settings.edit_timing == "wait",
    )
