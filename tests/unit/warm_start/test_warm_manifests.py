"""Manifests: what is written is read, and nothing else is."""

from __future__ import annotations

import os
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from warm_kit import IDENTITY, KEY, MAX_BYTES, TOKENS, manifests_in, run

from leyline_proxy.warm_start.codec import decode, encode
from leyline_proxy.warm_start.folder import MAX_FILES, ManifestFolder
from leyline_proxy.warm_start.manifests import Manifests, max_manifest
from leyline_proxy.warm_start.runs import (
    EngineIdentity,
    FileResult,
    Group,
    ManifestError,
    Outcome,
    Run,
)
from leyline_proxy.warm_start.sealing import OVERHEAD, ManifestSeal

GROUP = Group("t", IDENTITY)
REFUSED = {Outcome.CORRUPT, Outcome.WRONG_KEY, Outcome.OTHER_TENANT, Outcome.OTHER_MODEL}


def outcome_of(seal: ManifestSeal, data: bytes, name: str) -> Outcome | None:
    """The reason that a manifest isn't read; None if it is."""
    try:
        seal.open(data, name)
    except ManifestError as error:
        return error.outcome
    return None


def only_outcome(manifests: Manifests) -> object:
    """The result of loading a folder with one manifest."""
    (loaded,) = manifests.load(60)
    manifests.folder.release()
    return loaded.found


def written(path: Path, *runs: Run) -> Path:
    """A manifest of these runs on the disk."""
    (change,) = manifests_in(path).change(runs, {})
    assert change.result is FileResult.WRITTEN
    return next(path.glob("*.warm"))


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), max_size=8))
def test_runs_survive_a_manifest(drawn: list[list[int]]) -> None:
    """Every member of every run comes back, the most recent first."""
    runs = [
        run(tokens, f"s{number}", at=float(number), demands=number, named=bool(number % 2))
        for number, tokens in enumerate(drawn)
    ]
    data = encode(GROUP, runs, MAX_BYTES)
    group, found = decode(data, max_bytes=MAX_BYTES, max_tokens=TOKENS)
    assert (group, list(found)) == (GROUP, runs[::-1])


def test_every_changed_byte_is_refused_by_name() -> None:
    """No byte of a manifest can be changed, and none be cut off or added."""
    seal = ManifestSeal(KEY)
    data, name = seal.close(encode(GROUP, [run(range(20))], MAX_BYTES), GROUP), seal.name(GROUP)
    assert outcome_of(seal, data, name) is None
    for place in range(len(data)):
        for flip in (0x01, 0x80):
            spoilt = bytearray(data)
            spoilt[place] ^= flip
            assert outcome_of(seal, bytes(spoilt), name) in REFUSED, place
    for length in range(len(data)):
        assert outcome_of(seal, data[:length], name) is Outcome.CORRUPT
    assert outcome_of(seal, data + b"\0", name) is Outcome.CORRUPT


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Group("u", IDENTITY), Outcome.OTHER_TENANT),
        (Group("t", EngineIdentity("model", "weights", "other")), Outcome.OTHER_MODEL),
        (Group("t", EngineIdentity("model", "other", "tokenizer")), Outcome.OTHER_MODEL),
    ],
    ids=["tenant", "tokenizer", "weights"],
)
def test_a_manifest_under_anothers_name_is_refused(other: Group, expected: Outcome) -> None:
    """A renamed manifest doesn't open, not even with the header of the one that belongs there."""
    seal = ManifestSeal(KEY)
    mine, theirs = seal.close(b"mine", GROUP), seal.close(b"theirs", other)
    assert seal.name(GROUP) != seal.name(other)
    assert outcome_of(seal, theirs, seal.name(GROUP)) is expected
    size = OVERHEAD - 16
    assert outcome_of(seal, mine[:size] + theirs[size:], seal.name(GROUP)) is Outcome.CORRUPT
    with pytest.raises(ManifestError) as caught:
        seal.check(other, seal.name(GROUP))
    assert caught.value.outcome is Outcome.OTHER_TENANT


def test_another_key_opens_nothing_and_names_nothing(tmp_path: Path) -> None:
    """The outcome says that it is the key; neither names nor bytes show tenant, model or text."""
    path = written(tmp_path, run(b"a secret prompt" * 9, "session-name", tenant="tenant-name"))
    assert only_outcome(manifests_in(tmp_path, "another key, long enough")) is Outcome.WRONG_KEY
    shown = path.name.encode() + path.read_bytes()
    for word in (b"secret", b"tenant-name", b"session-name", b"weights", b"tokenizer"):
        assert word not in shown
    assert ManifestSeal(KEY).name(GROUP) != ManifestSeal(KEY + "!").name(GROUP)
    seal = ManifestSeal(KEY)
    assert seal.close(b"same", GROUP) != seal.close(b"same", GROUP)  # a nonce is used once


def test_a_content_that_inflates_is_refused_before_it_has() -> None:
    """A bomb costs no more memory than the limit, and neither do runs that share everything."""
    bomb = zlib.compress(bytes(50 * MAX_BYTES))
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError) as caught:
            decode(bomb, max_bytes=MAX_BYTES, max_tokens=TOKENS)
        assert tracemalloc.get_traced_memory()[1] < 5 * MAX_BYTES
    finally:
        tracemalloc.stop()
    assert caught.value.outcome is Outcome.TOO_LARGE
    same = [run(range(1000), f"s{number}") for number in range(9)]
    data = encode(GROUP, same, MAX_BYTES)
    assert len(decode(data, max_bytes=MAX_BYTES, max_tokens=9000)[1]) == 9
    with pytest.raises(ManifestError) as caught:
        decode(data, max_bytes=MAX_BYTES, max_tokens=8999)
    assert caught.value.outcome is Outcome.TOO_LARGE


@given(st.binary(max_size=60), st.booleans())
def test_any_content_has_a_named_outcome(data: bytes, inflates: bool) -> None:
    """Bytes that are no content are corrupt, whatever they are."""
    content = zlib.compress(data) if inflates else data
    with pytest.raises(ManifestError) as caught:
        decode(content, max_bytes=MAX_BYTES, max_tokens=TOKENS)
    assert caught.value.outcome is Outcome.CORRUPT


def test_shared_tokens_must_exist() -> None:
    """An entry can't claim more of the one before than there is."""
    entry = ["s", 3, b"", [], "e", 0, 1.5, True, 1.0]
    content = {"tenant": "t", "identity": IDENTITY, "runs": [entry]}
    with pytest.raises(ManifestError) as caught:
        decode(
            zlib.compress(msgspec.msgpack.encode(content)), max_bytes=MAX_BYTES, max_tokens=TOKENS
        )
    assert caught.value.outcome is Outcome.CORRUPT


def test_a_manifest_too_long_for_its_reader_loses_its_oldest_runs() -> None:
    """The writer keeps within the limit that the reader has."""
    runs = [run(range(100), f"s{number}", at=float(number)) for number in range(8)]
    group, found = decode(encode(GROUP, runs, 700), max_bytes=700, max_tokens=TOKENS)
    assert group == GROUP
    assert 0 < len(found) < 8
    assert [r.session for r in found] == [f"s{7 - number}" for number in range(len(found))]


def test_files_are_private_whole_and_changed_only_if_need_be(tmp_path: Path) -> None:
    """A manifest is readable by its owner alone, leaves no draft, and stays if nothing changed."""
    folder = tmp_path / "new"
    folder.mkdir()
    manifests = manifests_in(folder)
    first = run(range(9), "one", at=1.0)
    (change,) = manifests.change([first], {})
    path = next(folder.iterdir())
    assert path.stat().st_mode & 0o777 == 0o600
    assert change.written is not None
    known = {GROUP: change.written}
    assert manifests.change([first], known) == []
    (change,) = manifests.change([first, run(range(5), "two", at=2.0)], known)
    assert change.written is not None
    assert change.written.sessions == {"one", "two"}
    assert [each.name for each in folder.iterdir()] == [path.name]
    (change,) = manifests.change([], known)
    assert (change.result, change.written) == (FileResult.REMOVED, None)
    assert not list(folder.iterdir())


def test_what_must_go_goes_although_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for a new manifest the old one is deleted, then at least emptied, and only if
    that fails too it is said to be left."""
    manifests, seal = manifests_in(tmp_path), ManifestSeal(KEY)
    both = [run(range(9), "one", at=1.0), run(range(5), "two", at=2.0)]
    path = tmp_path / seal.name(GROUP)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "no space left")

    results = []
    for broken in ([], [(Path, "replace")], [(Path, "replace"), (Path, "unlink")]):
        (before,) = manifests.change(both, {})
        assert before.written is not None
        with monkeypatch.context() as patch:
            for owner, name in broken:
                patch.setattr(owner, name, refuse)
            (after,) = manifests.change(both[:1], {GROUP: before.written})
        size = path.stat().st_size if path.exists() else None
        results.append((after.result, after.written is not None, size is None or size == 0))
    assert results == [
        (FileResult.WRITTEN, True, False),
        (FileResult.REMOVED, False, True),
        (FileResult.REMOVED, False, True),
    ]
    (before,) = manifests.change(both, {})
    assert before.written is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        patch.setattr(Path, "unlink", refuse)
        (after,) = manifests.change(both[:1], {GROUP: before.written})
    assert (after.result, after.written) == (FileResult.LEFT, before.written)


def test_strange_files_are_named_and_never_waited_for(tmp_path: Path) -> None:
    """A pipe, a link, a folder and a huge file under a manifest's name are refused at once."""
    seal = ManifestSeal(KEY)
    names = [seal.name(Group(tenant, IDENTITY)) for tenant in "abcd"]
    os.mkfifo(tmp_path / names[0])
    (tmp_path / names[1]).symlink_to("/dev/zero")
    (tmp_path / names[2]).mkdir()
    with (tmp_path / names[3]).open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "notes.txt").write_text("not a manifest")
    manifests = manifests_in(tmp_path)
    found = {loaded.name: loaded.found for loaded in manifests.load(60)}
    assert found == dict.fromkeys(names[:3], Outcome.UNREADABLE) | {names[3]: Outcome.TOO_LARGE}
    assert manifests.remove(names[1]) is FileResult.REMOVED


def test_reading_is_bounded_in_time_and_number(tmp_path: Path) -> None:
    """Manifests after the time limit, or beyond the number, are named and not read."""
    written(tmp_path, run(range(9)))
    manifests = manifests_in(tmp_path)
    assert [loaded.found for loaded in manifests.load(-1)] == [Outcome.OVER_TIME]
    manifests.folder.release()
    for number in range(MAX_FILES):
        (tmp_path / f"{number:016x}-{number:016x}.warm").touch()
    outcomes = [loaded.found for loaded in manifests_in(tmp_path).load(60)]
    assert outcomes.count(Outcome.TOO_LARGE) == 1
    assert outcomes.count(Outcome.CORRUPT) >= MAX_FILES - 1


def test_a_folder_belongs_to_one_proxy(tmp_path: Path) -> None:
    """A second one finds it locked; a draft of a killed proxy is swept away."""
    (tmp_path / "old.warm.draft").write_bytes(b"half")
    first = ManifestFolder(tmp_path, max_manifest(TOKENS))
    first.claim()
    assert not list(tmp_path.glob("*.draft"))
    with pytest.raises(OSError, match="another proxy's"):
        ManifestFolder(tmp_path, max_manifest(TOKENS)).claim()
    first.release()
    ManifestFolder(tmp_path, max_manifest(TOKENS)).claim()
