"""Which versions of a model are served."""

from collections.abc import Iterable

from qinfer.models.config.message import ModelConfig


def select_versions(config: ModelConfig, present: Iterable[int]) -> tuple[int, ...]:
    """Applies the version policy (default: the latest one) to the versions that are there; ascending."""
    ascending = sorted(present)
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return tuple(ascending)
    if choice == "specific":
        return tuple(version for version in ascending if version in policy.specific.versions)
    return tuple(ascending[-(policy.latest.num_versions or 1) :])
