"""API keys: how they are written, made, listed, replaced and revoked."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import CapturingLogger
from support.fake_engine import MODEL, FakeEngine, proxy_before
from typer.testing import CliRunner

from leyline_policies import PluginError
from leyline_proxy.cli.main import build_app
from leyline_proxy.errors import UnauthorizedError
from leyline_proxy.settings import Settings
from leyline_proxy.settings.api_keys import (
    ApiKey,
    KeyLineError,
    key_digest,
    key_line,
    parse_expiry,
    parse_key,
    parse_keys,
)
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.tenants import KeyFile, TenantDirectory, build_directory
from leyline_proxy.tenants.tenant import build_tenant

SECRET = "hunter2-hunter2"


def bearer(key: str) -> Mapping[str, str]:
    """The headers of a request with this key."""
    return {"authorization": f"Bearer {key}"}


@given(
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=64),
    st.binary(min_size=32, max_size=32),
    st.none() | st.integers(0, 4_000_000_000).map(float),
)
def test_a_written_line_is_read_as_the_same_key(
    tenant: str, digest: bytes, expires: float | None
) -> None:
    """Tenant, digest and expiry survive the way into a file and back."""
    key = ApiKey(re.sub(r"[:#\[\]{}\"']", "-", tenant), digest, expires)
    assert parse_key(key_line(key)) == key
    assert parse_keys(f"# keys\n\n  {key_line(key)}  \n") == (key,)


def test_plain_and_hashed_lines_are_the_same_key() -> None:
    """The file may hold the key or its digest, and a digest opens nothing by itself."""
    plain = parse_key(f"red:{SECRET}")
    hashed = parse_key(f"red:sha256:{key_digest(SECRET).hex().upper()}")
    assert plain == hashed
    directory = TenantDirectory([hashed], (), (), _tenant, is_open=False)
    assert directory.authenticate(bearer(SECRET)).name == "red"
    with pytest.raises(UnauthorizedError):
        directory.authenticate(bearer(f"sha256:{key_digest(SECRET).hex()}"))


@pytest.mark.parametrize(
    "line",
    [
        f"{SECRET}",
        f":{SECRET}",
        "red:",
        f"red:sha256:{SECRET}",
        f"red:{SECRET} {SECRET}",
        f"red:{SECRET} expires={SECRET}",
        f"red:{SECRET} expires=2027-01-01 expires=2027-01-01",
        f"{'r' * 65}:{SECRET}",
        f'["red:{SECRET}"]',
        f'{{"red": "{SECRET}"}}',
        f'"red:{SECRET}"',
        f"'red:{SECRET}",
        f"re[d:{SECRET}",
    ],
)
def test_wrong_lines_are_named_by_number_and_not_quoted(line: str) -> None:
    """The message names the fault, not the key."""
    with pytest.raises(KeyLineError, match="line 3") as caught:
        parse_keys(f"# first\nred:good\n{line}\n")
    assert SECRET not in str(caught.value)


def test_times_without_a_zone_are_utc() -> None:
    """A date is its first moment in UTC."""
    assert parse_expiry("1970-01-02") == 86400
    assert parse_expiry("1970-01-02T01:00:00+01:00") == 86400
    assert parse_expiry("1970-01-02T00:00:00Z") == 86400


def test_a_key_expires_at_its_time() -> None:
    """Until then it opens; from then on it is distinguished from an unknown key."""
    now = [0.0]
    keys = parse_keys(
        "red:old expires=1970-01-02\nred:new\nred:twice expires=1970-01-02\nred:twice"
    )
    directory = TenantDirectory(keys, (), (), _tenant, is_open=False, now=lambda: now[0])
    assert directory.authenticate(bearer("old")).name == "red"
    now[0] = 86400.0
    with pytest.raises(UnauthorizedError, match="expired"):
        directory.authenticate(bearer("old"))
    assert directory.authenticate(bearer("new")).name == "red"
    assert directory.authenticate(bearer("twice")).name == "red"


def _tenant(name: str) -> Any:
    return build_tenant(name, Settings())


def test_a_key_file_never_leaves_the_proxy_open(tmp_path: Path) -> None:
    """A file without a key is an error at the start, and no invitation."""
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(ValueError, match="holds no key"):
        build_directory(Settings(api_keys_file=file))


async def test_keys_are_replaced_while_requests_run(tmp_path: Path) -> None:
    """New keys open, with tenants of their own; revoked ones stop, and a tenant without any is
    gone; keys of settings stay."""
    file = tmp_path / "keys"
    file.write_text("red:k1\n")
    settings = Settings(api_keys_file=file, api_keys=["blue:kb"], policy="keep_all")
    directory = build_directory(settings)
    before = directory.authenticate(bearer("k1"))
    metrics = Metrics()
    watch = KeyFile(file, directory.replace, metrics)
    assert await watch.refresh()
    assert not await watch.refresh()
    file.write_text("red:k2\ngreen:kg\n")
    assert await watch.refresh()
    assert directory.authenticate(bearer("k2")) is before
    assert [policy.name for policy in directory.authenticate(bearer("kg")).policies] == ["keep_all"]
    assert directory.authenticate(bearer("kb")).name == "blue"
    with pytest.raises(UnauthorizedError):
        directory.authenticate(bearer("k1"))
    assert metrics.registry.get_sample_value(
        "leyline_key_reloads_total", {"result": "loaded"}
    ) == pytest.approx(1)
    file.write_text("green:kg\n")
    assert await watch.refresh()
    assert directory.names == {"blue", "green"}
    assert directory.get("red") is None and "red" not in directory


@pytest.mark.parametrize("broken", ["red", "", "red:sha256:12", "\udcff", None])
async def test_a_broken_file_changes_nothing_and_is_told(
    broken: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last good keys hold on, until the file is good again; no line of it is shown."""
    # Not the process's own logging, which other tests may have set up.
    log = CapturingLogger()
    monkeypatch.setattr("leyline_proxy.tenants.key_file.log", log)
    file = tmp_path / "keys"
    file.write_text(f"red:{SECRET}\n")
    directory = build_directory(Settings(api_keys_file=file))
    metrics = Metrics()
    watch = KeyFile(file, directory.replace, metrics)
    await watch.refresh()
    if broken is None:
        file.unlink()
    else:
        file.write_bytes(
            f"blue:{SECRET}x\n".encode() * bool(broken) + broken.encode(errors="surrogateescape")
        )
    assert not await watch.refresh()
    assert watch.problem
    assert SECRET not in watch.problem
    assert directory.authenticate(bearer(SECRET)).name == "red"
    refused = metrics.registry.get_sample_value("leyline_key_reloads_total", {"result": "refused"})
    assert refused == pytest.approx(1)
    assert "api_keys_refused" in [call.args[0] for call in log.calls]
    assert SECRET not in str(log.calls)
    file.write_text("red:good\n")
    assert await watch.refresh()
    assert watch.problem is None


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    """Some editors write one; the first tenant would have lost its settings and its limits."""
    file = tmp_path / "keys"
    file.write_text("red:k1\n", encoding="utf-8-sig")
    directory = build_directory(Settings(api_keys_file=file))
    assert directory.authenticate(bearer("k1")).name == "red"
    listed = CliRunner().invoke(build_app(), ["keys", "list", "--json", str(file)])
    assert [key["tenant"] for key in json.loads(listed.stdout)] == ["red"]


async def test_a_file_that_becomes_readable_is_read(tmp_path: Path) -> None:
    """Other permissions leave a file's time and size as they were, and are a change all the
    same."""
    file = tmp_path / "keys"
    file.write_text("red:k\n")
    directory = build_directory(Settings(api_keys_file=file))
    watch = KeyFile(file, directory.replace, Metrics())
    await watch.refresh()
    assert not await watch.refresh()
    file.chmod(0o600)
    assert await watch.refresh()


async def test_the_watch_outlives_what_a_new_tenant_breaks(tmp_path: Path) -> None:
    """The next file is read, whatever is wrong with a tenant that a file brings."""
    file = tmp_path / "keys"
    file.write_text("red:k\n")
    taken: list[object] = []

    def replace(keys: object) -> None:
        taken.append(keys)
        if len(taken) == 1:
            raise PluginError("a policy that can't be loaded")

    watch = KeyFile(file, replace, Metrics())
    assert not await watch.refresh()
    assert watch.problem
    file.write_text("red:other\n")
    assert await watch.refresh()


async def test_revocation_over_http(tmp_path: Path) -> None:
    """A running proxy sees the file change by itself, and readiness reports a broken one."""
    file = tmp_path / "keys"
    file.write_text("red:k1\n")
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}

    async def status(client: httpx.AsyncClient, key: str) -> int:
        answer = await client.post("/v1/chat/completions", json=request, headers=bearer(key))
        return answer.status_code

    async with proxy_before(FakeEngine(), api_keys_file=file) as client:
        assert await status(client, "k1") == 200
        file.write_text("red:k2 expires=2999-01-01\n")
        deadline = time.monotonic() + 5
        while await status(client, "k1") != 401:
            assert time.monotonic() < deadline
        assert await status(client, "k2") == 200
        assert (await client.get("/readyz")).json()["api_keys"] == {"problem": None}
        file.write_text("red")
        while (ready := (await client.get("/readyz")).json())["api_keys"]["problem"] is None:
            assert time.monotonic() < deadline
        assert ready["ready"]
        assert "line 1" in ready["api_keys"]["problem"]
        assert await status(client, "k2") == 200


def test_keys_are_made_hashed_and_listed(tmp_path: Path) -> None:
    """A new key goes to stderr and its line to stdout; lists show neither key nor digest."""
    run, app = CliRunner(), build_app()
    made = run.invoke(app, ["keys", "new", "red", "--expires", "2999-01-01"])
    key = made.stderr.split()[-1]
    assert key.startswith("lk-")
    assert len(key) == 3 + 43, "256 bits in base64"
    assert key not in made.stdout
    again = run.invoke(app, ["keys", "hash", "blue"], input=f"{key}\n")
    file = tmp_path / "keys"
    file.write_text(f"{made.stdout}{again.stdout}green:{SECRET} expires=2001-01-01\n")
    directory = build_directory(Settings(api_keys_file=file))
    assert directory.authenticate(bearer(key)).name == "red"
    listed = run.invoke(app, ["keys", "list", str(file), "--json"])
    rows = json.loads(listed.stdout)
    assert [(row["tenant"], row["valid"]) for row in rows] == [
        ("red", True),
        ("blue", True),
        ("green", False),
    ]
    assert rows[0]["expires"] == "2999-01-01T00:00:00Z"
    table = run.invoke(app, ["keys", "list", str(file)])
    assert (table.exit_code, "expired" in table.stdout) == (0, True)
    for shown in (listed.stdout, table.stdout):
        assert rows[0]["id"] in shown
        assert not any(secret in shown for secret in (key, SECRET, key_digest(key).hex()))


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["new", "a:b"], ""),
        (["new", "a", "--expires", "soon"], ""),
        (["hash", "a"], "two words"),
        (["hash", "a"], ""),
        (["list", "nowhere"], ""),
    ],
)
def test_misuse_is_told(arguments: list[str], given: str) -> None:
    """Wrong arguments end with status 2 and a line that says why."""
    done = CliRunner().invoke(build_app(), ["keys", *arguments], input=given)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "leyline keys:" in done.stderr
