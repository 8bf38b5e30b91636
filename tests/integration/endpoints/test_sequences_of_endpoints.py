"""Sequences of endpoints: each keeps the target of its first step."""

from collections import Counter

import httpx

from qinfer.models.state import State
from qinfer.testing import eventually
from tests.support.endpoints import canary, split
from tests.support.sequences_served import SequencesServed, sequences_served, sum_of


async def declared(served: SequencesServed, weight: float) -> None:
    body = split(canary(weight, "stub:2"), stable="stub:1")
    assert (await served.client.put("/v1/endpoints/sums", json=body)).status_code == 200


async def test_a_sequence_stays_with_its_target_when_the_weights_change() -> None:
    """Its state is there; those that begin then go to the other one."""
    async with sequences_served(versions=(1, 2)) as served:
        await served.start()
        await declared(served, 0)
        replies = [await served.post(1, 7, model="sums", start=True)]
        await declared(served, 1)
        replies += [await served.post(n, 7, model="sums", end=n == 3) for n in (2, 3)]
        later = await served.post(5, 7, model="sums", start=True, end=True)

        assert [sum_of(reply) for reply in (*replies, later)] == [1, 3, 6, 5]
        assert [told(reply) for reply in (*replies, later)] == ["stub:1"] * 3 + ["stub:2"]


async def test_all_steps_of_a_sequence_have_one_target() -> None:
    """By its correlation id: no step is told apart by chance."""
    async with sequences_served(versions=(1, 2)) as served:
        await served.start()
        await declared(served, 0.5)
        targets = []
        for sequence in range(1, 21):
            steps = [await served.post(n, sequence, model="sums", start=n == 1, end=n == 3) for n in (1, 2, 3)]
            assert [sum_of(reply) for reply in steps] == [1, 3, 6]
            (target,) = {told(reply) for reply in steps}
            targets.append(target)

        assert Counter(targets).keys() == {"stub:1", "stub:2"}


def told(reply: httpx.Response) -> str:
    return str(reply.headers["qinfer-target"])


async def test_a_target_stays_loaded_when_its_model_has_a_newer_version() -> None:
    """The version policy has dropped it; it goes once it is no target any more."""
    async with sequences_served(versions=(1,)) as served:
        await served.start(heartbeat_every_s=0.05)
        stable = split(stable="stub:1")
        assert (await served.client.put("/v1/endpoints/sums", json=stable)).status_code == 200
        await served.sums.model(versions=(2,))

        async def loaded() -> set[int]:
            records = await served.scene.store.workers()
            return {
                v
                for record in records
                for v, state in record.models.get("stub", {}).items()
                if state.state is State.READY
            }

        async def are_both() -> bool:
            return await loaded() == {1, 2}

        async def is_newer() -> bool:
            return await loaded() == {2}

        await eventually(are_both, description="the newer version beside the target")
        await served.gateway.catalog.refresh()
        reply = await served.post(1, 7, model="sums", start=True, end=True)
        assert (sum_of(reply), told(reply)) == (1, "stub:1")

        assert (await served.client.put("/v1/endpoints/sums", json=split(stable="stub:2"))).status_code == 200
        await eventually(is_newer, description="the end of the old version")
        assert told(await served.post(1, 7, model="sums", start=True, end=True)) == "stub:2"
