"""Lists of models in Anthropic's shape."""

from __future__ import annotations

from anthropic.types import ModelInfo

from leyline_proxy.apis.anthropic.models import map_models


def test_models_are_as_the_sdk_reads_them() -> None:
    """Name, date and window of each, on one page."""
    listed = {"data": [{"id": "a", "created": 86_400, "max_model_len": 4096}, {"id": "b"}]}
    page = map_models(listed)
    models = [ModelInfo.model_validate(model) for model in page["data"]]
    assert [model.id for model in models] == ["a", "b"]
    assert [model.created_at.year for model in models] == [1970, 1970]
    assert [model.max_input_tokens for model in models] == [4096, None]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", False)


def test_what_is_no_model_is_left_out() -> None:
    """An engine's list may be anything."""
    listed = {"data": [{"id": 7}, "x", {"id": "a", "created": 10**18, "max_model_len": "long"}]}
    assert [model["id"] for model in map_models(listed)["data"]] == ["a"]
    empty = {"data": [], "has_more": False, "first_id": None, "last_id": None}
    assert map_models({}) == map_models({"data": None}) == empty
