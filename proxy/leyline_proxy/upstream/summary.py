"""An engine's status for operators."""

from __future__ import annotations

from typing import Any

from .replica import Replica


def replica_document(replica: Replica) -> dict[str, Any]:
    """Return one engine's address, its availability, and whether it splices, or why not."""
    status = replica.status
    return {
        "name": replica.name,
        "upstream": replica.client.address,
        "up": status.up,
        "problem": status.problem,
        "draining": replica.draining,
        "warming": replica.warming,
        "circuit": replica.breaker.state.value,
        "running": replica.running,
        "engine": status.engine if status.up else None,
        "models": list(status.models or ()),
        "splices": status.splices,
        "obstacle": status.obstacle,
        "mismatch": status.mismatch.reason.value if status.mismatch is not None else "",
        "fix": status.fix,
        "rendering": status.rendering.source,
        "rendering_problem": status.rendering.problem,
        **(
            {"router": {"address": replica.router.address, "problem": replica.router_problem}}
            if replica.router is not None
            else {}
        ),
    }
