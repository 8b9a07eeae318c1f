"""Recall and precision of the detectors of keys, by kind: a table in docs/policies.md.

Recall is counted on random samples of the formats that `key_formats.toml` lists, each in many
surroundings (:mod:`.key_samples`): a sample is found if `redact` leaves nothing of its secret.
Precision is counted on recorded sessions of real agents, which hold no secrets: every hit there is
a false alarm.
"""

from __future__ import annotations

import gzip
import json
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from leyline_policies.builtin.detectors import KEYS, load_detectors
from leyline_policies.builtin.search import Search

from ..harness import markdown
from ..harness.arguments import Arguments
from .key_samples import Sample, samples

BEGIN = markdown.mark("detectors")
FILES = "*.jsonl.gz"


def missed(found: Iterable[Sample], detectors: Sequence[str] | None = None) -> list[Sample]:
    """Return the samples of which something is left; by default after their own detector."""
    searches: dict[str, Search] = {}
    left = []
    for sample in found:
        names = (sample.kind,) if detectors is None else detectors
        search = searches.setdefault(",".join(names), Search(load_detectors(names)))
        search.begin()
        if sample.is_left_in(search.redacted(sample.text, "[redacted]")):
            left.append(sample)
    return left


def texts(folder: Path) -> set[str]:
    """Return the different texts of recorded sessions, names and numbers of messages aside."""
    found: set[str] = set()
    for path in sorted(folder.glob(FILES)):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                found.update(_strings(json.loads(line)))
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def hits(kind: str, among: Iterable[str]) -> Counter[str]:
    """Return the texts that a detector finds, and how often."""
    search = Search(load_detectors([kind]))
    found: Counter[str] = Counter()
    for text in among:
        search.begin()
        found.update(text[start:end] for start, end in search.spans(text))
    return found


def table(seed: int, folder: Path) -> str:
    """Return the whole table: a row for each kind, then the sums."""
    made, recorded = [*samples(seed)], texts(folder)
    left = Counter(sample.kind for sample in missed(made))
    all_of = Counter(sample.kind for sample in made)
    rows, alarms = [], 0
    for kind in KEYS:
        wrong = hits(kind, recorded).total()
        alarms += wrong
        rows.append(row(f"`{kind}`", all_of[kind], left[kind], wrong))
    rows.append(row("all", all_of.total(), left.total(), alarms))
    size = sum(map(len, recorded)) / 1e6
    lines = markdown.table(("detector", "samples", "found", "false alarms"), rows)
    return "\n".join([lines, "", f"The recorded sessions have {size:.1f} million characters."])


def row(label: str, made: int, left: int, alarms: int) -> tuple[str, ...]:
    """Return a row of the table."""
    return label, f"{made:,}", f"{(made - left) / made:.1%}", str(alarms)


def main() -> None:
    """Count, and print or write the table."""
    parser = Arguments(__doc__, json=False)
    parser.add_argument("folder", type=Path, help="recorded sessions, .jsonl.gz")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the samples")
    parser.add_argument("--missed", action="store_true", help="list what is missed, and the hits")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="replace the table in here")
    given = parser.parse_args()
    if not given.missed:
        markdown.write(table(given.seed, given.folder), given.into, BEGIN)
        return
    for sample in missed(samples(given.seed)):
        print(f"{sample.kind}: {sample.form}: {sample.text!r}"[:300])
    for kind in KEYS:
        print(*(f"{kind}: {text!r}" for text in hits(kind, texts(given.folder))), sep="\n")
