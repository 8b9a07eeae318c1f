"""A model's template and tokenizer without the model, and the addresses of engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from leyline_lab.errors import SubjectError
from leyline_lab.evaluation.opening import is_address
from leyline_lab.evaluation.rendering import ModelRenderer
from leyline_lab.evaluation.sessions import evaluation_sessions
from leyline_lab.fidelity.replay_subject import render_chat
from leyline_lab.traces.renderer import folder_renderer
from leyline_proxy.upstream.client import RendererDocument
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir
from leyline_replay.text.chat import PromptEncoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A shipped model's folder, without weights."""
    shipped = trained_model_dir(DEFAULT_MODEL_NAME)
    assert shipped is not None
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shipped / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("opened", [True, False])
def test_prompts_are_those_of_the_replay_engine(folder: Path, opened: bool) -> None:
    """Tokens and places are equal for a recorded session with tools, from a folder and from an
    engine's own document."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    encoder = PromptEncoder(tokenizer)
    served = encoder.renderer_document()
    step = evaluation_sessions().recorded[6]
    expected = render_chat(encoder, tokenizer, step.messages, step.tools, opened=opened)
    assert len(expected.tokens) > 500 and any(expected.contents)
    for document in (folder_renderer(folder), RendererDocument(**served)):
        renderer = ModelRenderer("m", document)
        assert renderer.render(step.messages, step.tools, opened=opened) == expected
        assert renderer.decode(expected.tokens[:80]) == tokenizer.decode(expected.tokens[:80])
        assert renderer.encode("a b\n") == tuple(tokenizer.encode("a b\n"))
        ordinary = renderer.ordinary(4096)
        assert set(range(4096)) - set(ordinary) == set(tokenizer.all_special_ids)
        assert max(renderer.ordinary(50)) == 49


def test_equal_documents_have_equal_digests(folder: Path) -> None:
    """Another template is another prompt, so its cases are others."""
    once = ModelRenderer("m", folder_renderer(folder)).digest
    assert ModelRenderer("n", folder_renderer(folder)).digest == once
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert ModelRenderer("m", folder_renderer(folder)).digest != once


@pytest.mark.parametrize(
    "configured",
    [
        "{{ x }}",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ x }}"}],
    ],
)
def test_a_template_may_be_in_the_tokenizer_s_settings(folder: Path, configured: Any) -> None:
    """Of several, the default counts; special tokens may be texts or objects."""
    (folder / "chat_template.jinja").unlink()
    settings = {"chat_template": configured, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    document = folder_renderer(folder)
    assert document.chat_template == "{{ x }}"
    assert document.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def without(*names: str) -> Callable[[Path], None]:
    """Take files away."""

    def take(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return take


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    """Put something else into a file."""
    return lambda folder: bool((folder / name).write_bytes(content)) and None


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (shutil.rmtree, "no folder"),
        (without("tokenizer.json"), "no tokenizer.json"),
        (without("chat_template.jinja"), "no chat template"),
        (without("chat_template.jinja", "tokenizer_config.json"), "no chat template"),
        (replaced("tokenizer.json", b"{}"), "can't be loaded"),
        (replaced("tokenizer.json", b"\xff"), "can't be read"),
        (replaced("tokenizer_config.json", b"[]"), "tokenizer_config.json"),
        (replaced("tokenizer_config.json", b"{"), "tokenizer_config.json"),
        (replaced("chat_template.jinja", b"{% if %}"), "can't be loaded"),
        (replaced("chat_template.jinja", b"{{ raise_exception('no tools') }}"), "no tools"),
        (replaced("chat_template.jinja", b"{{ messages[9].role }}"), "refused"),
        (replaced("chat_template.jinja", b"{{ 1 + '' }}"), "can't render"),
    ],
)
def test_an_unusable_folder_is_named(
    folder: Path, damage: Callable[[Path], None], names: str
) -> None:
    """The error says what is missing or wrong."""
    damage(folder)
    with pytest.raises(SubjectError, match=names):
        ModelRenderer("m", folder_renderer(folder)).render(
            [{"role": "user", "content": "Hi"}], (), opened=True
        )


GOOD = ("http://127.0.0.1:30000", "https://gpu1", "http://[::1]:1/")
BAD: Sequence[str] = (
    "sgl", "gpu1:30000", "ftp://gpu1", "http://", "http://key@gpu1", "http://gpu1?key=1",
    "http://gpu1#a", "http://gpu1:port", "",
)  # fmt: skip


def test_addresses_have_a_host_and_no_key() -> None:
    """An address that would show a key in errors is none."""
    assert all(map(is_address, GOOD))
    assert not any(map(is_address, BAD))
