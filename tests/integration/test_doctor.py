"""``leyline doctor`` before real servers: green where all is well, red where a fault is planted."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from starlette.applications import Starlette
from support.altered import Altered
from support.certificates import Authority
from support.fake_engine import FakeEngine
from support.redis_server import RedisServer, free_port, redis_cluster, redis_server
from typer.testing import CliRunner

from leyline_engine.contract import RENDERER_PATH
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.cli import build_app
from leyline_proxy.doctor.findings import Status
from leyline_proxy.doctor.stores import StoreNeeds, examine_store
from leyline_proxy.http.app import create_app
from leyline_proxy.sessions import redis as redis_stores
from leyline_proxy.sessions.redis import RedisOptions
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

HINTS = "hints-secret-of-the-tests"
SESSIONS = "session-secret-of-the-tests"
ENGINE_KEY = "engine-key-of-the-tests"
CALLER_KEY = "caller-key-of-the-tests"
PASSWORD = "redis-password-of-the-tests"
SECRETS = (HINTS, SESSIONS, ENGINE_KEY, CALLER_KEY, PASSWORD)


@dataclass(frozen=True, slots=True)
class Report:
    """The command's report."""

    code: int
    checks: list[dict[str, str]]

    def named(self, status: str) -> dict[str, str]:
        """Details and fixes of the checks that ended so, by name."""
        return {
            each["name"]: f"{each['detail']} | {each['fix']}"
            for each in self.checks
            if each["status"] == status
        }


@dataclass(slots=True)
class World:
    """All that a proxy needs, in order; a test spoils a part."""

    folder: Path
    redis: RedisServer
    redis_tls: int
    """Its port for TLS."""
    engine_url: str
    engine: Starlette
    flags: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)

    def reset(self) -> None:
        """All in order again."""
        keys = self.folder / "keys"
        keys.write_text(f"red:{CALLER_KEY}\n")
        keys.chmod(0o600)
        config = self.folder / "leyline.yaml"
        config.write_text("retained_turns: 4\npolicy: truncate_older_than:n=2,max_chars=200\n")
        self.flags = {
            "--config": str(config),
            "--port": "0",
            "--upstream": self.engine_url,
            "--session-store": f"redis://:{PASSWORD}@127.0.0.1:{self.redis.port}/0",
            "--api-keys-file": str(keys),
            "--audit-file": str(self.folder / "audit.jsonl"),
        }
        self.environ = {
            "LEYLINE_HINTS_SECRET": HINTS,
            "LEYLINE_SESSION_SECRET": SESSIONS,
            "LEYLINE_UPSTREAM_API_KEY": ENGINE_KEY,
        }

    def ask(self, *more: str) -> Report:
        """The report as JSON; no secret is in it."""
        code, output = self.show(*more, "--json")
        document = json.loads(output)
        assert document["ok"] == (code == 0)
        return Report(code, document["checks"])

    def show(self, *more: str) -> tuple[int, str]:
        """Exit code and what is printed; no secret is in it."""
        flags = [word for pair in self.flags.items() for word in pair]
        code, output = run(*flags, *more, **self.environ)
        assert not [secret for secret in SECRETS if secret in output]
        return code, output

    def client(self) -> redis.Redis:
        """A client of the Redis."""
        return redis.Redis(port=self.redis.port, password=PASSWORD)


def run(*flags: str, **environ: str) -> tuple[int, str]:
    """Exit code and output of ``leyline doctor``."""
    result = CliRunner().invoke(build_app(), ["doctor", *flags], env={"COLUMNS": "200", **environ})
    return result.exit_code, result.stdout


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands configure the process's logging, which here is pytest's."""
    monkeypatch.setattr("leyline_proxy.telemetry.logging.configure_logging", lambda *_: None)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A Redis with a password, and an engine with a key and a secret."""
    folder = tmp_path_factory.mktemp("doctor")
    engine = create_embedded_engine("replay", {"api_secret": ENGINE_KEY, "hints_secret": HINTS})
    pair = Authority(folder, "own").issue("127.0.0.1")
    port = free_port()
    options = (
        *("--requirepass", PASSWORD, "--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(pair.cert), "--tls-key-file", str(pair.key)),
    )
    with redis_server(folder, *options) as server, serving(engine) as url:
        yield World(folder, server, port, url, engine)


@pytest.fixture
def world(servers: World) -> World:
    """All in order."""
    servers.reset()
    return servers


def test_all_is_well(world: World) -> None:
    """Green, without a warning, where nothing was planted; the probe key is gone afterwards."""
    report = world.ask()
    assert report.code == 0
    assert not report.named("fail")
    assert not report.named("warn")
    well = report.named("ok")
    assert {"redis.eviction", "redis.write", "upstream.engine.plugin"} <= well.keys()
    assert "the same hints_secret" in well["upstream.engine.secret"]
    assert "the same tokens as in the engine" in well["upstream.engine.tokenizer"]
    with world.client() as client:
        assert client.keys("*doctor*") == []
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    names = {each["name"].replace("upstream.engine", "upstream.NAME") for each in report.checks}
    names -= {each["name"] for each in report.checks if each["status"] == "skip"}
    assert not [name for name in names if f"`{name}`" not in page]


Plant = Callable[[World], Any]


def _typo(world: World) -> None:
    Path(world.flags["--config"]).write_text("retained_turns: 4\nretained_turn: 5\n")


def _broken_yaml(world: World) -> None:
    Path(world.flags["--config"]).write_text("retained_turns: 4\npolicy: [a\n")


def _no_redis(world: World) -> None:
    world.flags["--session-store"] = f"redis://:{PASSWORD}@127.0.0.1:{free_port()}/0"


def _wrong_password(world: World) -> None:
    world.flags["--session-store"] = f"redis://:{CALLER_KEY}@127.0.0.1:{world.redis.port}/0"


def _untrusted_redis(world: World) -> None:
    world.flags["--session-store"] = f"rediss://:{PASSWORD}@127.0.0.1:{world.redis_tls}/0"


def _redis_without_tls(world: World) -> None:
    world.flags["--session-store"] = f"rediss://:{PASSWORD}@127.0.0.1:{world.redis.port}/0"
    world.flags["--timeout"] = "2"


def _tls_unasked(world: World) -> None:
    world.flags["--session-store"] = f"redis://:{PASSWORD}@127.0.0.1:{world.redis_tls}/0"


def _untrusted_engine(world: World) -> None:
    world.flags["--upstream"] = f"https://127.0.0.1:{world.redis_tls}"


def _engine_without_tls(world: World) -> None:
    world.flags["--upstream"] = world.engine_url.replace("http://", "https://")


def _no_engine(world: World) -> None:
    world.flags["--upstream"] = f"http://127.0.0.1:{free_port()}"


def _other_secret(world: World) -> None:
    world.environ["LEYLINE_HINTS_SECRET"] = "another one of the tests"


def _no_secret(world: World) -> None:
    world.environ["LEYLINE_HINTS_SECRET"] = ""


def _bad_key_line(world: World) -> None:
    Path(world.flags["--api-keys-file"]).write_text(f"red:{CALLER_KEY}\n{CALLER_KEY}\n")


def _refused_key(world: World) -> None:
    world.environ["LEYLINE_UPSTREAM_API_KEY"] = CALLER_KEY


def _unknown_policy(world: World) -> None:
    world.flags["--policy"] = "truncate_older:n=2"


def _few_files(world: World) -> None:
    world.environ |= dict.fromkeys(
        ("LEYLINE_MAX_CONCURRENT", "LEYLINE_MAX_CONNECTIONS"), "10000000"
    )


def _much_memory(world: World) -> None:
    world.environ["LEYLINE_TEXT_MEMORY_BYTES"] = str(1 << 60)


def _no_audit_log(world: World) -> None:
    log = world.folder / "notes.txt"
    log.write_text("hello\n")
    world.flags["--audit-file"] = str(log)


def _audit_folder(world: World) -> None:
    world.flags["--audit-file"] = str(world.folder)


def _empty_audit_key(world: World) -> None:
    (world.folder / "empty").write_text("# none\n")
    world.flags["--audit-key-file"] = str(world.folder / "empty")


def _other_protocol(world: World) -> None:
    world.flags["--trace"] = "otlp"
    world.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "grpc"


def _one_port(world: World) -> None:
    world.flags |= dict.fromkeys(("--port", "--admin-port"), str(free_port()))
    world.environ["LEYLINE_ADMIN_KEY"] = CALLER_KEY


def _unescaped_password(world: World) -> None:
    world.flags["--session-store"] = f"redis://:{PASSWORD}/x@127.0.0.1:{world.redis.port}/0"


def _unknown_option(world: World) -> None:
    world.flags["--session-store"] += "?colour=red"


def _certificates_for_nothing(world: World) -> None:
    world.environ["LEYLINE_REDIS_CA_FILE"] = str(world.folder / "own.pem")


def _name_that_is_no_text(world: World) -> None:
    world.flags["--audit-file"] = str(world.folder / "\udcff" / "audit.jsonl")


def _no_folder(world: World) -> None:
    world.flags["--audit-file"] = str(world.folder / "none" / "audit.jsonl")


FAULTS: dict[str, tuple[Plant, str, str]] = {
    "a setting that is none": (_typo, "config", "leyline.yaml:2:1.*retained_turns"),
    "a file that is no YAML": (_broken_yaml, "config", "leyline.yaml:3:1.*no YAML"),
    "Redis can't be reached": (_no_redis, "redis.reachable", "nothing is listening.*Start Redis"),
    "Redis refuses the password": (_wrong_password, "redis.reachable", "USER:PASSWORD@"),
    "Redis's certificate isn't trusted": (_untrusted_redis, "redis.reachable", "isn't trusted"),
    "Redis speaks no TLS": (_redis_without_tls, "redis.reachable", "redis:// instead"),
    "Redis speaks TLS alone": (_tls_unasked, "redis.reachable", "Use rediss://"),
    "the engine's certificate": (_untrusted_engine, "upstream.engine.reachable", "isn't trusted"),
    "the engine speaks no TLS": (
        _engine_without_tls,
        "upstream.engine.reachable",
        "has no TLS",
    ),
    "the engine can't be reached": (_no_engine, "upstream.engine.reachable", "Start the engine"),
    "secrets that disagree": (_other_secret, "upstream.engine.secret", "different.*one value"),
    "a secret on one side": (_no_secret, "upstream.engine.secret", "this proxy has none.*Set"),
    "a malformed key file": (_bad_key_line, "api-keys", "line 2.*TENANT:KEY"),
    "a key that the engine refuses": (_refused_key, "upstream.engine.key", "UPSTREAM_API_KEY"),
    "a policy that there isn't": (
        _unknown_policy,
        "policies",
        "_older_than.*policies list",
    ),
    "too few open files": (_few_files, "open-files", "ulimit -n"),
    "more memory than there is": (_much_memory, "memory", "Lower text_memory_bytes"),
    "an audit log without a folder": (_no_folder, "audit", "mkdir -p"),
    "a file that is no audit log": (_no_audit_log, "audit", "no audit log.*another file"),
    "a folder as audit log": (_audit_folder, "audit", "can't be written to"),
    "an audit key that is none": (_empty_audit_key, "audit", "holds no key"),
    "traces by another protocol": (_other_protocol, "trace", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    "two servers at one port": (
        _one_port,
        "config",
        "--admin-port, --port: .* must differ from port",
    ),
    "a password with a slash": (_unescaped_password, "config", "--session-store: .*as %XX"),
    "an option that Redis has none of": (
        _unknown_option,
        "config",
        r"--session-store: .*after its \? but db",
    ),
    "certificates without TLS": (_certificates_for_nothing, "config", "CA_FILE.*rediss://"),
    "a path that is no text": (_name_that_is_no_text, "audit", r"\\udcff.*mkdir -p"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(world: World, fault: str) -> None:
    """Its own check is red, no other is, and the fix is said."""
    plant, check, words = FAULTS[fault]
    plant(world)
    report = world.ask()
    assert report.code == 1
    failed = report.named("fail")
    assert failed.keys() == {check}
    assert re.search(words, failed[check], re.DOTALL), failed[check]


def test_redis_behind_tls(world: World) -> None:
    """Green where the authority's certificate is given."""
    _untrusted_redis(world)
    world.environ["LEYLINE_REDIS_CA_FILE"] = str(world.folder / "own.pem")
    assert world.ask().code == 0


def test_the_report_is_for_people_too(world: World) -> None:
    """Signs for good and bad, each fix below what is wrong, and how many there are of each."""
    _other_secret(world)
    code, output = world.show()
    assert code == 1
    assert "✓  redis.eviction" in output
    assert re.search(r"✗  upstream\.engine\.secret .*\n +fix: Set LEYLINE_HINTS_SECRET", output)
    assert "0 with warnings, 1 failed" in output


def test_a_redis_that_evicts(world: World) -> None:
    """A full Redis with another policy than noeviction would drop sessions: red."""
    with world.client() as client:
        client.config_set("maxmemory", "256mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        failed = world.ask().named("fail")
        client.config_set("maxmemory", "0")
        warned = world.ask()
        client.config_set("maxmemory-policy", "noeviction")
    assert failed.keys() == {"redis.eviction"}
    assert "allkeys-lru" in failed["redis.eviction"]
    assert "CONFIG SET maxmemory-policy noeviction" in failed["redis.eviction"]
    assert (warned.code, warned.named("warn").keys()) == (0, {"redis.eviction"})


def test_a_user_that_may_only_read(world: World) -> None:
    """A user of Redis that may not write is red, and one that may not even ask is, too."""
    rights = "on >{} ~* resetchannels -@all {}"
    with world.client() as client:
        for allowed, check in (("+@read +@connection +info +time", "write"), ("", "reachable")):
            words = rights.format(PASSWORD, allowed).split()
            client.execute_command("ACL", "SETUSER", "reader", "reset", *words)
            place = f"127.0.0.1:{world.redis.port}"
            world.flags["--session-store"] = f"redis://reader:{PASSWORD}@{place}/0"
            failed = world.ask().named("fail")
            assert failed.keys() == {f"redis.{check}"}
            assert "ACL SETUSER" in failed[f"redis.{check}"]
        client.execute_command("ACL", "DELUSER", "reader")


def test_a_user_that_lacks_one_command_of_the_stores(world: World) -> None:
    """Each command that the proxy uses counts, by itself and in scripts, and none beyond them; the
    probe's entries are gone afterwards."""
    used = "+info +time +ping +hello +client +eval +evalsha +set +get +del +hset +hsetnx +hincrby"
    used += " +hlen +hget +hmget +hgetall +hdel +pexpire +zadd +zcard +zcount +zrange +zrevrange"
    used += " +zrangebyscore +zrevrangebyscore +zrem +zremrangebyrank +zremrangebyscore +zpopmin"
    used += " +select"
    place = f"127.0.0.1:{world.redis.port}"
    world.flags["--session-store"] = f"redis://partial:{PASSWORD}@{place}/0"
    with world.client() as client:
        rights = f"on >{PASSWORD} ~leyline:* resetchannels -@all {used}"
        client.execute_command("ACL", "SETUSER", "partial", "reset", *rights.split())
        assert world.ask().code == 0
        for lacking in ("zpopmin", "hincrby", "evalsha", "eval", "del"):
            client.execute_command("ACL", "SETUSER", "partial", f"-{lacking}")
            failed = world.ask().named("fail")
            client.execute_command("ACL", "SETUSER", "partial", f"+{lacking}")
            assert failed.keys() == {"redis.write"}
            # Redis 7.0 doesn't name a command within a script.
            assert re.search(f"'{lacking}'|executing the script", failed["redis.write"])
            assert "ACL SETUSER" in failed["redis.write"]
        assert client.keys("*doctor*") == []
        client.execute_command("ACL", "DELUSER", "partial")


def test_every_command_of_the_stores_is_tried(world: World) -> None:
    """A user that may do what the doctor tries may do what the proxy does."""
    code = "".join(file.read_text() for file in Path(redis_stores.__file__).parent.glob("*.py"))
    own = {"pipeline", "execute", "execute_command", "initialize", "aclose", "get_primaries"}
    sent = set(re.findall(r"\b(?:pipe|client)\.(\w+)\(", code)) - own
    scripted = set(re.findall(r"redis\.call\('(\w+)'", code))
    assert {"set", "zadd", "hget"} <= sent
    with world.client() as client:
        client.config_resetstat()
        assert world.ask().code == 0
        tried = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert {"del" if name == "delete" else name.lower() for name in sent | scripted} <= tried


def test_the_redis_of_the_audit_log(world: World) -> None:
    """Its user needs the right to add to the stream in a transaction; nothing is added to it."""
    world.environ["LEYLINE_AUDIT_REDIS"] = (
        f"redis://auditor:{PASSWORD}@127.0.0.1:{world.redis.port}/0"
    )
    with world.client() as client:
        rights = f"on >{PASSWORD} ~leyline:audit resetchannels -@all +hello +client +select"
        for allowed, code in (("+xadd +multi +exec", 0), ("+xadd", 1), ("+multi +exec", 1)):
            words = f"{rights} {allowed}".split()
            client.execute_command("ACL", "SETUSER", "auditor", "reset", *words)
            report = world.ask()
            assert report.code == code
            failed = report.named("fail")
            assert failed.keys() == ({"audit.redis.write"} if code else set())
        assert "XADD to the key leyline:audit" in failed["audit.redis.write"]
        assert not client.exists("leyline:audit")
        client.execute_command("ACL", "DELUSER", "auditor")
    report = world.ask()
    assert report.named("fail").keys() == {"audit.redis.reachable"}
    assert "LEYLINE_AUDIT_REDIS" in report.named("fail")["audit.redis.reachable"]


def test_a_pipe_that_nobody_writes(world: World, tmp_path: Path) -> None:
    """A file that never answers is red, the others are reported, and the process ends."""
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    program = Path(sys.executable).parent / "leyline"
    flags = ("--upstream", world.engine_url, "--api-keys-file", str(pipe), "--timeout", "2")
    done = subprocess.run(
        [program, "doctor", *flags, "--port", "0", "--json"],
        capture_output=True,
        check=False,
        timeout=30,
        env=os.environ | world.environ,
    )
    checks = {each["name"]: each["status"] for each in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert [name for name, status in checks.items() if status == "fail"] == ["api-keys"]
    assert checks["upstream.engine.tokenizer"] == "ok"


def test_a_url_with_a_password_is_shown_without(world: World) -> None:
    """It is so with no listener, and where a key is wanted."""
    for origin, words in (
        (f"127.0.0.1:{free_port()}", "can't be reached"),
        (world.engine_url.removeprefix("http://"), "needs a key (status 401)"),
    ):
        code, output = run(f"http://u:{PASSWORD}@{origin}/v1", "--json")
        assert code == 1
        assert f"http://{origin} " in output
        assert words in output
        assert PASSWORD not in output


def test_a_replica(world: World, tmp_path: Path) -> None:
    """A server that takes no writes is red."""
    with world.client() as client, redis_server(tmp_path) as replica:
        with replica.client() as other:
            other.replicaof("127.0.0.1", world.redis.port)
            world.flags["--session-store"] = replica.url
            failed = world.ask().named("fail")
        assert client.ping()
    assert failed.keys() == {"redis.write"}
    assert "primary" in failed["redis.write"]


@pytest.mark.nightly
def test_a_cluster(world: World, tmp_path: Path) -> None:
    """Green where all is well; a single server asked as a cluster is red."""
    with redis_cluster(tmp_path) as servers:
        url = servers[0].url.removesuffix("/0").replace("redis://", "redis+cluster://")
        world.flags["--session-store"] = url
        well = world.ask()
        with servers[1].client() as client:
            client.config_set("maxmemory", "64mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
        evicting = world.ask().named("fail")
    assert well.code == 0, well.named("fail")
    assert evicting.keys() == {"redis.eviction"}
    place = f"127.0.0.1:{world.redis.port}"
    world.flags["--session-store"] = f"redis+cluster://:{PASSWORD}@{place}"
    assert world.ask().named("fail").keys() == {"redis.reachable"}


def test_an_engine_without_the_plugin(world: World) -> None:
    """A plain OpenAI-compatible server is red; a warning where splicing is switched off."""
    with serving(FakeEngine(capability=None)) as origin:
        world.flags["--upstream"] = origin
        failed = world.ask().named("fail")
        chosen = world.ask("--no-splice")
    assert failed.keys() == {"upstream.engine.plugin"}
    assert "--radix-cache-backend leyline" in failed["upstream.engine.plugin"]
    assert (chosen.code, chosen.named("warn").keys()) == (0, {"upstream.engine.plugin"})


def test_a_template_that_disagrees(world: World) -> None:
    """An engine that renders otherwise than the template that it shows is red."""

    def newer(document: dict[str, Any]) -> dict[str, Any]:
        return {**document, "chat_template": document["chat_template"] + "."}

    with serving(Altered(world.engine, RENDERER_PATH, newer)) as origin:
        world.flags["--upstream"] = origin
        failed = world.ask().named("fail")
    assert failed.keys() == {"upstream.engine.tokenizer"}
    assert "renders differently" in failed["upstream.engine.tokenizer"]
    assert "--chat-template" in failed["upstream.engine.tokenizer"]


def test_an_embedded_engine_without_the_secret(world: World) -> None:
    """A proxy that signs, before an engine in its own process that has no secret, is red."""
    del world.flags["--upstream"]
    failed = world.ask().named("fail")
    assert failed.keys() == {"upstream.engine.secret"}
    assert "token_mismatch" in failed["upstream.engine.secret"]
    assert "--engine-option hints_secret" in failed["upstream.engine.secret"]


def test_a_port_in_use(world: World) -> None:
    """Red where another program has it, a warning where it is a proxy of ours."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        world.flags["--port"] = str(taken.getsockname()[1])
        failed = world.ask().named("fail")
    assert failed.keys() == {"port"}
    assert "another program" in failed["port"]
    with serving(create_app(Settings(upstream=world.engine_url))) as origin:
        world.flags["--port"] = origin.rpartition(":")[2]
        report = world.ask()
    assert (report.code, report.named("warn").keys()) == (0, {"port"})


def test_what_is_wrong_with_flags_exits_with_2() -> None:
    """A URL and settings at once are no question."""
    assert run("http://127.0.0.1:9", "--port", "1")[0] == 2
    assert run("--engine-option", "no")[0] == 2


@pytest.mark.parametrize(
    ("options", "writes"),
    [
        (("--save", "", "--appendonly", "no"), False),
        (("--save", "", "--appendonly", "yes"), True),
        (("--save", "900 1"), True),
    ],
)
async def test_doctor_knows_a_redis_that_writes_to_disk(
    tmp_path: Path, options: tuple[str, ...], writes: bool
) -> None:
    """By its log or its snapshots, whichever it has."""
    with redis_server(tmp_path, *options) as server:
        needs = StoreNeeds(
            RedisOptions(server.url), "redis", "leyline", "session_store", lasting=True
        )
        found = {each.name: each.status for each in await examine_store(needs, 5.0)}
    assert found["redis.disk"] is (Status.OK if writes else Status.WARN)
