"""Every test runs with no network but loopback, one Hypothesis profile and no silent skips.

* A connection or name look-up that leaves the machine fails the test that made it, also when the
  code under test swallowed the error.
* With ``CI=true`` a skipped test fails the session unless it is marked ``gpu``: CI installs what
  the tests need, so a skip there hides a hole.
* Every test has a time limit: ``timeout`` in pyproject.toml, or ``NIGHTLY_TIMEOUT_S`` at night.
* ``HYPOTHESIS_PROFILE`` chooses ``dev`` (default), ``ci`` (default with ``CI=true``) or
  ``nightly``.
"""

from __future__ import annotations

import gc
import ipaddress
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
NIGHTLY_TIMEOUT_S = 3600
IN_CI = os.environ.get("CI", "").lower() == "true"

# Model hubs are never asked, not even by a subprocess that a test starts.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# After a first failure, the phase "explain" traces every line, under which CPython 3.11.7 sometimes
# spins at a function's entry and never returns: the failure would hang the run.
PHASES = tuple(phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain)
hypothesis.settings.register_profile("dev", deadline=None, phases=PHASES)
# The same examples each time: more of them find nothing that the first runs didn't.
hypothesis.settings.register_profile(
    "ci", deadline=None, phases=PHASES, max_examples=25, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile(
    "nightly", deadline=None, phases=PHASES, max_examples=2000, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


class NetworkBlockedError(RuntimeError):
    """A test tried to reach something outside this machine."""


class NetworkGuard:
    """Refuses connections and look-ups that leave the machine, and remembers them."""

    def __init__(self) -> None:
        self._refused: list[str] = []

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """A ``sys.addaudithook`` hook: raises before the socket call happens."""
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            address = args[1]
            if isinstance(address, tuple) and not _is_loopback(str(address[0])):
                self._refuse(f"connection to {address[0]}:{address[1]}")
        elif event == "socket.getaddrinfo":
            host = args[0].decode() if isinstance(args[0], bytes) else args[0]
            if host and not _is_numeric(host) and not _is_loopback(host):
                self._refuse(f"look-up of {host}")

    def check_target(self, host: object) -> None:
        """Apply the same rule to event loops that open sockets without Python's knowledge."""
        if host is not None and not _is_loopback(str(host)):
            self._refuse(f"connection to {host}")

    def drain(self) -> list[str]:
        """Return the attempts refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def _refuse(self, what: str) -> None:
        self._refused.append(what)
        raise NetworkBlockedError(f"tests may not use the network: {what}")


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    return _is_numeric(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _guard_uvloop(guard: NetworkGuard, patch: pytest.MonkeyPatch) -> None:
    """uvloop connects through libuv, which raises no audit events."""
    try:
        import uvloop
    except ImportError:
        return
    original = uvloop.Loop.create_connection

    async def create_connection(
        loop: Any, factory: Any, host: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        guard.check_target(host)
        return await original(loop, factory, host, *args, **kwargs)

    patch.setattr(uvloop.Loop, "create_connection", create_connection, raising=False)


_GUARD = pytest.StashKey[NetworkGuard]()
_EXCUSED = pytest.StashKey[set[str]]()
_FORBIDDEN_SKIPS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Install the network guard before any test module is imported."""
    guard = NetworkGuard()
    config.stash[_GUARD] = guard
    config.stash[_EXCUSED] = set()
    config.stash[_FORBIDDEN_SKIPS] = []
    sys.addaudithook(guard.audit)
    patch = pytest.MonkeyPatch()
    _guard_uvloop(guard, patch)
    config.add_cleanup(patch.undo)
    config.add_cleanup(gc.unfreeze)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give nightly tests a longer time limit."""
    for item in items:
        if item.get_closest_marker("nightly") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(NIGHTLY_TIMEOUT_S))


@pytest.fixture(scope="session")
def network_guard(request: pytest.FixtureRequest) -> NetworkGuard:
    """The guard itself, for the tests of the guard."""
    return request.config.stash[_GUARD]


@pytest.fixture(autouse=True, scope="module")
def _light_heap() -> Iterator[None]:
    # Python's collector would look again and again at all that earlier modules left. SGLang's
    # libraries count what is left when the process ends.
    yield
    if "sglang" not in sys.modules:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    # A command that runs in this process sets its logging up, and the next test looks at its own.
    level, handlers = logging.getLogger().level, [*logging.getLogger().handlers]
    yield
    structlog = sys.modules.get("structlog")  # not where SGLang's tests run
    if structlog is not None and structlog.is_configured():
        structlog.reset_defaults()
        root = logging.getLogger()
        root.setLevel(level)
        for handler in [item for item in root.handlers if item not in handlers]:
            if type(handler).__module__.startswith("leyline_proxy"):
                root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _no_network(network_guard: NetworkGuard) -> Iterator[None]:
    network_guard.drain()
    yield
    refused = network_guard.drain()
    if refused:
        pytest.fail(f"the test tried to leave the machine: {'; '.join(refused)}", pytrace=False)


@pytest.fixture
def shared_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of recorded traces and chat templates beside the checkout.

    It is not part of the repository. Without it the test is skipped, also in CI; with
    ``LEYLINE_REQUIRE_TRACES=1`` its absence is a failure.
    """
    folder = REPOSITORY.parent / "shared"
    if (folder / "traces").is_dir() and (folder / "templates").is_dir():
        return folder
    if os.environ.get("LEYLINE_REQUIRE_TRACES") == "1":
        pytest.fail(f"LEYLINE_REQUIRE_TRACES=1, but {folder} holds no traces", pytrace=False)
    request.config.stash[_EXCUSED].add(request.node.nodeid)
    pytest.skip(f"no recorded traces at {folder}")


@pytest.fixture
def traces_dir(shared_dir: Path) -> Path:
    """The recorded agent sessions; see :func:`shared_dir` for what happens without them."""
    return shared_dir / "traces"


@pytest.fixture
def templates_dir(shared_dir: Path) -> Path:
    """Chat templates of published models; see :func:`shared_dir`."""
    return shared_dir / "templates"


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note each skipped test that CI must not let pass."""
    report = yield
    excused = item.nodeid in item.config.stash[_EXCUSED] or item.get_closest_marker("gpu")
    if report.skipped and not hasattr(report, "wasxfail") and not excused:
        item.config.stash[_FORBIDDEN_SKIPS].append(f"{item.nodeid}: {_skip_reason(report)}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Note each test module that skipped itself as a whole."""
    report = yield
    if report.skipped:
        collector.config.stash[_FORBIDDEN_SKIPS].append(
            f"{collector.nodeid}: {_skip_reason(report)}"
        )
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a CI run in which a test was skipped."""
    if IN_CI and session.config.stash[_FORBIDDEN_SKIPS] and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the skips that failed a CI run."""
    skips = config.stash[_FORBIDDEN_SKIPS]
    if IN_CI and skips:
        terminalreporter.section("skips are failures in CI", red=True)
        for skip in skips:
            terminalreporter.line(skip)
