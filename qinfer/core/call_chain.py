"""The chain of a call between models: the executions that wait for its answer.

    client ─▶ A ─▶ B ─▶ C        the request to C has the holders A and B

A calling execution keeps its instance: a call that only a waiting instance could execute would never be answered.
"""

from collections.abc import Sequence

import msgspec

from qinfer.core.messages import ResourceHolder


def extended(chains: Sequence[tuple[ResourceHolder, ...]], caller: ResourceHolder) -> tuple[ResourceHolder, ...]:
    """Returns the holders of a batch's requests, then the caller."""
    found = chains[0] if len(chains) == 1 else _merged(chains)
    return (*found, msgspec.structs.replace(caller, depth=depth_of(found) + 1))


def depth_of(holders: Sequence[ResourceHolder]) -> int:
    """Counts the nested calls before a request."""
    return max((holder.depth for holder in holders), default=0)


def names_of(holders: Sequence[ResourceHolder], callee: str) -> str:
    """Returns the longest chain: `A -> B -> A`."""
    names: dict[int, str] = {}
    for holder in holders:
        names.setdefault(holder.depth, holder.model)
    return " -> ".join([*(names[depth] for depth in sorted(names)), callee])


def level_of(holders: Sequence[ResourceHolder], model: str, version: int) -> int:
    """Counts a version's instances that wait for a request."""
    return len({holder.token for holder in holders if (holder.model, holder.version) == (model, version)} - {""})


def endless(holders: Sequence[ResourceHolder], model: str, version: int, instances: int) -> str:
    """Returns why a call would wait for itself, if so."""
    waiting = level_of(holders, model, version)
    if not waiting or waiting < instances:
        return ""
    all_of = "the only instance" if instances == 1 else f"all {instances} instances"
    return (
        f"model '{model}' can't be called by model '{holders[-1].model}': {all_of} of '{model}' would wait for this "
        f"call ({names_of(holders, model)}); give '{model}' more instances than its calls to itself are deep"
    )


def _merged(chains: Sequence[tuple[ResourceHolder, ...]]) -> tuple[ResourceHolder, ...]:
    found: dict[str, ResourceHolder] = {}
    for chain in sorted(chains, key=depth_of, reverse=True):
        for holder in chain:
            found.setdefault(holder.token or f"{holder.model}/{holder.depth}", holder)
    return tuple(found.values())
