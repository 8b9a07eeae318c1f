"""Settings are called by their names, in the documentation as in what is deployed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from jsonschema import Draft7Validator

from leyline_proxy.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "deploy" / "helm" / "leyline"
NO_SETTINGS = {
    "LEYLINE_CLIENT_CA": "leyline doctor and audit prove",
    "LEYLINE_CLIENT_CERT": "leyline doctor and audit prove",
    "LEYLINE_CLIENT_KEY": "leyline doctor and audit prove",
    "LEYLINE_CLAIM_LIMITS": "SGLang's plugin reads it",
    "LEYLINE_MIN_COPY_TOKENS": "SGLang's plugin reads it",
    "LEYLINE_ORIGIN_BYTES": "SGLang's plugin reads it",
    "LEYLINE_REUSE_MATCHER": "SGLang's plugin reads it",
    "LEYLINE_STAGE_COST_TOKENS": "SGLang's plugin reads it",
    "LEYLINE_ENERGY": "engines read it",
    "LEYLINE_SGLANG_PYTHON": "benchmarks read it",
    "LEYLINE_VLLM_PYTHON": "benchmarks read it",
    "LEYLINE_REQUIRE_TRACES": "tests read it",
    "LEYLINE_API_KEY": "leyline audit prove reads it",
    "LEYLINE_DEMO_API_KEY": "leyline demo reads it",
    "LEYLINE_ENGINE_API_KEY": "the chart's own, for SGLang's command line",
    "LEYLINE_KEY": "an example of a client's variable",
    "LEYLINE_CONFIG": "leyline doctor says that it is none",
    "LEYLINE_NAME": "stands for any setting",
}
_VARIABLE = re.compile(r"LEYLINE_[A-Z0-9_]*[A-Z0-9]")


def _texts() -> dict[str, str]:
    """The text that users read and deploy, by path."""
    found = {}
    for folder in ("deploy", "docs"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.is_file() and path.suffix not in (".png", ".pyc"):
                found[str(path.relative_to(REPOSITORY))] = path.read_text(encoding="utf-8")
    for path in (*REPOSITORY.glob("*.md"), REPOSITORY / "bench" / "README.md"):
        found[path.name] = path.read_text(encoding="utf-8")
    return found


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes the settings into the chart's schema."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "deploy" / "helm"))
    return __import__("values_schema")


def test_each_variable_is_a_setting() -> None:
    """Each variable LEYLINE_… that is documented or deployed is a setting, or is read by somebody
    else, and none of those who are excused is gone."""
    settings = {f"LEYLINE_{name.upper()}" for name in Settings.model_fields}
    named = {name: path for path, text in _texts().items() for name in _VARIABLE.findall(text)}
    unknown = {
        name: path for name, path in named.items() if name not in settings | set(NO_SETTINGS)
    }
    assert not unknown
    assert set(NO_SETTINGS) <= set(named)
    assert not set(NO_SETTINGS) & settings


def test_chart_knows_the_settings_of_this_version(generator: ModuleType) -> None:
    """The chart's schema has this version's settings: `make chart-schema` changes nothing."""
    assert generator.text() == generator.SCHEMA.read_text(encoding="utf-8")


def test_chart_takes_what_the_proxy_takes(generator: ModuleType) -> None:
    """The chart refuses no value of a setting that the proxy reads, its defaults among them."""
    schema = json.loads(generator.SCHEMA.read_text(encoding="utf-8"))
    settings = schema["properties"]["proxy"]["properties"]["settings"]
    validator = Draft7Validator(settings)
    defaults = Settings().model_dump(mode="json")
    own = {name: value for name, value in defaults.items() if name in settings["properties"]}
    assert len(own) > 40
    validator.validate(own)
    forms = {"undeclared": [{"tool": "amortize"}, "tool=amortize", ["tool=amortize"]]}
    assert forms.keys() == generator.ALSO_TAKEN.keys()
    forms |= {name: ["off", False] for name in ("trace", "reuse", "pass_through")}
    forms["tenants"] = [{"red": {"reuse": value}} for value in ("live", False)]
    for name, values in forms.items():
        for value in values:
            validator.validate({name: value})
            Settings(**{name: value})
    words = ({"trace": True}, {"reuse": True}, {"reuse": "on"})
    for wrong in (*words, {"undeclared": 1}, {"max_concurrent": "many"}, {"x": 1}):
        assert not validator.is_valid(wrong)
