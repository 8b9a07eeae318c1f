"""The proxy's engines, and the choice of one for a session."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence

from ..errors import NotFoundError, closest
from ..model.template_roles import TemplateRoles, strictest
from .handshake import UNKNOWN_MODEL
from .rendezvous import ranked
from .replica import Replica

_LIST_AGE_S = 1.0
"""Seconds between two refreshes of the model lists because of unknown models."""

Names = Collection[str]


class ReplicaPool:
    """One replica or many. ``allowed`` has the names that a tenant may use; None means all."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        """Raise ValueError for no replica, or two of one name."""
        self._replicas = {replica.name: replica for replica in replicas}
        if not replicas or len(self._replicas) != len(replicas):
            raise ValueError("upstreams must be one or more, each with a name of its own")

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, name: str) -> Replica | None:
        """Return the replica of this name, or None."""
        return self._replicas.get(name)

    @property
    def first(self) -> Replica:
        """The replica to show if only one is shown: the first that splices, else that is up."""
        replicas = tuple(self)
        spliced = next((each for each in replicas if each.status.splices), None)
        return spliced or next((each for each in replicas if each.status.up), replicas[0])

    @property
    def models(self) -> tuple[str, ...]:
        """Ids of all models that any replica lists."""
        found: dict[str, None] = {}
        for replica in self:
            found.update(dict.fromkeys(replica.status.models or ()))
        return tuple(found)

    def label(self, model: str | None) -> str:
        """Return ``model`` as a metric label."""
        known = model is not None and any(model in (each.status.models or ()) for each in self)
        return model if known and model is not None else UNKNOWN_MODEL

    def others(self, avoid: Names, model: str, allowed: Names | None = None) -> list[Replica]:
        """Return replicas that are up and serve ``model``, less those to avoid."""
        return [
            each
            for each in self
            if each.name not in avoid
            and (allowed is None or each.name in allowed)
            and each.status.up
            and each.status.serves(model)
        ]

    async def check_model(self, model: str, allowed: Names | None = None) -> None:
        """Refuse a model that is on no replica's list, even after a refresh of the lists.

        Raises:
            NotFoundError: names the closest models.
        """
        replicas = self.open_to(allowed)
        if any(each.status.serves(model) for each in replicas):
            return
        found = await asyncio.gather(
            *(each.handshake.refresh_if_older(_LIST_AGE_S) for each in replicas)
        )
        if not any(status.serves(model) for status in found):
            known = {name for status in found for name in status.models or ()}
            raise NotFoundError(
                f"The model {model[:200]!r} is not served here. {closest(model, known)}",
                param="model",
                code="model_not_found",
            )

    def roles(self, model: str | None = None) -> TemplateRoles:
        """Return the roles that the templates of all replicas show.

        Args:
            model: only that of replicas which serve it.
        """
        serving = [each for each in self if model is None or each.status.serves(model)]
        return strictest([each.status.rendering.roles for each in serving])

    def continues(self, model: str) -> bool:
        """Return True if all replicas that serve a model can go on with an answer's beginning."""
        return all(each.status.continues for each in self if each.status.serves(model))

    def open_to(self, allowed: Names | None) -> list[Replica]:
        """Return the replicas that a tenant may use.

        Raises:
            NotFoundError: none.
        """
        found = [each for each in self if allowed is None or each.name in allowed]
        if not found:
            raise NotFoundError("No upstream is open to this tenant.", code="no_upstream")
        return found

    async def choose(
        self,
        key: str,
        model: str | None,
        *,
        allowed: Names | None = None,
        avoid: Names = frozenset(),
        home: str = "",
    ) -> Replica:
        """Return the replica that serves the session ``key``.

        The choice is the best ranked of the ready ones; if there is none, of those that are up when
        asked again. If none is up, it is the best ranked: its failure is the answer.

        Args:
            model: None if any replica will do.
            avoid: replicas that have just failed this request.
            home: the run that served the session's last turn. Behind a router, this replica
                is the one to expect: the router, not the rank, has chosen it.

        Raises:
            NotFoundError: the tenant may use none of the replicas.
        """
        weights = {each.name: each.weight for each in self.open_to(allowed)}
        order = [self._replicas[name] for name in ranked(key, weights)]
        held = self.holding(home) if home else None
        if held is not None and held.router is not None and held.name in weights:
            order = [held, *(each for each in order if each is not held)]
        fresh = [each for each in order if each.name not in avoid] or order
        serving = [each for each in fresh if model is None or each.status.serves(model)] or fresh
        ready = next((each for each in serving if each.ready), None)
        if ready is not None:
            return ready
        # Ask all at once: one that hangs must not hide the others.
        await asyncio.gather(*(each.handshake.current() for each in serving))
        for replica in serving:
            if replica.ready and (model is None or replica.status.serves(model)):
                return replica
        up = next((each for each in serving if each.status.up), None)
        return up or serving[0]

    def holding(self, run: str) -> Replica | None:
        """Return the replica on which a run of an engine continues, or None."""
        return next((each for each in self if each.status.retains_as == run), None)

    def behind(self, replica: Replica) -> list[Replica]:
        """Return all replicas behind the router of one; none without a router."""
        router = replica.router
        if router is None:
            return []
        return [
            each
            for each in self
            if each.router is not None and each.router.address == router.address
        ]

    def running(self, instance: str) -> Replica | None:
        """Return the replica whose engine's run has this name, or None."""
        return next((each for each in self if instance and each.status.instance == instance), None)

    async def refresh(self) -> None:
        """Ask all of them now."""
        await asyncio.gather(*(each.handshake.refresh() for each in self))

    async def run(self) -> None:
        """Keep asking until cancelled."""
        async with asyncio.TaskGroup() as group:
            for replica in self:
                group.create_task(replica.handshake.run())

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(replica.aclose() for replica in self))
