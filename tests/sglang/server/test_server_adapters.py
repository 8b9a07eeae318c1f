"""A real server with LoRA adapters: KV of one is never another's, and edits splice with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import httpx
import pytest
from adapters import RANK, build_adapter
from conftest import ModelFolder
from equality_cases import play_random
from equality_checks import check_turn
from equality_kit import (
    BOUND,
    CONTROL_FACTOR,
    Played,
    PlayedSession,
    distance,
    draw_tokens,
    expect,
)
from oracle_models import OracleModel
from oracle_reference import Fresh
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import Directive, ForgetCounts, Outcome, Reason, SpanLabel

pytestmark = pytest.mark.nightly

NAMES = ("red", "blue")
CUT = Directive(60, 90)

Reference = Callable[[Path], OracleModel]


class Adapters:
    """The server, and its model under each adapter as transformers runs it."""

    def __init__(self, server: SglangServer, folders: dict[str | None, Path], load: Reference):
        self.server = server
        self.folders = folders
        self._load = load

    def subject(self, adapter: str | None) -> OracleModel:
        """The model with an adapter's weights, or without any."""
        return self._load(self.folders[adapter])

    def load(self, name: str, weights: str) -> None:
        """Give an adapter's name to the weights of another, or back."""
        for path, body in (
            ("unload_lora_adapter", {"lora_name": name}),
            (
                "load_lora_adapter",
                {"lora_name": name, "lora_path": str(self.folders[weights].parent)},
            ),
        ):
            answer = httpx.post(f"{self.server.base_url}/{path}", json=body, timeout=60)
            assert answer.json()["success"], answer.text


@pytest.fixture(scope="module")
def adapters(
    model_folder: ModelFolder,
    probed: dict[str, str],
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Adapters]:
    """A Llama server with two adapters; its log must be clean in the end."""
    parent = tmp_path_factory.mktemp("adapters")
    base = model_folder(SglangModel.LLAMA)
    folders: dict[str | None, Path] = {None: base}
    for seed, name in enumerate(NAMES):
        folders[name] = build_adapter(base, parent / name, seed)
    flags = (
        "--enable-lora",
        "--lora-backend=torch_native",
        f"--max-lora-rank={RANK}",
        "--lora-paths",
        *(f"{name}={parent / name}" for name in NAMES),
    )
    with SglangServer(base, parent / "log", flags, probed) as server:
        yield Adapters(server, folders, reference)
        server.check_clean()


@pytest.fixture
def begin(adapters: Adapters, tmp_path: Path) -> Callable[[str, str | None], PlayedSession]:
    """Begins a session of a given name under an adapter, or without one."""

    def start(name: str, adapter: str | None) -> PlayedSession:
        subject = adapters.subject(adapter)
        name = f"{tmp_path.name}-{name}"
        return PlayedSession(adapters.server, subject, tmp_path, name, adapter=adapter)

    return start


def switched(session: PlayedSession, adapters: Adapters, adapter: str | None) -> PlayedSession:
    """The same session, whose next turn is under another adapter."""
    return replace(
        session, subject=adapters.subject(adapter), adapter=adapter, turns=[*session.turns]
    )


def cut_prefilled(session: PlayedSession, source: Played) -> Played:
    """An edit of a turn whose KV must not be used: all of its prompt is computed."""
    tokens = source.tokens
    prompt = (*tokens[: CUT.start], *tokens[CUT.end :], 70)
    options = {"sources": (source.ref,), "directives": (CUT,)}
    return session._run(prompt, [Fresh(prompt)], len(prompt) - 1, **options)


@pytest.mark.parametrize("adapter", [*NAMES, None])
def test_edits_under_an_adapter_give_the_contracts_answers(
    adapter: str | None, begin: Callable[[str, str | None], PlayedSession], adapters: Adapters
) -> None:
    """Answers and KV, gaps included, are those of the adapter's weights, and of no others."""
    session = begin("edits", adapter)
    spliced = 0
    for played in play_random(session, Random(5), 4):
        check_turn(session, played)
        spliced += played.receipt.tokens.spliced
    assert spliced >= 300
    other = adapters.subject(None if adapter == "red" else "red")
    prompt, output = played.tokens[: played.prompt], played.tokens[played.prompt :]
    wrong = expect(other, [Fresh(prompt)], played.scored_from + 1, output)
    assert distance(played.scores, wrong) >= CONTROL_FACTOR * BOUND


@pytest.mark.parametrize("change", [("red", "blue"), ("red", None), (None, "red")])
def test_kv_of_one_adapter_is_never_another_s(
    change: tuple[str | None, str | None],
    begin: Callable[[str, str | None], PlayedSession],
    adapters: Adapters,
) -> None:
    """After a change of adapter, an edit is refused by name, and computed under the new one."""
    before, after = change
    session = begin("changes", before)
    opened = session.open(draw_tokens(Random(str(change)), 300))
    played = cut_prefilled(switched(session, adapters, after), opened)
    assert played.receipt.outcome is Outcome.REPREFILLED
    assert played.receipt.reason is Reason.INCOMPATIBLE_IDENTITY
    assert (played.receipt.tokens.prefix, played.receipt.tokens.spliced) == (0, 0)
    assert played.error <= BOUND


def test_new_weights_under_an_old_name_take_no_old_kv(
    begin: Callable[[str, str | None], PlayedSession], adapters: Adapters
) -> None:
    """An adapter that is loaded again is another one, also for prefixes."""
    session = begin("reloaded", "red")
    opened = session.open(draw_tokens(Random(7), 300))
    adapters.load("red", "blue")
    try:
        renewed = replace(switched(session, adapters, "blue"), adapter="red")
        again = renewed.open(opened.tokens[:300])
        played = cut_prefilled(renewed, opened)
    finally:
        adapters.load("red", "red")
    assert again.receipt.tokens.prefix == 0
    assert again.error <= BOUND
    assert played.receipt.reason is Reason.INCOMPATIBLE_IDENTITY
    assert played.error <= BOUND


def test_a_forget_reaches_a_session_s_kv_under_every_adapter(
    begin: Callable[[str, str | None], PlayedSession], adapters: Adapters
) -> None:
    """The KV under the adapter that the session left goes, too; the prefix under its own stays."""
    rng = Random(8)
    # Unlabelled turns of its tenant may have read anything.
    session = replace(begin("forgets", "red"), scope="forgetful")
    prompt = draw_tokens(rng, 300)
    labels = (SpanLabel("a", 0, 150), SpanLabel("b", 150, 170), SpanLabel("c", 170, 300))
    red = session.open(prompt, spans=labels)
    later = switched(session, adapters, "blue")
    blue = later.open(prompt, spans=labels)
    without = (*prompt[:150], *prompt[170:])
    kept = (labels[0], SpanLabel("b", 150, 150), SpanLabel("c", 150, 280))
    played = later.open(without, spans=kept, forget=("b",), watch=red)
    computed = len(red.tokens) - 1, len(blue.tokens) - 1
    assert played.receipt.tokens.prefix == 150
    assert played.receipt.forgot == ForgetCounts(overwritten=computed[0] + computed[1] - 150)
