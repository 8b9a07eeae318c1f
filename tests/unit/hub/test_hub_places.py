"""Places for requests of several workers: one queue, and no place is lost with a worker."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest
from support.hubs import hub, link

from leyline_proxy.admission.fair_queue import Arrival, Share
from leyline_proxy.admission.places import Counts, Ticket
from leyline_proxy.hub.places import HubPlaces, SharedPlaces

MOST = 3
SHARES = {"red": Share(max_waiting=4), "blue": Share(max_running=1, max_waiting=2)}


def ticket() -> Ticket:
    """A new ticket."""
    return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("seed", range(10))
async def test_random_requests_of_dying_workers(tmp_path: Path, seed: int) -> None:
    """Never more run than may, none waits beside a free place, and the dead hold nothing."""
    random = Random(seed)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(hub(tmp_path / "hub", HubPlaces(MOST)))
        workers = [await stack.enter_async_context(link(tmp_path / "hub", n)) for n in range(3)]
        places = {worker.index: SharedPlaces(worker) for worker in workers}
        held: list[tuple[int, str, Ticket, bool]] = []
        """Worker, tenant, ticket, and True if it ran at once."""
        for _ in range(120):
            act = random.random()
            if act < 0.5:
                index, tenant, mine = random.choice([*places]), random.choice([*SHARES]), ticket()
                arrival = await places[index].enter(tenant, SHARES[tenant], mine)
                if arrival is Arrival.FULL:
                    places[index].leave(tenant, mine)
                    counts = await places[index].counts(tenant)
                    assert counts.waiting == SHARES[tenant].max_waiting
                else:
                    held.append((index, tenant, mine, arrival is Arrival.RUNS))
            elif act < 0.97 and held:
                index, tenant, mine, _ = held.pop(random.randrange(len(held)))
                places[index].leave(tenant, mine)
            elif len(places) > 1:
                index = random.choice([*places])
                del places[index]
                held = [each for each in held if each[0] != index]
                await workers[index].aclose()
            await check(places, held)


async def check(places: dict[int, SharedPlaces], held: list[tuple[int, str, Ticket, bool]]) -> None:
    """Compare the hub's counts with the tickets."""
    some = next(iter(places.values()))
    await asyncio.sleep(0.002)  # a worker's end, and news of places
    running, room = 0, MOST
    for tenant, share in SHARES.items():
        counts = await some.counts(tenant)
        mine = [each for each in held if each[1] == tenant]
        has = [at_once or place.done() for _, _, place, at_once in mine]
        assert counts == Counts(sum(has), len(has) - sum(has))
        running += counts.running
        room -= counts.running
        assert counts.running <= (share.max_running or MOST)
    assert running <= MOST
    for tenant, share in SHARES.items():
        counts = await some.counts(tenant)
        assert not counts.waiting or not room or counts.running == share.max_running


async def test_requests_of_a_minute_are_counted_together(tmp_path: Path) -> None:
    """Two workers take from one bucket."""
    async with (
        hub(tmp_path / "hub", HubPlaces(MOST)),
        link(tmp_path / "hub") as one,
        link(tmp_path / "hub", 1) as two,
    ):
        first, second = SharedPlaces(one), SharedPlaces(two)
        waits = [await each.take("red", 3) for each in (first, second, first, second)]
    assert waits[:3] == [0.0] * 3 and 0 < waits[3] <= 20
