"""A real server with EAGLE's drafts: the contract's answers, and draft rows that move along."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from draft_models import draft_flags, write_mtp
from equality_cases import play_random
from equality_checks import ROWS_BOUND, check_turn
from equality_kit import (
    BOUND,
    CONTROL_FACTOR,
    Played,
    PlayedSession,
    ask,
    draw_tokens,
    fetch_record,
    piece_length,
)
from oracle_reference import Keep
from pool_kit import error, numbers, roundings, turned
from pool_probe import ROWS, read_drafts, read_rows, read_watched
from sglang_models import SglangModel
from sglang_server import SglangServer
from test_server_pages import check_isolation

from leyline_engine.contract import (
    Directive,
    EditPayload,
    ForgetCounts,
    SourceRef,
    SpanLabel,
    apply_directives,
    token_digest,
)
from leyline_engine.rotary.rotation import Pairing, Rotary

Start = Callable[[SglangServer, str], PlayedSession]


def rotary_of(folder: Path) -> Rotary:
    """The draft model's rotary embedding, from its configuration alone."""
    config = json.loads((folder / "config.json").read_text())
    width, base = config["head_dim"], config["rope_parameters"]["rope_theta"]
    inv_freq = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return Rotary(inv_freq.float(), Pairing.HALF_SPLIT)


def copies(session: PlayedSession, played: Played) -> Iterator[tuple[Keep, Played, int]]:
    """The pieces of a turn's prompt that were copied, the turns they are of, and their places."""
    of = {id(turn.truth): turn for turn in session.turns}
    at = 0
    for number, piece in enumerate(played.pieces):
        if isinstance(piece, Keep) and number:
            yield piece, of[id(piece.turn)], at
        at += piece_length(piece)


def check_drafts(session: PlayedSession, played: Played, rotary: Rotary) -> int:
    """Copied draft rows are the source's, keys turned in float64; those at seams are empty.

    Returns:
        The number of rows whose keys had to turn; as they were, they are far off.
    """
    moved = 0
    after = read_drafts(played.rows_file)
    for piece, source, dest in copies(session, played):
        before = read_drafts(source.rows_file)
        end = dest + piece_length(piece)
        seam = source.tokens[piece.end] != played.tokens[end]
        here, there = slice(piece.start, piece.end - seam), slice(dest, end - seam)
        if seam:
            assert not after.keys[0][end - 1].any() and not after.values[0][end - 1].any()
        filled = before.keys[0][here].flatten(1).any(dim=1)  # those of earlier seams aren't
        old, new = before.keys[0][here][filled].double(), after.keys[0][there][filled]
        assert torch.equal(before.values[0][here], after.values[0][there])
        if not len(old):
            assert piece_length(piece) <= 2
            continue
        places = torch.arange(piece.start, piece.start + len(filled))[filled]
        wanted = turned(old, rotary, places, places + dest - piece.start)
        assert error(new, wanted, rotary) <= ROWS_BOUND
        if dest != piece.start:
            assert error(new, old, rotary) >= CONTROL_FACTOR * ROWS_BOUND
            moved += len(old)
    return moved


def check_forget(session: PlayedSession) -> None:
    """A forget overwrites slots from the one before the span on, whose draft row has read it."""
    rng = random.Random(session.session)
    prompt = draw_tokens(rng, 300)
    labels = (SpanLabel("a", 0, 150), SpanLabel("b", 150, 170), SpanLabel("c", 170, 300))
    told = session.open(prompt, spans=labels)
    without = (*prompt[:150], *prompt[170:])
    kept = (labels[0], SpanLabel("b", 150, 150), SpanLabel("c", 150, 280))
    played = session.open(without, spans=kept, forget=("b",), watch=told)
    forgot, page = played.receipt.forgot, session.page
    assert forgot is not None
    start, end = 149 // page * page, (len(told.tokens) - 2) // page * page
    assert forgot == ForgetCounts(overwritten=end - start)
    assert played.receipt.tokens.prefix == start
    before, now = read_drafts(told.rows_file), read_watched(played.rows_file, drafts=True)
    assert torch.equal(now.keys[0][:start], before.keys[0][:start])
    assert before.keys[0][start:end].flatten(1).any(dim=1).all()
    assert not (now.keys[0][start:end] == before.keys[0][start:end]).flatten(1).all(dim=1).any()


def check_server(start: Start, server: SglangServer, draft: Path, page: int, seeds: range) -> None:
    """Random sessions, isolation and a forget on one server."""
    rotary = rotary_of(draft)

    def begin(name: str) -> PlayedSession:
        return replace(start(server, name), page=page, ahead=1)

    moved = 0
    for seed in seeds:
        session = begin(f"seed{seed}")
        for played in play_random(session, random.Random(seed), 3):
            check_turn(session, played)
            moved += check_drafts(session, played, rotary)
    assert moved > 100
    check_isolation(begin("private"))
    # Unlabelled turns of its tenant may have read anything.
    check_forget(replace(begin("forget"), scope="forgetful"))


def check_capability(server: SglangServer) -> None:
    """The handshake names the algorithm, and counts its layers."""
    answer = httpx.get(f"{server.base_url}/leyline/capability", timeout=30).json()
    assert answer["splices"] is True
    assert (answer["speculative"], answer["draft_layers"]) == ("EAGLE", 1)


@pytest.fixture
def start_llama(
    start_server: Callable[..., SglangServer],
    model_folder: Callable[[SglangModel], Path],
    probed: dict[str, str],
) -> Callable[..., SglangServer]:
    """Starts a server of the Llama model with some flags."""
    folder = model_folder(SglangModel.LLAMA)
    return lambda *flags: start_server(folder, *flags, environment=probed)


@pytest.mark.nightly
def test_drafts_are_spliced_with_the_contracts_answers(
    start_llama: Callable[..., SglangServer],
    model_folder: Callable[[SglangModel], Path],
    start_session: Start,
    tmp_path: Path,
) -> None:
    """Answers, counts and rows of a server that drafts three tokens agree, and its draft rows."""
    draft = tmp_path / "draft"
    server = start_llama(*draft_flags(model_folder(SglangModel.LLAMA), draft, 3))
    check_capability(server)
    check_server(start_session, server, draft, 1, range(2))


@pytest.mark.nightly
@pytest.mark.parametrize("served", [(1, 1), (16, 3), (64, 2)])
def test_drafts_over_pages_give_the_contracts_answers(
    served: tuple[int, int],
    start_llama: Callable[..., SglangServer],
    model_folder: Callable[[SglangModel], Path],
    start_session: Start,
    tmp_path: Path,
) -> None:
    """The same over more sessions, and where a slot is found by a token of the next page."""
    (page, steps), draft = served, tmp_path / "draft"
    flags = draft_flags(model_folder(SglangModel.LLAMA), draft, steps)
    server = start_llama(*flags, "--page-size", str(page))
    check_server(start_session, server, draft, page, range(5000, 5006))


def accepted(server: SglangServer, prompt: list[int]) -> float:
    """Tokens that a server commits at each step of an answer, on average."""
    return float(server.generate(prompt, 48)["meta_info"]["spec_accept_length"])


@pytest.mark.nightly
@pytest.mark.parametrize("page", [1, 16])
def test_a_forget_empties_the_corpus_of_ngram(
    page: int, start_llama: Callable[..., SglangServer], start_session: Start
) -> None:
    """Answers are drafted from what was answered before, whoever asks; not after a forget.

    SGLang compiles the corpus when it is first used, with g++ and ninja.
    """
    flags = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
    more = ("--speculative-ngram-capacity", "100000", "--page-size", str(page))
    # SGLang has trees in larger pages for one attention back end alone, which needs a GPU.
    more += ("--speculative-ngram-max-bfs-breadth", "1") if page > 1 else ()
    server = start_llama(*flags, *more)
    session = replace(start_session(server, "told"), page=page)
    rng = random.Random(1)
    opened = session.open(draw_tokens(rng, 300))
    played = session.edit(opened, [Directive(60, 100)], draw_tokens(rng, 5))
    # Of an answer whose last tokens were drafted, the very last one has KV, too.
    assert played.receipt.tokens.spliced >= 200
    assert played.error <= BOUND
    prompt = list(draw_tokens(random.Random(7), 200))
    assert accepted(server, prompt) < 2
    assert accepted(server, prompt) > 3
    session.open(prompt[:100], forget=("*",))
    assert accepted(server, prompt) < 2


@pytest.mark.nightly
def test_the_latent_draft_rows_of_mtp_are_spliced(
    start_server: Callable[..., SglangServer], probed: dict[str, str], tmp_path: Path
) -> None:
    """A DeepSeek's own prediction layer keeps latents, which stay, and rotary keys, which turn."""
    folder = write_mtp(tmp_path / "mtp")
    flags = ("--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1")
    counts = ("--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3")
    server = start_server(folder, *flags, *counts, environment=probed)
    check_capability(server)
    check_latent_drafts(server, "m", tmp_path)


def check_latent_drafts(server: SglangServer, session: str, folder: Path, page: int = 1) -> None:
    """In an edited turn of a session, latents stay and rotary keys turn, draft rows' as well."""
    rng, files = random.Random(session), [folder / f"{session} {number}" for number in range(2)]
    prompt, cuts = draw_tokens(rng, 300), (Directive(60, 100),)
    told = EditPayload(session=session, scope="t", turn="t0")
    name, probe = f"{session}.t0", {ROWS: str(files[0])}
    answer = ask(server, prompt, 299, told, message=name, probe=probe)
    tokens = (*prompt, *answer["output_ids"])
    edited = (*apply_directives(tokens, cuts), *draw_tokens(rng, 4))
    source = SourceRef("t0", len(tokens), token_digest(tokens))
    edit = EditPayload(session=session, scope="t", turn="t1", sources=(source,), directives=cuts)
    name, probe = f"{session}.t1", {ROWS: str(files[1])}
    ask(server, edited, len(edited) - 1, edit, message=name, probe=probe)
    begin, end = -(-60 // page) * page, 256
    assert fetch_record(server, name).receipt.tokens.spliced >= end - begin
    here, there = slice(begin + 40, end + 40), slice(begin, end)
    places = torch.arange(begin, end)
    for read in (read_drafts, read_rows):
        before, after = map(read, files)
        for layer, keys in enumerate(before.turning):
            assert torch.equal(before.still[layer][here], after.still[layer][there])
            old, new = keys[here], after.turning[layer][there]
            inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, old.shape[-1], 2) / old.shape[-1])
            rotary = Rotary(inv_freq, Pairing.INTERLEAVED)
            wanted = turned(old, rotary, places + 40, places)
            if old.dtype == torch.uint8:
                assert roundings(new, wanted) <= 1.0001
                assert roundings(new, numbers(old)) > 10, "control"
            else:
                assert error(new, wanted, rotary) <= ROWS_BOUND
                assert error(new, old.double(), rotary) >= CONTROL_FACTOR * ROWS_BOUND, "control"
