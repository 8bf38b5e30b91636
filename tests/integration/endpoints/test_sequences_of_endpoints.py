"""Sequences of endpoints: each keeps the target of its first step."""

from collections import Counter

import httpx

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
