"""Checks of Redis: availability, lasting data, latency, and trials of the session store and of the
audit log's stream."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from ..audit.stream import FIELD
from ..model.session import Session
from ..sessions.redis import RedisLink, RedisSessionStore, Seal
from ..sessions.redis.keys import Keys
from ..sessions.redis.link import RedisOptions, client_of, clustered
from ..sessions.redis.scripts import LOSE
from .findings import Finding, fail, ok, warn
from .reaching import why_unreachable

KEEPS_ALL = "noeviction"
OLDEST = 5
"""Oldest major version with scripts that read the time and then write."""

_MIB = 1024 * 1024
_FULL = 0.9
_SLOW = 0.25
"""Share of the time limit above which a server is slow."""
_SKEW_S = 5.0
_PINGS = 5
FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError, ValueError, TypeError)
"""The last two come from the URL: a port that isn't a number, or an unknown option."""

_NO_ID = "0-0"
"""Invalid id of an entry: the command checks all permissions and limits, and adds nothing."""

_ADDS_NOTHING = "must be greater than 0-0"

T = TypeVar("T")
# What the trial writes.
_TTL_S = 10.0
_TENANT, _KEY, _TURN = "doctor", "", "t"
_OUT, _KEPT = "pushed-out", "kept"
_HISTORY = (1,)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts from one server's report."""

    version: str
    policy: str
    maxmemory: int
    """Bytes; 0 for no limit."""
    used: int

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ServerFacts:
        """Return the facts in the answer to ``INFO``."""
        return cls(
            str(info.get("redis_version", "")),
            str(info.get("maxmemory_policy", "")),
            int(info.get("maxmemory", 0)),
            int(info.get("used_memory", 0)),
        )


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Facts about a Redis."""

    place: str
    """Host and port."""
    servers: Sequence[ServerFacts]
    latency_s: float
    skew_s: float
    """Seconds by which its clock is ahead."""
    refusal: ResponseError | None = None
    """Refusal of one of the stores' operations."""
    on_disk: bool | None = None
    """True if all servers write to disk; None if they don't say."""


@dataclass(frozen=True, slots=True)
class StoreNeeds:
    """The proxy's requirements for a Redis."""

    options: RedisOptions = field(repr=False)
    name: str
    """Prefix of the findings: ``redis``."""
    prefix: str
    setting: str
    """The setting that holds the URL."""
    ca_setting: str = ""
    """Variable that names the certificates to trust, if there is one."""
    lasting: bool = False
    """True if its data is needed for longer than a restart."""


async def examine_store(needs: StoreNeeds, limit_s: float) -> list[Finding]:
    """Return all findings about one Redis."""
    try:
        facts = await _facts(needs, limit_s)
    except FAILURES as error:
        return [unreachable(needs, error)]
    return verdicts(facts, needs)


def verdicts(facts: StoreFacts, needs: StoreNeeds) -> list[Finding]:
    """Return findings from the facts."""
    name = needs.name
    return [
        ok(f"{name}.reachable", f"Redis at {facts.place} answers"),
        _version(name, facts),
        _eviction(name, facts),
        _memory(name, facts),
        _writing(name, facts, needs),
        _latency(name, facts, needs.options.timeout_s),
        _clock(name, facts),
        *([_disk(name, facts)] if needs.lasting and facts.on_disk is not None else []),
    ]


def unreachable(needs: StoreNeeds, error: BaseException) -> Finding:
    """Return the reason for Redis's missing answer."""
    variable = f"LEYLINE_{needs.setting.upper()}"
    found, place = f"{needs.name}.reachable", place_of(needs.options.url)
    secure = needs.options.url.startswith("rediss")
    if isinstance(error, NoPermissionError):
        return fail(
            found,
            f"Redis at {place} gives this user too few permissions",
            "Grant it INFO, TIME, EVAL, EVALSHA and the commands of hashes, sorted sets and "
            "strings on the keys of redis_prefix (ACL SETUSER).",
        )
    if isinstance(error, (AuthenticationError, AuthorizationError)) or "NOAUTH" in str(error):
        return fail(
            found,
            f"Redis at {place} refuses the password, or needs one",
            f"Put user and password into the URL of {variable}: redis://USER:PASSWORD@HOST:PORT.",
        )
    if isinstance(error, RedisClusterException) or "cluster support disabled" in str(error):
        return fail(
            found,
            f"Redis at {place} doesn't work as a cluster",
            "Use redis:// or rediss:// for a single server; otherwise check that the cluster runs.",
        )
    # Certificate errors belong to both classes.
    if isinstance(error, (ValueError, TypeError)) and not isinstance(error, OSError):
        return fail(
            found,
            f"{variable} isn't a URL that the Redis client can use",
            "Write it as redis://USER:PASSWORD@HOST:PORT/DB. In the password, write anything but "
            "letters and digits as %XX. Use rediss:// if redis_ca_file is set.",
        )
    problem, fix = why_unreachable(error, "Redis")
    if "isn't trusted" in problem and needs.ca_setting:
        fix = f"Set {needs.ca_setting} to the certificate of the CA that signed Redis's."
    fix += f" Host and port are in {variable}."
    # Each side waits for the other's first bytes, or closes the connection.
    if secure and "in time" in problem:
        fix += " A port without TLS doesn't answer either: it needs redis:// instead of rediss://."
    if not secure and ("closed" in str(error) or "Reset" in problem):
        problem = "it closed the connection"
        fix = f"Use rediss:// in {variable} if that port speaks TLS; otherwise check Redis's log."
    return fail(found, f"Redis at {place}: {problem}", fix)


def place_of(url: str) -> str:
    """Return host and port of a URL, without its password."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return parts.path
        return f"{parts.hostname or '?'}:{parts.port or 6379}"
    except ValueError:
        return "?"


def _version(name: str, facts: StoreFacts) -> Finding:
    versions = sorted({server.version for server in facts.servers})
    detail = f"version {', '.join(versions)}"
    old = [version for version in versions if _major(version) < OLDEST]
    if old:
        return fail(f"{name}.version", f"{detail} is too old", "Run Redis 7, or at least 5.")
    return ok(f"{name}.version", detail)


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else OLDEST


def _eviction(name: str, facts: StoreFacts) -> Finding:
    evicting = [server for server in facts.servers if server.policy not in ("", KEEPS_ALL)]
    if not evicting:
        return ok(f"{name}.eviction", "maxmemory-policy is noeviction")
    policy = evicting[0].policy
    fix = "CONFIG SET maxmemory-policy noeviction, and set the same in redis.conf."
    if any(server.maxmemory for server in evicting):
        return fail(
            f"{name}.eviction",
            f"maxmemory-policy is {policy}: a full Redis drops sessions on its own, and forgets "
            "lose their accounts",
            fix,
        )
    return warn(
        f"{name}.eviction",
        f"maxmemory-policy is {policy}, which drops sessions as soon as maxmemory is set",
        fix,
    )


def _memory(name: str, facts: StoreFacts) -> Finding:
    limited = [server for server in facts.servers if server.maxmemory]
    used = sum(server.used for server in facts.servers)
    if not limited:
        return ok(f"{name}.memory", f"{used / _MIB:.0f} MiB used, no maxmemory")
    worst = max(limited, key=lambda server: server.used / server.maxmemory)
    detail = f"{worst.used / _MIB:.0f} of {worst.maxmemory / _MIB:.0f} MiB used"
    if worst.used > _FULL * worst.maxmemory:
        return warn(
            f"{name}.memory",
            f"{detail}: a full Redis counts as unreachable",
            "Raise maxmemory, or lower session_ttl_s or redis_max_sessions.",
        )
    return ok(f"{name}.memory", detail)


def _writing(name: str, facts: StoreFacts, needs: StoreNeeds) -> Finding:
    found, below = f"{name}.write", f"{needs.prefix}:"
    if facts.refusal is None:
        return ok(found, f"wrote, read and deleted sessions below {below}")
    rights = (
        f"Let the user write keys {below}* (strings, hashes and sorted sets), also with scripts"
    )
    words = " ".join(str(facts.refusal).split())
    return fail(
        found, f"can't keep sessions below {below} ({words})", fix_of(facts.refusal, rights)
    )


def fix_of(refusal: ResponseError, rights: str) -> str:
    """Return the fix for a refused write.

    Args:
        rights: the request to grant what the user may lack.
    """
    # A script's refused command gives an error without a kind.
    told = f"{type(refusal).__name__} {refusal}"
    if re.search(r"READONLY|ReadOnly", told):
        return "Give the URL of the primary: this is a replica."
    if re.search(r"permission|NoPermission|can't run", told):
        return f"{rights} (ACL SETUSER)."
    return "Check Redis's log: Redis or its disk may be full."


def _latency(name: str, facts: StoreFacts, timeout_s: float) -> Finding:
    detail = f"a round trip takes {facts.latency_s * 1000:.1f} ms"
    limit = f"of {timeout_s * 1000:.0f} ms (redis_timeout_s)"
    fix = "Put the proxies and Redis into one network zone, or raise redis_timeout_s."
    if facts.latency_s > timeout_s:
        return fail(f"{name}.latency", f"{detail}, more than the limit {limit}", fix)
    if facts.latency_s > _SLOW * timeout_s:
        return warn(f"{name}.latency", f"{detail} {limit}; a turn makes five", fix)
    return ok(f"{name}.latency", f"{detail} {limit}")


def _clock(name: str, facts: StoreFacts) -> Finding:
    return clock_verdict(f"{name}.clock", facts.skew_s, "Redis's clock")


def clock_verdict(name: str, skew_s: float, whose: str) -> Finding:
    """Judge whether two clocks agree well enough for expiries and for comparing logs."""
    if abs(skew_s) <= _SKEW_S:
        return ok(name, f"{whose} agrees with this machine's")
    where = "ahead of" if skew_s > 0 else "behind"
    return warn(
        name,
        f"{whose} is {abs(skew_s):.0f} s {where} this machine's: expiries and the times in logs "
        "don't match",
        "Run NTP (chrony, systemd-timesyncd) on both machines.",
    )


def _disk(name: str, facts: StoreFacts) -> Finding:
    found = f"{name}.disk"
    if facts.on_disk:
        return ok(found, "it writes to disk")
    return warn(
        found,
        "it writes nothing to disk, so its restart sets budgets of a day or a month back to 0",
        "CONFIG SET appendonly yes, and set the same in redis.conf (docs/backups.md).",
    )


async def _on_disk(client: Any, servers: Sequence[Mapping[str, Any]]) -> bool | None:
    """Return True if all servers keep a log or snapshots; None if that isn't told."""
    if all(info.get("aof_enabled") for info in servers):
        return True
    try:
        # INFO doesn't have the times of snapshots, and hosts of Redis often refuse CONFIG.
        answer = _any(await client.config_get("save"))
    except ResponseError:
        return None
    save = answer.get("save") if isinstance(answer, dict) else answer
    return bool(save)


async def _facts(needs: StoreNeeds, limit_s: float) -> StoreFacts:
    options = patient(needs.options, limit_s)
    async with client_of(options) as client:
        servers = await _servers(client, clustered(options))
        taken = []
        for _ in range(_PINGS):
            begun = time.perf_counter()
            await client.ping()
            taken.append(time.perf_counter() - begun)
        seconds, micros = _any(await client.time())
        on_disk = await _on_disk(client, servers)
    return StoreFacts(
        place_of(needs.options.url),
        [ServerFacts.of(info) for info in servers],
        sorted(taken)[_PINGS // 2],
        int(seconds) + int(micros) / 1e6 - time.time(),
        await try_store(options, needs.prefix),
        on_disk,
    )


async def _servers(client: Any, clustered: bool) -> list[Mapping[str, Any]]:
    if not clustered:
        return [await client.info()]
    answer = await client.info(target_nodes=RedisCluster.PRIMARIES)
    return [answer] if "redis_version" in answer else list(answer.values())


def _any(answer: Any) -> Any:
    """Return the answer of one of a cluster's servers."""
    return next(iter(answer.values())) if isinstance(answer, dict) else answer


def patient(options: RedisOptions, limit_s: float) -> RedisOptions:
    """Return options that wait longer than the proxy would, to measure slow answers."""
    return replace(options, connect_timeout_s=limit_s / 2, timeout_s=limit_s / 2)


async def examine_stream(needs: StoreNeeds, limit_s: float) -> list[Finding]:
    """Check that the proxy's user may write there. The stream isn't changed."""
    try:
        async with client_of(patient(needs.options, limit_s)) as client:
            refusal = await _refusal(client, needs.prefix)
    except FAILURES as error:
        return [unreachable(needs, error)]
    place = place_of(needs.options.url)
    return [ok(f"{needs.name}.reachable", f"Redis at {place} answers"), _verdict(needs, refusal)]


async def _refusal(client: Any, stream: str) -> ResponseError | None:
    async with client.pipeline(transaction=True) as pipe:
        pipe.xadd(stream, {FIELD: ""}, id=_NO_ID)
        try:
            await pipe.execute()
        except ResponseError as error:
            return None if _ADDS_NOTHING in str(error) else error
    return None


def _verdict(needs: StoreNeeds, refusal: ResponseError | None) -> Finding:
    name, stream = f"{needs.name}.write", needs.prefix
    if refusal is None:
        return ok(name, f"entries can be added to {stream}")
    fix = fix_of(refusal, f"Let the user XADD to the key {stream}, with MULTI and EXEC")
    return fail(name, f"can't add entries to {stream} ({refusal}): only the file gets them", fix)


class _OpenLink(RedisLink):
    """A link that raises the server's own errors, which the store doesn't catch."""

    async def call(self, command: Callable[[Any], Awaitable[T]], *, probe: bool = False) -> T:
        return await command(self._client)

    def close_circuit(self, runs: Mapping[str, str]) -> None:
        self.problem = None


async def try_store(options: RedisOptions, prefix: str) -> ResponseError | None:
    """Write, find and delete sessions as a proxy does; return the server's refusal, if any.

    Nothing remains, unless Redis goes away meanwhile.

    Raises:
        RedisError, RedisClusterException, OSError: Redis doesn't answer.
    """
    link, keys = _OpenLink(options), Keys(f"{prefix}:doctor:{token_hex(8)}")
    try:
        # First, so that a user who may not delete leaves nothing.
        await _delete(link, keys)
        try:
            await _write_and_find(link, keys)
        finally:
            with suppress(RedisError, RedisClusterException, OSError):
                await _delete(link, keys)
    except ResponseError as refusal:
        return refusal
    finally:
        await link.aclose()
    return None


async def _write_and_find(link: RedisLink, keys: Keys) -> None:
    store = RedisSessionStore(link, ttl_s=_TTL_S, seal=Seal(), prefix=keys.prefix, max_sessions=1)
    await store.connect()
    for name in (_OUT, _KEPT):
        session = Session(name, _TENANT, _KEY, (), (), 1, time.time())
        await store.open_turn(_TENANT, name, _TURN)
        await store.update(_TENANT, name, lambda _, new=session: new, _HISTORY, ends=_TURN)  # type: ignore[misc]
    found = await store.matches(_TENANT, _KEY, _HISTORY, 1)
    if [match.session for match in found] != [_KEPT] or await store.count() != 1:
        raise ResponseError("other sessions were found than were written")
    await store.sessions(_TENANT)
    # Commands for rare cases: many alike conversations, a script new to the server, and responses
    # that a quarantine deletes.
    opening, entries = keys.opening(_TENANT, _KEY, _HISTORY[0]), _entries(keys, _KEPT)
    await link.call(lambda client: client.zremrangebyrank(opening, 0, -1))
    await link.call(lambda client: client.eval(LOSE.text, 2, *entries, 1, _KEY, 1000))
    await link.call(lambda client: client.zrangebyscore(opening, 0, 1))
    await store.close_turn(_TENANT, _KEPT, _TURN)
    await store.delete(_TENANT, _KEPT)


async def _delete(link: RedisLink, keys: Keys) -> None:
    gone = [keys.all, keys.state, keys.owners, keys.tenant(_TENANT), keys.owned(_TENANT)]
    gone += [keys.whole(_TENANT, _KEY, _HISTORY[-1]), *_entries(keys, _OUT), *_entries(keys, _KEPT)]
    await link.together(lambda pipe: [pipe.delete(entry) for entry in gone])


def _entries(keys: Keys, session: str) -> tuple[str, str]:
    return keys.of_digest(keys.digest(_TENANT, session))
