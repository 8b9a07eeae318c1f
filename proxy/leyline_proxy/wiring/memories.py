"""The memories of prompt text, which forgets, deletions and proofs reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..edits.editor import Editor
from ..hub.fleet import Fleet
from ..hub.kept import KeptByAll
from ..observe.eviction_rates import EvictionRates
from ..request.bodies import BodyMemory
from ..sessions import SessionStore
from ..turns.memories import KeptTexts, PromptMemories, RenderedTexts
from ..turns.ports import KeptText
from ..upstream.pool import ReplicaPool


@dataclass(frozen=True, slots=True)
class Kept:
    """The places of prompt text beside the session store."""

    memories: PromptMemories
    """Memories of this process."""
    of_workers: KeptText
    """The memories of all workers."""
    everywhere: KeptTexts
    """All places: these memories, and what is at rest."""


def build_kept(
    *,
    bodies: BodyMemory,
    editor: Editor,
    pool: ReplicaPool,
    store: SessionStore,
    evictions: EvictionRates | None,
    fleet: Fleet | None,
    at_rest: Sequence[KeptText],
) -> Kept:
    """Return the places of prompt text.

    Args:
        evictions: None if nothing evicted is kept.
        fleet: the other workers; None if there are none.
        at_rest: stores of all workers.
    """
    copies = store.copies
    memories = PromptMemories(
        {
            "bodies": bodies,
            "rendered": RenderedTexts(pool),
            "policies": editor.memos,
            **({"copies": copies} if copies is not None else {}),
        }
    )
    own = KeptTexts(memories, *((evictions,) if evictions is not None else ()))
    of_workers: KeptText = KeptByAll(own, fleet) if fleet is not None else own
    return Kept(memories, of_workers, KeptTexts(*at_rest, of_workers))
