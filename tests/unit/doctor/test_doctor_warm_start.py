"""The folder of the warm start, as the doctor finds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leyline_proxy.doctor.findings import Status
from leyline_proxy.doctor.warm_start import examine_warm_start
from leyline_proxy.settings import Settings
from leyline_proxy.warm_start.folder import ManifestFolder

KEY = "a key of tests, long enough"


def status_of(path: Path | None) -> tuple[Status, str]:
    """The verdict on a folder, and the fix."""
    own = {"warm_start_path": path, "warm_start_key": KEY} if path is not None else {}
    (finding,) = examine_warm_start(Settings(**own))
    assert KEY not in finding.detail + finding.fix
    return finding.status, finding.fix


def test_a_folder_must_be_the_proxys_own(tmp_path: Path) -> None:
    """A private folder is fine, also one that can be made; one that others can read, that another
    proxy uses, or that is no folder has a fix."""
    assert status_of(None)[0] is Status.SKIP
    assert status_of(tmp_path / "new" / "folder") == (Status.OK, "")
    assert not (tmp_path / "new").exists()
    tmp_path.chmod(0o700)
    assert status_of(tmp_path)[0] is Status.OK
    tmp_path.chmod(0o750)
    assert status_of(tmp_path)[0] is Status.WARN
    assert "chmod 700" in status_of(tmp_path)[1]
    other = ManifestFolder(tmp_path, 0)
    other.claim()
    assert "its own warm_start_path" in status_of(tmp_path)[1]
    other.release()
    (tmp_path / "file").touch()
    assert status_of(tmp_path / "file")[0] is Status.FAIL
    assert status_of(tmp_path / "file" / "below")[0] is Status.FAIL


def test_a_folder_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that the proxy's user can't write to fails, before the proxy starts cold."""
    access = os.access

    def denied(path: Path, mode: int) -> bool:
        return not mode & os.W_OK and access(path, mode)

    monkeypatch.setattr(os, "access", denied)  # root may write anywhere
    assert status_of(tmp_path)[0] is Status.FAIL
    assert status_of(tmp_path / "new")[0] is Status.FAIL
