"""Checks side by side, and what the command makes of the settings."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

import httpx
import msgspec
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from leyline_proxy.cli import build_app
from leyline_proxy.cli.flags import FLAGS, read_settings, sources_of
from leyline_proxy.doctor import Check, Finding, Situation, Status, checks_for, examine
from leyline_proxy.doctor import checks as checking
from leyline_proxy.doctor.examination import in_thread
from leyline_proxy.doctor.findings import document, fail, ok
from leyline_proxy.doctor.reaching import document as server_document
from leyline_proxy.settings import Settings
from leyline_proxy.settings.faults import Sources, faults_of, ignored_variables

ALL_FLAGS = [flag for flags in FLAGS.values() for flag in flags]


async def test_one_check_neither_delays_nor_spoils_the_others() -> None:
    """They run at once; one that hangs or raises is red, in its place, without its error's text."""

    async def slow() -> Sequence[Finding]:
        await asyncio.sleep(0.1)
        return [ok("slow", "")]

    async def hangs() -> Sequence[Finding]:
        await asyncio.Event().wait()
        return []

    async def raises() -> Sequence[Finding]:
        raise LookupError("hunter2")

    ended: list[str] = []
    asked = {"a": slow, "hangs": hangs, "b": slow, "raises": raises, "c": slow}
    begun = time.monotonic()
    checks = {name: Check(ask, 0.3) for name, ask in asked.items()}
    found = await examine(checks, ended=ended.append)
    assert time.monotonic() - begun < 2
    assert [finding.name for finding in found] == ["slow", "hangs", "slow", "raises", "slow"]
    assert found[1].status is found[3].status is Status.FAIL
    assert "within 0.3 s" in found[1].detail
    assert "hunter2" not in str(document(found))
    assert sorted(ended) == sorted(asked)
    assert document(found)["ok"] is False


async def test_what_hangs_in_a_thread_keeps_nobody() -> None:
    """Its check fails in time; results and errors of others come through."""
    forever = threading.Event()

    def raises() -> Sequence[Finding]:
        raise LookupError

    asked = {"hangs": forever.wait, "well": lambda: [ok("well", "")], "raises": raises}
    checks = {name: Check(partial(in_thread, ask), 0.2) for name, ask in asked.items()}  # type: ignore[arg-type]
    hangs, well, raised = await examine(checks)
    threads = [each for each in threading.enumerate() if each.name == "leyline-doctor"]
    assert [each.daemon for each in threads] == [True]
    forever.set()
    threads[0].join(5)
    assert "within 0.2 s" in hangs.detail
    assert well.status is Status.OK
    assert "LookupError" in raised.detail


def test_a_report_is_text() -> None:
    """It is text even where a path isn't: JSON and terminals take it."""
    assert json.dumps(document([fail("a", "\udcff", "mend \udcff")])).isascii()
    assert msgspec.json.encode(document([fail("a", "\udcff", "mend \udcff")]))


async def test_a_server_that_never_ends_its_answer() -> None:
    """It neither fills the memory nor takes the time; nor does one that nests without end."""

    async def endless(_: httpx.Request) -> httpx.Response:
        async def body() -> AsyncIterator[bytes]:
            while True:
                yield b" " * 1_000_000

        return httpx.Response(200, content=body())

    async def deep(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b"[" * 200_000)

    for handler in (endless, deep):
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
            with pytest.raises(ValueError, match="too"):
                await server_document(client, "/")


def test_what_a_server_says_is_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves no cursor, is no markup, and has no more than some lines of the report."""
    said = "\x1b[2J[red]x[/red]\r" + "y" * 10_000

    async def examined(*_: object, **__: object) -> list[Finding]:
        return [fail("upstream.a.plugin", said, "see the \x07log")]

    monkeypatch.setattr("leyline_proxy.doctor.examine", examined)
    told = CliRunner().invoke(build_app(), ["doctor", "--upstream", "http://engine"])
    printed = told.stdout
    assert "[red]x[/red]" in printed
    assert not {"\x1b", "\r", "\x07"} & set(printed)
    assert len(printed) < 3_000


async def test_each_upstream_has_a_check_of_its_own() -> None:
    """Engines are asked side by side, under their names."""
    engines = {name: {"url": f"http://{name}"} for name in ("a", "b")}
    checks = checks_for(Situation(Settings(upstreams=engines)))
    assert {"upstream.a", "upstream.b", "redis", "ports"} <= checks.keys()
    many = {f"e{number}": {"url": "http://127.0.0.1:1"} for number in range(100)}
    settings = Settings(upstreams=many)
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        build = checking.build_pool
        patch.setattr(
            checking,
            "build_pool",
            lambda own, *rest, **named: made.extend(own.engines()) or build(own, *rest, **named),
        )
        checks = checks_for(Situation(settings))
        found = await examine({name: checks[name] for name in checks if "upstream" in name})
    assert sorted(made) == sorted(many), "each client is made once"
    assert {each.name for each in found} == {f"upstream.{name}.reachable" for name in many}
    assert checks_for(Situation(Settings()))["upstream.engine"].limit_s > 60


def test_every_flag_of_serve_is_a_setting() -> None:
    """Doctor takes all that serve takes, and both make the same settings of it."""
    values = {
        "undeclared": ["tool=exact"],
        "api_key": ["red:hunter2hunter2"],
        "upstream": ["http://a", "http://b"],
        "engine_option": ["x=1"],
        "log_level": "debug",
        "log_format": "console",
        "edit_timing": "now",
        "audit_turns": "all",
    }
    for flag in ALL_FLAGS:
        if flag.name == "config":
            continue
        flags = dict.fromkeys(flag.name for flag in ALL_FLAGS)
        flags[flag.name] = values.get(flag.name, flag.kind("1"))
        faults = []
        try:
            read_settings(flags)
        except ValueError as error:
            faults = faults_of(error, sources_of(flags))
        assert not [fault for fault in faults if "not a setting" in fault.problem], flag.name


def test_variables_that_are_no_settings() -> None:
    """A misspelt one is reported with the nearest name; one far from all is somebody else's."""
    environ = {"LEYLINE_POTR": "1", "LEYLINE_HOST": "h", "LEYLINE_XYZZY_QUUX": "1", "PATH": ""}
    (found,) = ignored_variables(environ)
    assert found.place == "LEYLINE_POTR"
    assert "LEYLINE_PORT" in found.fix
    (found,) = ignored_variables({"LEYLINE_CONFIG": "f", "LEYLINE_ENGINE_API_KEY": "k"})
    assert "--config" in found.fix
    assert ignored_variables({"LEYLINE_AUDIT_KEY": "k", "LEYLINE_HOST": ""}) == []
    (found,) = ignored_variables({"LEYLINE_AUDIT_KEY": ""})
    assert (found.place, found.problem) == ("LEYLINE_AUDIT_KEY", "is empty, and is ignored")


def test_which_setting_an_upstream_is() -> None:
    """One URL and several are two settings; a fault names the flag for the right one."""
    flags: dict[str, object] = dict.fromkeys(flag.name for flag in ALL_FLAGS)
    assert sources_of({**flags, "upstream": ["http://a"]}).flags == {"upstream": "--upstream"}
    named = sources_of({**flags, "upstream": ["a=http://a", "http://u:p@b"]})
    assert named.flags == {"upstreams": "--upstream"}


def test_variables_of_kubernetes() -> None:
    """A Service named leyline sets LEYLINE_PORT to a URL: the fault says how to stop that."""
    environ = {"LEYLINE_PORT": "tcp://10.0.0.1:8790"}
    try:
        Settings(port=environ["LEYLINE_PORT"])  # type: ignore[arg-type]
    except ValidationError as error:
        (fault,) = faults_of(error, Sources(environ=environ))
    assert fault.place == "LEYLINE_PORT"
    assert "enableServiceLinks: false" in fault.fix
