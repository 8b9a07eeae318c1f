"""Write the Grafana dashboards: ``python grafana/build_dashboards.py``.

The JSON files under ``dashboards/`` are generated; change ``boards/``, not them. A test fails when
they differ, and when a query names a metric that doesn't exist.
"""

from __future__ import annotations

import json
from pathlib import Path

from boards import cache_hit, claims_pressure, edits_policies, engine, proxy
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).resolve().parent / "dashboards"
BOARDS = {
    "cache-hit.json": cache_hit.build,
    "edits-policies.json": edits_policies.build,
    "claims-pressure.json": claims_pressure.build,
    "proxy.json": proxy.build,
    "engine.json": engine.build,
}


def render(name: str) -> str:
    """Return the JSON text of the board file ``name``."""
    board = BOARDS[name]().build()
    for number, panel in enumerate(board.panels or [], start=1):
        panel.id_val = number  # stable links to a panel
    return json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write every board."""
    FOLDER.mkdir(exist_ok=True)
    for name in BOARDS:
        (FOLDER / name).write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    main()
