"""The stores of the settings, budgets among them."""

from __future__ import annotations

from ..budgets import Budgets
from ..budgets.redis import RedisBudgetStore
from ..budgets.store import BudgetStore, MemoryBudgetStore
from ..debts import DebtStore, MemoryDebtStore
from ..debts.folder import FolderDebtStore
from ..debts.redis import RedisDebtStore
from ..hub.budgets import DIED, NotedBudgetStore, SharedBudgetStore
from ..hub.debts import SharedDebtStore
from ..hub.link import HubLink
from ..hub.responses import SharedResponses
from ..hub.sessions import SharedSessions
from ..sessions.memory import MemorySessionStore
from ..sessions.redis import RedisLink, RedisOptions, RedisResponseStore, RedisSessionStore, Seal
from ..sessions.store import SessionStore
from ..sessions.stored_responses import MemoryResponseStore, ResponseShelf, ResponseStore
from ..settings import Settings
from ..settings.sessions import MEMORY
from ..telemetry.metrics import Metrics
from ..turns.charging import TurnCharges


def build_response_shelf(settings: Settings) -> ResponseShelf:
    """Return the shelf of stored responses of one process, or of the hub."""
    return ResponseShelf(
        max_responses=settings.max_stored_responses,
        max_bytes=settings.max_stored_response_bytes,
        ttl_s=settings.stored_response_ttl_s,
    )


def build_stores(
    settings: Settings, link: HubLink | None = None
) -> tuple[SessionStore, ResponseStore, ResponseStore]:
    """Return the stores for sessions, for responses, and for those of connections; nothing is
    connected yet.

    Stored responses are all text, so they are in Redis only if encrypted. Those of connections are
    in memory only.

    Args:
        link: to the hub, which then has what isn't in Redis.
    """
    responses: ResponseStore
    if link is not None:
        responses = SharedResponses(link)
    else:
        responses = MemoryResponseStore(build_response_shelf(settings))
    connected = responses
    if settings.session_store.get_secret_value() == MEMORY:
        if link is not None:
            cached = settings.max_session_bytes // (4 * settings.workers)
            return SharedSessions(link, max_cached_bytes=cached), responses, connected
        memory = MemorySessionStore(
            max_sessions=settings.max_sessions,
            max_bytes=settings.max_session_bytes,
            ttl_s=settings.session_ttl_s,
            idle_pack_s=settings.session_idle_s,
        )
        return memory, responses, connected
    redis = RedisLink(redis_options(settings))
    seal = Seal([secret.get_secret_value() for secret in settings.session_secret])
    sessions = RedisSessionStore(
        redis,
        ttl_s=settings.session_ttl_s,
        seal=seal,
        prefix=settings.redis_prefix,
        max_session_bytes=settings.redis_max_session_bytes,
        max_sessions=settings.redis_max_sessions,
    )
    if seal.hides:
        responses = RedisResponseStore(
            redis,
            ttl_s=settings.stored_response_ttl_s,
            seal=seal,
            prefix=settings.redis_prefix,
            max_bytes=settings.redis_max_session_bytes,
            max_responses=settings.max_stored_responses,
        )
    return sessions, responses, connected


def build_debts(settings: Settings, link: HubLink | None = None) -> DebtStore:
    """Return the store of forgets that engines owe: Redis if it has the sessions, else a folder if
    there is one, else the memory that has the sessions."""
    if settings.session_store.get_secret_value() != MEMORY:
        return RedisDebtStore(redis_options(settings), settings.redis_prefix)
    if settings.owed_forgets_path is not None:
        return FolderDebtStore(settings.owed_forgets_path)
    return SharedDebtStore(link) if link is not None else MemoryDebtStore()


def redis_options(settings: Settings) -> RedisOptions:
    """Return the options of the connection to Redis."""
    return RedisOptions(
        url=settings.session_store.get_secret_value(),
        ca_file=str(settings.redis_ca_file) if settings.redis_ca_file is not None else None,
        connect_timeout_s=settings.redis_connect_timeout_s,
        timeout_s=settings.redis_timeout_s,
        max_connections=settings.redis_max_connections,
    )


def build_charges(settings: Settings, metrics: Metrics, link: HubLink | None = None) -> TurnCharges:
    """Return the budgets of turns; nothing is connected yet.

    Args:
        link: to the hub, which then counts what would be in this process's memory.
    """
    budgets = Budgets(
        _store(settings, link),
        metrics,
        open_when_down=settings.budget_store_down == "open",
        currency=settings.budget_currency(),
        price_of=settings.price_of,
    )
    if link is not None:
        link.on(DIED, lambda word: budgets.take_over(word.tenant, word.settlements))
    return TurnCharges(budgets, metrics, answer_tokens=settings.budget_answer_tokens)


def _store(settings: Settings, link: HubLink | None) -> BudgetStore:
    if settings.budget_store == "redis":
        store = RedisBudgetStore(redis_options(settings), settings.redis_prefix)
        return NotedBudgetStore(store, link) if link is not None else store
    return SharedBudgetStore(link) if link is not None else MemoryBudgetStore()
