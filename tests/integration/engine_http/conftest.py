"""Fixtures: the default model and a fresh engine over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from support.engine_http import POOL

from leyline_lab.stand_ins.serving import check_clean
from leyline_replay.factory import serve_model
from leyline_replay.http.app import ServingOptions
from leyline_replay.models.loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """The default model."""
    return load_model(device="cpu")


@pytest.fixture
def app(loaded: LoadedModel) -> Iterator[Starlette]:
    """A fresh engine over the default model, checked for leaks afterwards."""
    app = serve_model(loaded, pool_tokens=POOL, options=ServingOptions(default_max_tokens=12))
    yield app
    app.state.shutdown()
    check_clean(app)
