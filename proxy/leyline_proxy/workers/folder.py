"""The folder of one start. Imports nothing that reads the variable which is set here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder in which processes add up their metrics; prometheus_client reads it when it is
imported."""


@contextmanager
def own_folder() -> Iterator[Path]:
    """Yield a folder that only this user can enter, with one for metrics unless one is set."""
    with tempfile.TemporaryDirectory(prefix="leyline-") as name:
        folder = Path(name)
        if not os.environ.get(METRICS_VARIABLE):
            os.environ[METRICS_VARIABLE] = str(folder / "metrics")
            (folder / "metrics").mkdir()
        yield folder
