"""Real servers that draft in other ways than chains of EAGLE, or beside other settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import test_server_fp8
import test_server_pages
import torch
from draft_models import draft_flags, write_eagle3, write_mtp
from equality_kit import Played, PlayedSession, draw_tokens
from pool_kit import numbers, roundings, turned
from pool_probe import read_drafts
from sglang_models import SglangModel
from sglang_server import SglangServer
from test_server_data_parallel import RANKS, busy
from test_server_drafts import check_latent_drafts, check_server, rotary_of

from leyline_engine.rotary.rotation import Rotary
from leyline_engine.sglang.ranks import session_rank

Start = Callable[[SglangServer, str], PlayedSession]

pytestmark = pytest.mark.nightly


@pytest.fixture
def llama(model_folder: Callable[[SglangModel], Path]) -> Path:
    """The model that is drafted for."""
    return model_folder(SglangModel.LLAMA)


def test_trees_of_drafts_give_the_contracts_answers(
    llama: Path,
    start_server: Callable[..., SglangServer],
    probed: dict[str, str],
    start_session: Start,
    tmp_path: Path,
) -> None:
    """Of three candidates at each of three steps, five are verified: rows of what is accepted move
    to their places, and everything agrees as with chains."""
    draft = tmp_path / "draft"
    tree = ("--speculative-eagle-topk", "3", "--speculative-num-draft-tokens", "6")
    flags = (*draft_flags(llama, draft, 3), *tree)
    server = start_server(llama, *flags, environment=probed)
    check_server(start_session, server, draft, 1, range(5100, 5104))


def test_drafts_of_eagle3_give_the_contracts_answers(
    llama: Path,
    start_server: Callable[..., SglangServer],
    probed: dict[str, str],
    start_session: Start,
    tmp_path: Path,
) -> None:
    """A draft model that reads several of the model's layers has rows like any other."""
    draft = tmp_path / "draft"
    flags = draft_flags(llama, draft, 2)
    write_eagle3(llama, draft)
    named = ("--speculative-algorithm", "EAGLE3", "--page-size", "16")
    server = start_server(llama, *flags, *named, environment=probed)
    answer = httpx.get(f"{server.base_url}/leyline/capability", timeout=30).json()
    assert answer["splices"] is True
    assert (answer["speculative"], answer["draft_layers"]) == ("EAGLE3", 1)
    check_server(start_session, server, draft, 16, range(5200, 5203))


def test_drafts_beside_fp8_are_turned_from_what_was_computed(
    llama: Path,
    start_server: Callable[..., SglangServer],
    probed: dict[str, str],
    start_session: Start,
    tmp_path: Path,
) -> None:
    """The model's rows agree as without drafts; a draft row in eight bits is turned once, too."""
    draft = tmp_path / "draft"
    flags = (*draft_flags(llama, draft, 3), "--kv-cache-dtype", "fp8_e4m3")
    server = start_server(llama, *flags, environment=probed)
    session = replace(start_session(server, "fp8"), ahead=1)
    test_server_fp8.check_server(session, server)
    session = replace(session, session="drafts", scored=False, turns=[])
    played = session.open(draw_tokens(random.Random(1), test_server_fp8.OPENING))
    for _ in range(3):
        played = test_server_fp8.edit(session, played)
        assert check_draft_rows(session, played, rotary_of(draft)) > 250


def check_draft_rows(session: PlayedSession, played: Played, rotary: Rotary) -> int:
    """Each draft row is the one that was computed, its key turned once, but for seams; returns how
    many moved."""
    after = read_drafts(played.rows_file)
    places = torch.nonzero(after.keys[0].flatten(1).any(dim=1)).flatten()
    assert len(places) >= len(after.slots) - 8
    found = [test_server_fp8.computed_in(session, played, index) for index in places.tolist()]
    homes = torch.tensor([at for _, at in found])
    before = {turn.name: read_drafts(turn.rows_file) for turn, _ in found}
    keys = torch.stack([before[turn.name].keys[0][at] for turn, at in found])
    values = torch.stack([before[turn.name].values[0][at] for turn, at in found])
    wanted = turned(keys, rotary, homes, places)
    assert roundings(after.keys[0][places], wanted) <= test_server_fp8.ONE
    assert torch.equal(after.values[0][places], values)
    moved = homes != places
    assert roundings(after.keys[0][places][moved], numbers(keys[moved])) > 100, "control"
    return int(moved.sum())


@contextmanager
def attention_ranks(
    folder: Path, log: Path, flags: Sequence[str], environment: dict[str, str]
) -> Iterator[SglangServer]:
    """A server of two ranks of data-parallel attention that draft; its log is clean in the end."""
    ranks = (f"--tp={RANKS}", f"--dp-size={RANKS}", "--enable-dp-attention")
    drafts = ("--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1")
    counts = ("--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3")
    flags = (*ranks, *drafts, *counts, "--max-total-tokens=4096", *flags)
    environment = environment | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with SglangServer(folder, log, flags, environment) as server:
        yield server
        server.check_clean()


EXPERTS = f"--ep-size={RANKS}"


@pytest.mark.parametrize(
    ("page", "flags"),
    [(1, ()), (64, (EXPERTS,)), (64, (EXPERTS, "--kv-cache-dtype=fp8_e4m3"))],
    ids=["alone", "experts-pages", "experts-pages-fp8"],
)
def test_ranks_of_attention_that_draft_splice_their_sessions(
    page: int, flags: tuple[str, ...], probed: dict[str, str], tmp_path: Path
) -> None:
    """Rows of edited turns, draft rows too, move along while the other rank answers; with all that
    large recipes combine."""
    folder = write_mtp(tmp_path / "mtp")
    paged = (f"--page-size={page}", *flags)
    with attention_ranks(folder, tmp_path / "log", paged, probed) as server:
        for rank in range(RANKS):
            names = map("s{}".format, range(99))
            name = next(n for n in names if session_rank(("t", n), RANKS) == rank)
            with busy(server, 1 - rank, 200):
                check_latent_drafts(server, name, tmp_path, page)


def test_experts_on_other_ranks_give_the_contracts_answers(
    model_folder: Callable[[SglangModel], Path],
    start_server: Callable[..., SglangServer],
    probed: dict[str, str],
    start_session: Start,
) -> None:
    """Expert parallelism: answers, counts and rows agree, wrong rotations don't."""
    environment = probed | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ranks = ("--tp=2", "--ep-size=2")
    folder = model_folder(SglangModel.MLA_MOE)
    server = start_server(folder, *ranks, environment=environment)
    test_server_pages.check_server(start_session, server, 1, range(2))
