"""Facts and their verdicts for a proxy, without servers."""

from __future__ import annotations

import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisGone

from leyline_engine.contract import (
    THIS_RELEASE,
    Capability,
    KVFacts,
    Plugin,
    Refusal,
    StateFacts,
    this_plugin,
)
from leyline_proxy import installing
from leyline_proxy.doctor import configured, engines, machine, prometheus, stores
from leyline_proxy.doctor.findings import Finding, Status
from leyline_proxy.doctor.reaching import why_unreachable
from leyline_proxy.sessions.redis import RedisOptions
from leyline_proxy.settings import Settings
from leyline_proxy.settings.api_keys import parse_key
from leyline_proxy.upstream.client import NoCapability, UpstreamClient
from leyline_proxy.upstream.proof import Rendering

MIB = 1 << 20
ISSUER: dict[str, Any] = {"oidc_issuer": "https://login.example.com", "oidc_audience": ("leyline",)}
STORE = stores.StoreNeeds(RedisOptions("redis://h"), "redis", "leyline", "session_store")
SERVER = stores.ServerFacts("7.0.15", "noeviction", 0, MIB)
CAPABILITY = Capability(
    engine="e",
    engine_version="1",
    model="m",
    model_fingerprint="f",
    architecture="a",
    vocab_size=1,
    max_context=1000,
    splices=True,
    isolates=True,
    actions=("leyline.edit@1.0",),
)


def store(*servers: stores.ServerFacts, **facts: object) -> dict[str, Finding]:
    """Findings about a Redis, by name."""
    given = {"latency_s": 0.001, "skew_s": 0.0, **facts}
    found = stores.verdicts(stores.StoreFacts("h:1", servers or (SERVER,), **given), STORE)  # type: ignore[arg-type]
    return {finding.name: finding for finding in found}


def needs(**own: object) -> engines.EngineNeeds:
    """The demands of a proxy with usual settings on an engine."""
    usual: dict[str, object] = {
        "name": "a",
        "client": UpstreamClient.__new__(UpstreamClient),
        "secret": None,
        "splice": True,
        "keeps_tenants_apart": False,
        "max_body_bytes": 32 * MIB,
    }
    return engines.EngineNeeds(**{**usual, **own})  # type: ignore[arg-type]


def test_a_sound_redis_is_green() -> None:
    """Every finding is ok."""
    assert {finding.status for finding in store().values()} == {Status.OK}


@pytest.mark.parametrize(
    ("facts", "name", "status"),
    [
        ({"latency_s": 0.2}, "redis.latency", Status.WARN),
        ({"latency_s": 0.6}, "redis.latency", Status.FAIL),
        ({"skew_s": -9.0}, "redis.clock", Status.WARN),
        ({"refusal": ResponseError("full")}, "redis.write", Status.FAIL),
    ],
)
def test_a_redis_that_is_slow_or_refuses(
    facts: dict[str, object], name: str, status: Status
) -> None:
    """Only faults are reported, with a fix."""
    found = store(**facts)
    wrong = {name: each for name, each in found.items() if each.status is not Status.OK}
    assert wrong.keys() == {name}
    assert wrong[name].status is status
    assert wrong[name].fix


@pytest.mark.parametrize(
    ("lasting", "on_disk", "expected"),
    [
        (True, True, Status.OK),
        (True, False, Status.WARN),
        (True, None, None),
        (False, False, None),
    ],
)
def test_budgets_want_a_redis_that_writes_to_disk(
    lasting: bool, on_disk: bool | None, expected: Status | None
) -> None:
    """Sessions don't; and a server that doesn't tell isn't accused."""
    needs = replace(STORE, lasting=lasting)
    facts = stores.StoreFacts("h:6379", [SERVER], 0.001, 0.0, on_disk=on_disk)
    found = {each.name: each.status for each in stores.verdicts(facts, needs)}
    assert found.get("redis.disk") is expected


def test_one_server_of_a_cluster_is_enough() -> None:
    """The worst of several servers decides."""
    evicting = stores.ServerFacts("7.0.15", "volatile-lru", 100 * MIB, 95 * MIB)
    found = store(SERVER, evicting)
    assert found["redis.eviction"].status is Status.FAIL
    assert found["redis.memory"].status is Status.WARN
    assert store(stores.ServerFacts("4.0.1", "", 0, 0))["redis.version"].status is Status.FAIL


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AuthenticationError("WRONGPASS hunter2"), "password"),
        (NoPermissionError("NOPERM hunter2"), "ACL SETUSER"),
        (RedisClusterException("hunter2"), "single server"),
        (RedisGone("Error 111 connecting: Connection refused. hunter2"), "nothing is listening"),
        (TimeoutError("hunter2"), "in time"),
        (ValueError("Port could not be cast to integer value as 'hunter2'"), "as %XX"),
    ],
)
def test_errors_of_redis_are_told_without_their_text(error: Exception, words: str) -> None:
    """The server's text may hold anything; the variable that holds the URL is named."""
    finding = stores.unreachable(STORE, error)
    told = f"{finding.detail} {finding.fix}"
    assert words in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    ("refusal", "fix"),
    [
        (ReadOnlyError("You can't write"), "primary"),
        (ResponseError("Error running script: -READONLY You can't write"), "primary"),
        (NoPermissionError("no permissions to run the 'set' command"), "ACL SETUSER"),
        (ResponseError("The user can't run this command"), "ACL SETUSER"),
        (OutOfMemoryError("command not allowed"), "full"),
    ],
)
def test_a_refused_write_is_told_in_the_words_of_redis(refusal: ResponseError, fix: str) -> None:
    """The fix follows from what it refused, also within a script."""
    finding = store(refusal=refusal)["redis.write"]
    assert str(refusal) in finding.detail
    assert fix in finding.fix


def test_certificates_to_trust_are_a_setting() -> None:
    """The setting of that Redis is used if there is one; else the process's are."""
    error = ssl.SSLCertVerificationError("self-signed")
    own = stores.StoreNeeds(STORE.options, "redis", "leyline", "session_store", "LEYLINE_CA")
    assert "LEYLINE_CA" in stores.unreachable(own, error).fix
    assert "SSL_CERT_FILE" in stores.unreachable(STORE, error).fix


def test_places_of_urls_hold_no_password() -> None:
    """Host and port are all that is shown, whatever the URL is."""
    assert stores.place_of("redis://u:p@host:6380/0") == "host:6380"
    assert stores.place_of("redis://host") == "host:6379"
    assert stores.place_of("redis://u:p@host:port/0") == "?"
    assert stores.place_of("unix:///run/redis.sock") == "/run/redis.sock"


def test_why_a_server_cant_be_reached() -> None:
    """The first informative cause is reported, however deep it lies."""

    def wrapped(cause: BaseException) -> BaseException:
        outer = RuntimeError("outer")
        outer.__cause__ = cause
        return outer

    def why(error: BaseException) -> str:
        return why_unreachable(wrapped(error), "the engine")[0]

    assert "host name" in why(socket.gaierror(-2, "unknown"))
    assert "isn't trusted" in why(ssl.SSLCertVerificationError("self-signed"))
    assert "no TLS" in why(ssl.SSLError("wrong version number"))
    assert "nothing is listening" in why(ConnectionRefusedError())
    assert "in time" in why(TimeoutError())
    assert "(OSError)" in why(OSError("hunter2"))


def test_a_stock_engine_is_red_unless_nothing_shall_be_spliced() -> None:
    """The same answer is a warning where splicing is switched off."""
    answer = NoCapability("no document", settled=True)
    assert engines.plugin_verdict(needs(), answer).status is Status.FAIL
    assert engines.plugin_verdict(needs(splice=False), answer).status is Status.WARN
    loading = engines.plugin_verdict(needs(), NoCapability("not yet", settled=False))
    assert "loaded its model" in loading.fix


def test_an_engine_that_refuses_is_red() -> None:
    """A reason of the engine's own is named with its remedy."""
    for change, words in (
        ({"splices": False, "unsupported_reason": "page size 64"}, "as the reason requires"),
        (
            {"splices": False, "refusals": (Refusal("p", "start with -p 64"),)},
            ": start with -p 64 (",
        ),
        ({"splices": False, "refusals": (Refusal("p", "a"), Refusal("q", "b"))}, ": a; b ("),
        ({"splices": False, "refusals": (Refusal("p", "a"), Refusal("q"))}, "the reason requires"),
    ):
        other = Capability(**{**CAPABILITY_FACTS, **change})
        finding = engines.plugin_verdict(needs(), other)
        assert finding.status is Status.FAIL
        assert words in finding.fix
    assert engines.plugin_verdict(needs(), CAPABILITY).status is Status.OK


@pytest.mark.parametrize(
    ("change", "words", "fix"),
    [
        ({"protocol_version": "9"}, "'9' of the contract", "one release"),
        ({"actions": ()}, "leyline.edit@1.0", "one release"),
        ({"plugin": Plugin(version="0.0.1")}, "0.0.1", "Upgrade the plugin"),
        ({"plugin": Plugin(version="99.0", proxies=">=98")}, ">=98", "Upgrade this proxy"),
        ({"engine": "sglang", "engine_version": "sglang 0.4"}, "sglang '0.4'", "0.5.23"),
        ({"engine": "vllm", "engine_version": "vllm 0.33.0"}, "vllm '0.33.0'", "0.32.0"),
    ],
)
def test_versions_that_dont_fit_are_red_and_named(
    change: dict[str, object], words: str, fix: str
) -> None:
    """The finding names the versions and the fix; it is yellow where nothing shall be spliced."""
    other = Capability(**{**CAPABILITY_FACTS, **change})
    finding = engines.versions_verdict(needs(), other)
    assert (finding.name, finding.status) == ("upstream.a.versions", Status.FAIL)
    assert "splices" not in engines.plugin_verdict(needs(), other).detail
    assert words in finding.detail and fix in finding.fix
    assert "docs/compatibility.md" in finding.fix
    assert engines.versions_verdict(needs(splice=False), other).status is Status.WARN


def test_versions_that_fit_are_named() -> None:
    """Proxy, plugin and engine are in one line, the engine's name once."""
    fitting = {"engine": "sglang", "engine_version": "sglang 0.5.23", "plugin": this_plugin()}
    finding = engines.versions_verdict(needs(), Capability(**{**CAPABILITY_FACTS, **fitting}))
    ours = THIS_RELEASE.version
    assert finding.status is Status.OK
    assert finding.detail == f"proxy {ours}, plugin {ours} and sglang 0.5.23 fit"
    unknown = engines.versions_verdict(needs(), NoCapability("no document", settled=True))
    assert unknown.status is Status.SKIP


CAPABILITY_FACTS = {name: getattr(CAPABILITY, name) for name in CAPABILITY.__struct_fields__}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (engines.SecretFacts(bare_refused=False, signed_refused=None), ""),
        (engines.SecretFacts(bare_refused=True, signed_refused=None), "this proxy has none"),
        (engines.SecretFacts(bare_refused=False, signed_refused=False), "the engine has none"),
        (engines.SecretFacts(bare_refused=True, signed_refused=True), "different"),
        (engines.SecretFacts(bare_refused=True, signed_refused=False), ""),
    ],
)
def test_secrets_agree_or_not(facts: engines.SecretFacts, words: str) -> None:
    """Two answers distinguish all cases."""
    finding = engines.secret_verdict(needs(), facts)
    assert (finding.status is Status.FAIL) == bool(words)
    assert words in finding.detail
    assert engines.secret_verdict(needs(), None).status is Status.SKIP


def test_a_rendering_that_isnt_proven_is_red() -> None:
    """Nothing is spliced, or each turn waits."""
    assert engines.rendering_verdict(needs(), Rendering(problem="none")).status is Status.FAIL
    slow = Rendering(object(), proven=False, problem="probe 1 differs")  # type: ignore[arg-type]
    assert "waits" in engines.rendering_verdict(needs(), slow).detail


def test_windows_and_isolation() -> None:
    """A pool smaller than the window, a body limit below it, and tenants that can't be kept
    apart."""
    kv = KVFacts(pool_class="gqa", dtype="bf16", layers=1, bytes_per_token=1, capacity_tokens=10)
    small = Capability(**{**CAPABILITY_FACTS, "kv": kv, "isolates": False})
    asked = needs(max_body_bytes=2000, keeps_tenants_apart=True)
    window, isolation = engines.capability_verdicts(asked, small)
    assert (window.status, isolation.status) == (Status.WARN, Status.FAIL)
    (window,) = engines.capability_verdicts(asked, CAPABILITY)
    assert "max_body_bytes" in window.fix
    assert engines.capability_verdicts(needs(), CAPABILITY)[0].status is Status.OK


def test_memory_beside_the_pool_is_shown() -> None:
    """An engine that keeps as-computed keys beside its pool says how much they take."""
    kv = KVFacts(
        pool_class="gqa",
        dtype="float8_e4m3fn",
        layers=1,
        bytes_per_token=1,
        capacity_tokens=10**9,
        origin_tokens=8192,
        origin_bytes=1 << 30,
    )
    capability = Capability(**{**CAPABILITY_FACTS, "kv": kv})
    _, origins = engines.capability_verdicts(needs(), capability)
    assert origins.status is Status.OK
    assert "8,192 tokens take 1,073,741,824 bytes" in origins.detail


def test_first_answers_of_an_engine() -> None:
    """A refused key, a gateway alone, another server, no models, a slow one."""

    def first(
        status: int, models: tuple[str, ...] | None = ("m",), taken_s: float = 0.001
    ) -> dict[str, Status]:
        listed = engines.Listed(status, models, taken_s, 0.0)
        return {each.name: each.status for each in engines.reached(needs(), "http://h", listed)}

    assert first(401)["upstream.a.key"] is Status.FAIL
    assert first(502) == {"upstream.a.reachable": Status.FAIL}
    assert first(404) == {"upstream.a.reachable": Status.FAIL}
    assert first(200, ())["upstream.a.models"] is Status.FAIL
    assert set(first(200).values()) == {Status.OK}
    assert first(200, taken_s=0.3)["upstream.a.reachable"] is Status.WARN


def test_keys_and_who_gets_in() -> None:
    """A proxy is open to all only on loopback; expired keys are reported by id, soon expiring ones
    by tenant."""
    day = 86_400.0
    keys = [parse_key("red:k1 expires=1970-01-03"), parse_key("blue:k2")]
    assert configured.keys_verdict((), "127.0.0.1", 0).status is Status.OK
    assert configured.keys_verdict((), "0.0.0.0", 0).status is Status.WARN  # noqa: S104
    assert "red" in configured.keys_verdict(keys, "::", 0).detail
    assert keys[0].id in configured.keys_verdict(keys, "::", 3 * day).detail
    assert configured.keys_verdict(keys[:1], "::", 3 * day).status is Status.FAIL
    assert configured.keys_verdict(keys[1:], "::", 0).status is Status.OK


def test_the_hosts_of_an_open_proxy() -> None:
    """A proxy that is reached by a name from elsewhere has to name it; with keys it need not."""
    anywhere = "0.0.0.0"  # noqa: S104

    def verdict(**settings: Any) -> tuple[Status, str]:
        (found,) = configured.examine_hosts(Settings(**settings))
        return found.status, found.detail

    assert verdict()[0] is Status.OK
    status, told = verdict(host=anywhere)
    assert status is Status.WARN and "403" in told
    status, told = verdict(host=anywhere, allowed_hosts=("gpu1",))
    assert status is Status.OK and "gpu1" in told
    assert verdict(host=anywhere, api_keys=("red:k1",))[0] is Status.SKIP
    assert verdict(host=anywhere, **ISSUER)[0] is Status.SKIP


def test_a_proxy_with_an_issuer_alone_is_not_open() -> None:
    """Without an API key nobody gets in but by a token; without either, everybody does."""

    def verdict(**settings: Any) -> Status:
        (found,) = configured.examine_keys(Settings(host="::", **settings), 0)
        return found.status

    assert verdict() is Status.WARN
    assert verdict(**ISSUER) is Status.OK


def test_files_of_keys_are_nobody_elses() -> None:
    """Plain keys may not be read by all, and no key file be written by others."""
    path = Path("keys")
    assert configured.file_verdicts("f", path, 0o100600, plain=True) == []
    assert configured.file_verdicts("f", path, 0o100644, plain=False) == []
    assert configured.file_verdicts("f", path, 0o100644, plain=True)[0].status is Status.WARN
    assert "go-w" in configured.file_verdicts("f", path, 0o100622, plain=False)[0].fix


def test_limits_of_the_machine() -> None:
    """Too few files for the requests under way are red, for all connections a warning."""
    settings = Settings()

    def files(soft: int) -> Status:
        return machine.files_verdict(soft, soft, settings).status

    assert (files(100), files(1024), files(100_000), files(-1)) == (
        Status.FAIL,
        Status.WARN,
        Status.OK,
        Status.OK,
    )
    limits = (1024 * MIB, 2500 * MIB, 1 << 40)
    found = [machine.memory_verdict(settings, limit).status for limit in limits]
    assert found == [Status.FAIL, Status.WARN, Status.OK]
    assert machine.memory_verdict(settings, None).status is Status.SKIP
    disks = [machine.disk_verdict(Path("a"), free * MIB, 64 * MIB).status for free in (1, 100, 200)]
    assert disks == [Status.FAIL, Status.WARN, Status.OK]


def test_packages_are_those_that_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing and wrong ones are named; extras that weren't required don't count."""
    needed = [
        "pytest>=1",
        "pytest>=9000",
        "no-such-thing; extra == 'proxy'",
        "nope; extra == 'x'",
    ]
    monkeypatch.setattr(installing, "requires", lambda _: needed)
    problems = list(installing.package_problems("any", ["proxy"]))
    assert len(problems) == 2
    assert problems[0].endswith("isn't >=9000")
    assert problems[1] == "no-such-thing is missing"


def test_what_prometheus_says() -> None:
    """It says: not ready, no series, targets that are down, rules that are broken or missing."""

    def verdicts(**facts: object) -> dict[str, Status]:
        given = prometheus.PrometheusFacts("u", **{"ready": 200, "proxies": 1, **facts})  # type: ignore[arg-type]
        return {each.name: each.status for each in prometheus.verdicts(given)}

    for status, words in (
        (503, "isn't ready"),
        (401, "needs a login"),
        (404, "not like Prometheus"),
    ):
        facts = prometheus.PrometheusFacts("u", ready=status, proxies=1)
        (found,) = prometheus.verdicts(facts)
        assert (found.name, found.status) == ("prometheus.reachable", Status.FAIL)
        assert words in found.detail
    assert verdicts(proxies=0)["prometheus.scrapes"] is Status.FAIL
    assert verdicts(down=["http://h/metrics"])["prometheus.scrapes"] is Status.FAIL
    assert verdicts()["prometheus.rules"] is Status.WARN
    assert verdicts(rules=2, broken_rules=["R"])["prometheus.rules"] is Status.FAIL
    assert set(verdicts(rules=2).values()) == {Status.OK}


def test_policies_for_a_tenant_that_there_is_not(tmp_path: Path) -> None:
    """A misspelt tenant in the policies file is a warning that names it; a known one is none."""
    file = tmp_path / "policies.yaml"

    def verdict(tenant: str) -> Finding:
        file.write_text(f"tenants: {{{tenant}: {{policies: [keep_all]}}}}")
        settings = Settings(policies_file=file, api_keys=("team-a:k1",))
        (found,) = configured.examine_policies(settings)
        return found

    assert verdict("team-a").status is Status.OK
    assert verdict("teama").status is Status.WARN
    assert "teama" in verdict("teama").detail


@pytest.mark.parametrize(("slots", "status"), [(79, Status.WARN), (80, Status.OK)])
def test_a_models_states_and_the_promise_about_them_are_named(slots: int, status: Status) -> None:
    """Kinds, size and sessions that fit, why nothing is reused, and a remedy for few slots."""
    kv = KVFacts(pool_class="gqa", dtype="f", layers=1, bytes_per_token=100, capacity_tokens=9999)
    state = StateFacts(
        window=128, recurrent_layers=3, edits="kept", bytes_per_state=250, slots=slots
    )
    hybrid = msgspec.structs.replace(CAPABILITY, kv=kv, state=state)
    own = needs(recurrent_edits="kept, exact for red")
    found = {each.name: each for each in engines.capability_verdicts(own, hybrid)}
    finding = found["upstream.a.states"]
    assert finding.status is status and bool(finding.fix) is (status is Status.WARN)
    for words in ("windows of 128", "3 recurrent layers", "250 bytes", "rows of 3 tokens"):
        assert words in finding.detail
    assert f"about {slots // 5} sessions" in finding.detail
    assert "recurrent_edits: kept, exact for red" in finding.detail
    assert "no content reuse" in finding.detail and "recurrent_state" in finding.detail
    windows = msgspec.structs.replace(hybrid, state=StateFacts(window=128))
    (plain,) = (each for each in engines.capability_verdicts(own, windows) if "states" in each.name)
    assert plain.status is Status.OK and "recurrent" not in plain.detail
    bare = engines.capability_verdicts(own, msgspec.structs.replace(hybrid, state=None))
    assert not any("states" in each.name for each in bare)
