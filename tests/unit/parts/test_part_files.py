"""Files of evicted texts: whole or not there, without waiting for a disk that hangs."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from parts_kit import BLUE, LIMITS, OLD, RED, START, part, store_over
from support.clock import Clock

from leyline_proxy.parts.files import FileSpace
from leyline_proxy.parts.limits import FLOOR_S, PartStoreError
from leyline_proxy.wiring.recall import file_space

TEXT = part("x" * 5000)


class FullDisk(LocalFileSystem):
    """A disk without room: a file is begun, and not ended."""

    cachable = False
    full = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value[:100] if self.full else value, mode, **options)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


class HungDisk(LocalFileSystem):
    """A disk that doesn't answer until it is let go."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.answers.wait(20)
        return super().ls(path, detail=detail, **options)


def _files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_symlink() or not each.is_dir()]


def _folders(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_dir()]


async def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A text that finds no room is an error and leaves no file; what was there can be recalled. A
    forget removes it, and isn't taken for done as long as its mark finds no room."""
    disk = FullDisk()
    failed: list[str] = []
    space = FileSpace(disk, str(tmp_path), timeout_s=5)
    store = store_over(space, Clock(START), failed=failed.append)
    await store.put(RED, [TEXT])
    before = {each: each.read_bytes() for each in _files(tmp_path)}
    disk.full = True
    with pytest.raises(PartStoreError, match=r"^the file system failed \(OSError\)$"):
        await store.put(RED, [part("y"), part("z")])
    assert {each: each.read_bytes() for each in _files(tmp_path)} == before
    assert store.problem == "the file system failed (OSError)"
    assert (await store.get(RED, [TEXT.address])).parts
    assert store.problem is None
    with pytest.raises(PartStoreError):
        await store.forget(RED, turn="", demands=0)
    assert failed == ["put", "forget"]
    assert not _files(tmp_path)
    await store.aclose()


async def test_a_forget_on_a_full_disk_makes_its_own_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts that it reaches go, its mark takes their place, and the addresses are known as
    forgotten; another session's text stays."""
    disk = FullDisk()
    store = store_over(FileSpace(disk, str(tmp_path), timeout_s=5), Clock(START))
    await store.put(BLUE, [TEXT])
    await store.put(RED, [TEXT])
    remove = FullDisk.rm_file

    def makes_room(disk: FullDisk, path: str) -> None:
        remove(disk, path)
        disk.full &= path.endswith(".draft")

    monkeypatch.setattr(FullDisk, "rm_file", makes_room)
    disk.full = True
    assert await store.forget(RED, turn="", demands=0) == 1
    assert (await store.get(RED, [TEXT.address])).forgotten == {TEXT.address}
    assert await store.held(RED, 1) == (0, 0)
    assert (await store.get(BLUE, [TEXT.address])).parts
    await store.aclose()


async def test_a_forget_reaches_the_draft_of_a_killed_proxy(tmp_path: Path) -> None:
    """A text that was being written when its proxy was killed leaves with its session's forget; a
    write that is under way is none the worse, and is left out."""
    store = store_over(file_space(f"file://{tmp_path}", timeout_s=5), Clock(START))
    await store.put(RED, [TEXT])
    await store.put(BLUE, [TEXT])
    for old in _files(tmp_path):
        old.rename(old.with_name(f"{old.name}-{'0' * 16}.draft"))
    await store.forget(RED, turn="", demands=0)
    assert sorted(each.name[0] + each.suffix for each in _files(tmp_path)) == ["m", "p.draft"]
    await store.aclose()


def _full_device() -> LocalFileSystem:
    """A file system all of whose files are the full device."""

    class FullDevice(LocalFileSystem):
        cachable = False

        def pipe_file(
            self, path: str, value: bytes, mode: str = "overwrite", **options: Any
        ) -> None:
            Path(path).symlink_to("/dev/full")
            super().pipe_file(path, value, mode, **options)

    return FullDevice()


async def test_a_device_that_is_really_full(tmp_path: Path) -> None:
    """On a device that the system reports as full, a text is refused whole."""
    store = store_over(FileSpace(_full_device(), str(tmp_path), timeout_s=5), Clock(START))
    with pytest.raises(PartStoreError):
        await store.put(RED, [TEXT])
    assert not _files(tmp_path)
    await store.aclose()


async def test_a_hung_disk_delays_nobody_for_long(tmp_path: Path) -> None:
    """An operation on a disk that hangs ends with an error after its time, and the loop runs on."""
    disk = HungDisk()
    store = store_over(FileSpace(disk, str(tmp_path), timeout_s=0.2), Clock(START))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(PartStoreError, match="no answer in time"):
        await store.get(RED, [TEXT.address])
    assert ticks >= 5
    ticking.cancel()
    disk.answers.set()
    await store.put(RED, [TEXT])
    assert store.problem is None
    await store.aclose()


async def test_what_has_expired_is_tidied_away(tmp_path: Path) -> None:
    """Expired texts and forgets, drafts of a killed proxy and empty folders go; the rest stays,
    and so does what isn't the store's."""
    clock = Clock(START)
    store = store_over(file_space(f"file://{tmp_path}", timeout_s=5), clock)
    await store.put(RED, [TEXT])
    await store.forget(BLUE, turn="", demands=0)
    (old,) = [each for each in _files(tmp_path) if each.name.startswith("p")]
    draft = old.with_name(f"{old.name}-{'0' * 16}.draft")
    draft.write_bytes(b"half")
    foreign = tmp_path / "README"
    foreign.write_text("mine")
    await store.tidy()
    assert len(_files(tmp_path)) == 4
    clock.now += LIMITS.ttl_s + 1
    await store.tidy()
    assert len(_files(tmp_path)) == 2
    clock.now += FLOOR_S
    await store.tidy()
    assert _files(tmp_path) == [foreign]
    assert not _folders(tmp_path)
    await store.put(RED, [TEXT])
    assert (await store.get(RED, [TEXT.address])).parts
    await store.aclose()


async def test_two_proxies_share_a_folder(tmp_path: Path) -> None:
    """A proxy sees at once what another one puts and forgets, and names the same places."""
    clock = Clock(START)
    one, two = (
        store_over(file_space(f"file://{tmp_path}", timeout_s=5), clock, OLD) for _ in range(2)
    )
    await one.put(RED, [TEXT])
    assert (await two.get(RED, [TEXT.address])).parts
    await two.forget(RED, turn="", demands=0)
    assert (await one.get(RED, [TEXT.address])).forgotten
    assert await one.held(RED, 1) == (0, 0)
    await one.aclose()
    await two.aclose()


def test_an_unknown_file_system_is_named() -> None:
    """A scheme that fsspec doesn't know, or whose package is missing, is an error with the fix."""
    with pytest.raises(ValueError, match="recall_store: files of nosuch:// can't be used here"):
        file_space("nosuch://x/y", timeout_s=1)
    with pytest.raises(ValueError, match="install s3fs"):
        file_space("s3://bucket/folder", timeout_s=1)
