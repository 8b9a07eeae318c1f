"""Plans of turns that put evicted texts back: with the texts, and again where that changes them."""

from __future__ import annotations

from dataclasses import replace

from ..model.asides import Aside, RecallCall, RecalledTexts, anchor_of
from ..model.forgotten import has_lost, without_written
from ..plan.plan_input import PlanInput
from ..plan.planner import Planner
from ..plan.planning import Planned
from ..request.identify import Identity
from ..upstream.replica import Replica
from .erasure import Erasures
from .ports import KeptText
from .recalling import Recalls, holder_of


class RecallPlans:
    """Plans turns, with what the store of evicted texts adds.

    Args:
        kept: text that forgets reach before their turns are sent.
        memories: of them, those that lose text, too, that left the client's list.
    """

    def __init__(
        self,
        planner: Planner,
        recalls: Recalls,
        erasures: Erasures,
        kept: KeptText | None,
        memories: KeptText | None = None,
    ) -> None:
        self._memories = memories
        self._planner = planner
        self._recalls = recalls
        self._erasures = erasures
        self._kept = kept

    async def plan(
        self, given: PlanInput, identity: Identity, replica: Replica
    ) -> tuple[PlanInput, Planned]:
        """Return a turn's plan, and the inputs that led to it; the store has what it evicts.

        Raises:
            PolicyFailedClosedError, BadRequestError: the request must not be sent.
            ForgetsOwedError: no more forgets can be remembered.
        """
        given = await self.with_texts(given, identity)
        planned = await self._planner.plan(given, identity.session_id, replica)
        if await self._recalls.bar(given, planned, identity.session_id):
            given = await self.with_texts(given, identity)
            if given.told is not None or given.shelf is not None:
                planned = await self._planner.plan(given, identity.session_id, replica)
        found = planned.prepared.working_set
        if found is not None and found.append:
            given = await self._with_appended(given, planned, identity, found.append)
            planned = await self._planner.plan(given, identity.session_id, replica)
        if planned.plan.forgets:
            await self._forget(given, identity)
        elif self._memories is not None and has_lost(given.comparable, planned.prepared):
            await self._memories.forget(*_place(given, identity))
        await self._recalls.keep(given, planned, identity.session_id)
        if planned.plan.forgets and (left := _without_written(given)) is not given:
            # Of what is put back, only that remains which this turn itself evicts again.
            told = await self._recalls.texts_for(
                left.request, replace(identity, session=left.session)
            )
            # The demand stands, whatever shows it in the new list.
            given = replace(left, told=told, demanded=planned.plan.forget)
            planned = await self._planner.plan(given, identity.session_id, replica)
        return given, planned

    async def with_texts(self, given: PlanInput, identity: Identity) -> PlanInput:
        """Return the inputs of a turn with what the store has for it."""
        told = await self._recalls.texts_for(given.request, identity)
        shelf = await self._recalls.shelf_for(given.request, identity)
        return replace(given, told=told, shelf=shelf)

    async def _forget(self, given: PlanInput, identity: Identity) -> None:
        """Remove the session's kept text, in front of a turn that demands a forget."""
        self._erasures.check(given.request.tenant.name)
        if self._kept is not None:
            await self._kept.forget(*_place(given, identity))

    async def _with_appended(
        self, given: PlanInput, planned: Planned, identity: Identity, addresses: tuple[str, ...]
    ) -> PlanInput:
        """Return the inputs with an aside that brings texts of the store."""
        more = await self._recalls.look_up(holder_of(given.request, identity), addresses)
        prints = planned.prepared.client_fingerprints
        calls = tuple(
            RecallCall(
                f"call_{address[-16:]}_{given.index}",
                f'{{"address":"{address}"}}',
                place,
                address,
                own=True,
            )
            for place, address in enumerate(addresses)
            if address in more.texts
        )
        if not calls:
            return given
        told = given.told or RecalledTexts()
        return replace(
            given,
            told=replace(told, texts={**told.texts, **more.texts}),
            appended=(Aside(anchor_of(prints, len(prints) - 1), calls),),
        )


def _without_written(given: PlanInput) -> PlanInput:
    """Return the inputs without texts that models wrote before a forget, and to be looked up again;
    the very inputs if nothing was put back and nothing was written."""
    session = given.session
    left = without_written(session) if session is not None else None
    return given if left is session and given.told is None else replace(given, session=left)


def _place(given: PlanInput, identity: Identity) -> tuple[str, str, str, int]:
    """Return a turn's tenant, session and name, and the session's demands before it."""
    demands = given.session.demands if given.session is not None else 0
    return given.request.tenant.name, identity.session_id, given.turn, demands
