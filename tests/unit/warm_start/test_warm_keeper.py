"""The keeper of runs: forgets reach the disk, which may be slow, full or another proxy's."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from warm_kit import IDENTITY, TOKENS, manifests_in, run

from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.tenants import TenantDirectory, build_directory
from leyline_proxy.warm_start.book import RunBook
from leyline_proxy.warm_start.folder import ManifestFolder
from leyline_proxy.warm_start.keeper import RunKeeper
from leyline_proxy.warm_start.runs import FileResult, Group, Outcome

GROUP = Group("t", IDENTITY)


@dataclass
class Kept:
    """A keeper and its parts."""

    keeper: RunKeeper
    book: RunBook
    metrics: Metrics
    path: Path

    def files(self, result: FileResult) -> float:
        """The number of changes with this result."""
        name = "leyline_warm_start_files_total"
        return self.metrics.registry.get_sample_value(name, {"result": result.value}) or 0.0

    def on_disk(self) -> set[str]:
        """Sessions of the manifest."""
        path = self.path / self.keeper._manifests._seal.name(GROUP)
        if not path.exists():
            return set()
        found = self.keeper._manifests._read(path.name, path.read_bytes())
        assert not isinstance(found, Outcome)
        return {each.session for each in found[1]}


def directory(tenants: dict[str, Any]) -> TenantDirectory:
    """The tenants of a proxy."""
    return build_directory(Settings(upstream="http://e", tenants=tenants))


@asynccontextmanager
async def kept(
    path: Path, tenants: dict[str, Any] | None = None, *, disk_s: float = 5.0
) -> AsyncIterator[Kept]:
    """A keeper, of the tenant ``t`` unless said otherwise."""
    book, metrics = RunBook(4 * TOKENS), Metrics()
    keeper = RunKeeper(
        book,
        manifests_in(path),
        directory(tenants or {"t": {"api_keys": ["key-t"]}}),
        metrics,
        load_s=5,
        ttl_s=3600,
        interval_s=3600,
        disk_s=disk_s,
    )
    await keeper.open()
    yield Kept(keeper, book, metrics, path)
    await keeper.close()


class SlowDisk:
    """Holds up each write until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        write = ManifestFolder.write

        def slow(folder: ManifestFolder, name: str, data: bytes) -> FileResult:
            self.begun.set()
            assert self.go.wait(30)
            return write(folder, name, data)

        monkeypatch.setattr(ManifestFolder, "write", slow)


async def test_a_forget_waits_for_a_manifest_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is in the bytes on their way to the disk, and gone once the forget returns."""
    async with kept(tmp_path) as k:
        k.book.keep(run(range(9), "secret"))
        k.book.keep(run(range(9), "other"))
        disk = SlowDisk(monkeypatch)
        writing = asyncio.create_task(k.keeper.write())
        assert await asyncio.to_thread(disk.begun.wait, 10)
        forgetting = asyncio.create_task(k.keeper.forget("t", "secret", "t1", 0))
        await asyncio.sleep(0.05)
        assert not forgetting.done()
        disk.go.set()
        await writing
        await forgetting
        assert k.on_disk() == {"other"}


@pytest.mark.parametrize("gone", ["timed out", "cancelled"])
async def test_a_disk_that_hangs_delays_a_forget_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """The forget continues and says that the file may be left; what the disk does later is undone
    by the next write, also if nobody waited for it."""
    async with kept(tmp_path, disk_s=0.2) as k:
        k.book.keep(run(range(9), "secret"))
        disk = SlowDisk(monkeypatch)
        writing = asyncio.create_task(k.keeper.write())
        assert await asyncio.to_thread(disk.begun.wait, 10)
        if gone == "cancelled":
            writing.cancel()
        await asyncio.wait((writing,))
        began = time.monotonic()
        for number in range(20):
            await k.keeper.forget("t", "secret", f"t{number}", 0)
        assert time.monotonic() - began < 2
        assert k.files(FileResult.LEFT) == 20
        disk.go.set()
        await asyncio.to_thread(k.keeper._disk.submit(lambda: None).result)
        assert k.on_disk() == {"secret"}
        await k.keeper.write()
        assert k.on_disk() == set()


@pytest.mark.parametrize("known", [True, False])
async def test_a_forget_reaches_a_manifest_whose_write_failed_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """The new file is in its place, but the folder couldn't be flushed: a forget deletes what it
    has, whether there was a manifest before or not."""
    async with kept(tmp_path) as k:
        if known:
            k.book.keep(run(range(9), "other"))
            await k.keeper.write()

        def fails(folder: ManifestFolder) -> None:
            raise OSError(errno.EIO, "Input/output error")

        k.book.keep(run(range(9), "secret"))
        with monkeypatch.context() as patch:
            patch.setattr(ManifestFolder, "_sync", fails)
            await k.keeper.write()
        assert k.files(FileResult.FAILED) == 1
        assert "secret" in k.on_disk()
        await k.keeper.forget("t", "secret", "t1", 0)
        assert k.on_disk() == ({"other"} if known else set())


async def test_a_forget_reaches_a_manifest_of_an_earlier_proxy(tmp_path: Path) -> None:
    """A manifest that was loaded, and never written here, is rewritten as well."""
    async with kept(tmp_path) as k:
        k.book.keep(run(range(9), "secret"))
        k.book.keep(run(range(9), "other"))
    async with kept(tmp_path) as k:
        assert {each.session for each in k.book} == {"secret", "other"}
        await k.keeper.forget("t", "secret", "t1", 0)
        assert k.on_disk() == {"other"}
        await k.keeper.delete("t", "other")
        assert list(tmp_path.glob("*.warm")) == []  # noqa: ASYNC240


async def test_a_tenant_that_wants_none_has_none(tmp_path: Path) -> None:
    """Manifests of a tenant that switched the warm start off, or is gone, are deleted at the
    start, and the outcome says so."""
    for number, (tenants, outcome) in enumerate(
        (
            ({"t": {"api_keys": ["key-t"], "warm_start": False}}, Outcome.SWITCHED_OFF),
            ({"u": {"api_keys": ["key-u"]}}, Outcome.OTHER_TENANT),
        )
    ):
        async with kept(tmp_path / str(number)) as k:
            k.book.keep(run(range(9)))
        async with kept(tmp_path / str(number), tenants) as k:
            assert (len(k.book), k.on_disk()) == (0, set())
            name, labels = "leyline_warm_start_runs_total", {"outcome": outcome.value}
            assert k.metrics.registry.get_sample_value(name, labels) == 1


async def test_a_tenant_whose_key_is_taken_away_leaves_nothing(tmp_path: Path) -> None:
    """The next write drops its runs, and its manifest."""
    async with kept(tmp_path) as k:
        k.book.keep(run(range(9)))
        await k.keeper.write()
        assert k.on_disk() == {"s"}
        k.keeper._tenants = directory({"u": {"api_keys": ["key-u"]}})
        await k.keeper.write()
        assert (len(k.book), k.on_disk()) == (0, set())


async def test_without_its_folder_the_warm_start_is_off(tmp_path: Path) -> None:
    """A second proxy on the folder, or a folder that can't be, keeps nothing and breaks nothing; a
    forget that may have left a file of its own is counted."""
    (tmp_path / "file").write_text("no folder")
    async with kept(tmp_path / "own") as first:
        first.book.keep(run(range(9)))
        for path in (tmp_path / "own", tmp_path / "file"):
            async with kept(path) as second:
                assert not second.keeper.on
                await second.keeper.forget("t", "s", "t1", 0)
                assert second.files(FileResult.LEFT) == (path.name == "file")
        await first.keeper.write()
        assert first.on_disk() == {"s"}


async def test_idle_sessions_leave_the_disk(tmp_path: Path) -> None:
    """A run older than a session's lifetime is dropped with the next write, without a forget."""
    async with kept(tmp_path) as k:
        k.book.keep(run(range(9), "old", at=time.time() - 3599))
        k.book.keep(run(range(9), "new"))
        await k.keeper.write()
        assert k.on_disk() == {"old", "new"}
        k.keeper._ttl_s = 3598
        await k.keeper.write()
        assert k.on_disk() == {"new"}


def test_outcomes_are_those_of_the_metrics() -> None:
    """Each outcome and result starts its series at 0, and no other does."""
    registry = Metrics().registry
    for name, label, values in (
        ("leyline_warm_start_runs", "outcome", Outcome),
        ("leyline_warm_start_files", "result", FileResult),
    ):
        (family,) = (each for each in registry.collect() if each.name == name)
        found = {s.labels[label] for s in family.samples if s.name.endswith("_total")}
        assert found == {str(value) for value in values}
