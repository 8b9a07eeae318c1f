"""The content that tenants of a group share, and that tenants without one don't.

Documents are asked for by a Zipf law: the first is by far the most popular, with every tenant. A
prompt is a header of the tenant's own, three documents in any order, and a question. Each workload
is served twice on the replay engine: by empty caches (cold), then again with other questions by
the caches that the first round left (warm).

"shareable" are tokens in runs of 64 or more that only other tenants have cached as the request
arrives, and "shared" is the share of them that isn't prefilled. "foreign" are read
or copied slots that another tenant wrote.
"""

from __future__ import annotations

import argparse
import json
import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from leyline_lab.reuse.tenants import TenantBench, TenantRequest, TenantSample
from leyline_lab.traces.texts import demo_material
from leyline_replay.models.loader import LoadedModel, load_model

DOCUMENTS = 24
CHARACTERS = 700
"""Length of a document."""
PER_PROMPT = 3
EXPONENT = 1.1
NAMES = ("Ash", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Ginkgo", "Hazel")
ROUNDS = ("cold", "warm")
_SPARE = 4096


class Documents:
    """Recorded text, cut into documents of unequal popularity."""

    def __init__(self, tokenise: Callable[[str], list[int]]) -> None:
        text = demo_material().text
        self._tokenise = tokenise
        self._pieces = [
            tokenise(text[n * CHARACTERS : (n + 1) * CHARACTERS]) for n in range(DOCUMENTS)
        ]
        self._weights = [1 / rank**EXPONENT for rank in range(1, DOCUMENTS + 1)]

    def prompt(self, tenant: int, number: int, chance: random.Random) -> array[int]:
        """Return a tenant's prompt."""
        chosen: list[int] = []
        while len(chosen) < PER_PROMPT:
            (drawn,) = chance.choices(range(DOCUMENTS), self._weights)
            if drawn not in chosen:
                chosen.append(drawn)
        name = NAMES[tenant]
        header = (
            f"{name} & Sons. Ticket {chance.randrange(10**6)} of {name}, for its own use only.\n"
        )
        tokens = self._tokenise(header * 3)
        for place, document in enumerate(chosen):
            tokens += [*self._tokenise(f"\nSource {place}, {name}:\n"), *self._pieces[document]]
        tokens += self._tokenise(f"\nQuestion {number}: what did {chance.random()} change?")
        return array("q", tokens)


def requests(documents: Documents, tenants: int, count: int, label: str) -> list[TenantRequest]:
    """Return ``count`` requests of each tenant, in random order."""
    chance = random.Random(f"{tenants} {label}")
    order = [tenant for tenant in range(tenants) for _ in range(count)]
    chance.shuffle(order)
    return [
        TenantRequest(tenant, f"{label}{number}", documents.prompt(tenant, number, chance))
        for number, tenant in enumerate(order)
    ]


def figures(samples: Sequence[TenantSample]) -> dict[str, Any]:
    """Return sums over requests, and the share of what could be shared."""
    sums = {
        name: sum(getattr(sample, name) for sample in samples)
        for name in ("prompt", "prefix", "own", "group", "shareable", "shared", "foreign_slots")
    }
    share = sums["shared"] / sums["shareable"] if sums["shareable"] else None
    return {**sums, "share": None if share is None else round(share, 4)}


def measure(
    model: LoadedModel, tenants: int, concurrency: int, count: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Return the figures of one workload, with sharing on and off."""

    def tokenise(text: str) -> list[int]:
        ids: list[int] = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    documents = Documents(tokenise)
    asked = {label: requests(documents, tenants, count, label) for label in ROUNDS}
    slots = sum(len(request.tokens) + 8 for each in asked.values() for request in each) + _SPARE
    found: dict[str, Any] = {"tenants": tenants, "concurrency": concurrency}
    for name, groups in (("on", ("documents",)), ("off", ())):
        bench = TenantBench(model, slots, groups=groups)
        found[name] = {
            label: figures(bench.serve(asked[label], concurrency, advance)) for label in ROUNDS
        }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tenants", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 8], metavar="N")
    parser.add_argument("--requests", type=int, default=12, help="of each tenant, per round [12]")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if not 1 < min(options.tenants) <= max(options.tenants) <= len(NAMES):
        parser.error(f"--tenants takes 2 to {len(NAMES)}")
    model = load_model(None, dtype="float32")
    console, found = Console(), []
    table = Table(title="Content that tenants share (tokens)")
    for column in ("tenants", "at once", "caches", "group", "prompt", "own", "taken"):
        table.add_column(column, justify="right")
    for column in ("shareable", "shared", "foreign"):
        table.add_column(column, justify="right")
    sets = [(many, width) for many in options.tenants for width in options.concurrency]
    with Progress(console=Console(stderr=True)) as progress:
        for tenants, concurrency in sets:
            total = 4 * tenants * options.requests
            task = progress.add_task(f"{tenants} tenants, {concurrency} at once", total=total)
            result = measure(
                model, tenants, concurrency, options.requests, partial(progress.advance, task)
            )
            found.append(result)
            for label in ROUNDS:
                for name in ("on", "off"):
                    row = result[name][label]
                    table.add_row(
                        str(tenants),
                        str(concurrency),
                        label,
                        name,
                        *(f"{row[key]:,}" for key in ("prompt", "own", "group", "shareable")),
                        "–" if row["share"] is None else f"{row['share']:.1%}",
                        f"{row['foreign_slots']:,}",
                    )
    console.print(table)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"workloads": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
