"""The models that ensembles use: the order of loads, new generations, and unloads (reference §1.14)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from qinfer.errors import QinferError
from qinfer.models.config.ensembles import to_steps
from qinfer.models.config.message import ModelConfig, from_json
from qinfer.models.config.sequences import to_sequence_spec
from qinfer.models.sequence_spec import SequenceSpec, of_ensemble
from qinfer.models.state import DesiredState, ModelUse, StoredModel
from qinfer.models.store import ControlStore

_ATTEMPTS = 10


def uses_of(config: ModelConfig) -> tuple[ModelUse, ...]:
    """Returns the models that an ensemble uses."""
    steps = config.ensemble_scheduling.step
    return tuple(dict.fromkeys(ModelUse(step.model_name, max(step.model_version, 0)) for step in steps))


def in_order(models: Iterable[StoredModel]) -> list[StoredModel]:
    """Sorts models after those that they use."""
    left = {model.model: model for model in models}
    ordered: list[StoredModel] = []
    begun: set[str] = set()
    path = list(reversed(left.values()))
    while path:
        model = path[-1]
        begun.add(model.model)
        uses = [use.model for use in model.uses if model.model in left]
        if before := [left[name] for name in uses if name in left and name not in begun]:
            path += reversed(before)
            continue
        path.pop()
        if left.pop(model.model, None) is not None:
            ordered.append(model)
    return ordered


def users_of(names: Collection[str], stored: Mapping[str, StoredModel]) -> list[str]:
    """Returns the ensembles that use any of the models, even indirectly."""
    found = list(names)
    for name in found:
        found += [
            user for user, one in stored.items() if user not in found and any(use.model == name for use in one.uses)
        ]
    return found[len(names) :]


def wanted_for_another(model: str, wish: DesiredState | None) -> DesiredState:
    """Returns the desired state of an ensemble's unloaded model."""
    return msgspec.structs.replace(wish or DesiredState(model, 0), load=False, dependent=True)


def unneeded(model: str, desired: Mapping[str, DesiredState], stored: Mapping[str, StoredModel]) -> list[str]:
    """Returns the models that only this ensemble needed."""
    left = {name for name, wish in desired.items() if wish.load} - {model}
    found, gone = [], [model]
    for name in gone:
        for use in stored[name].uses if name in stored else ():
            wish, users = desired.get(use.model), users_of([use.model], {n: stored[n] for n in left if n in stored})
            if wish is not None and wish.load and wish.dependent and use.model in left and not users:
                left.discard(use.model)
                found.append(use.model)
                gone.append(use.model)
    return found


async def renew_users(names: Collection[str], store: ControlStore, without: Collection[str] = ()) -> bool:
    """Gives loaded ensembles of changed models a new generation; returns whether it did."""
    wishes = {name: wish for name, wish in (await store.desired()).items() if wish.load}
    users = [name for name in users_of(list(names), await store.models(wishes)) if name not in without]
    for name in users:
        await _renew(name, store)
    return bool(users)


async def _renew(name: str, store: ControlStore) -> None:
    for _ in range(_ATTEMPTS):
        stored, wish = await store.model(name), (await store.desired()).get(name)
        if stored is None or wish is None or not wish.load:
            return
        renewed = msgspec.structs.replace(stored, generation=max(stored.generation, wish.generation) + 1)
        if await store.put_model(renewed):
            await store.set_desired(msgspec.structs.replace(wish, generation=renewed.generation))
            return
    raise QinferError(f"ensemble '{name}' is changed by others all the time; try again")


def labels_of(model: StoredModel, stored: Mapping[str, StoredModel]) -> dict[str, tuple[str, ...]]:
    """Returns output labels; an ensemble has its steps' by default."""
    found = [model]
    for one in found:
        known = {each.model for each in found}
        found += [stored[name] for name in missing_uses([one], known) if name in stored]
    labels: dict[str, dict[str, tuple[str, ...]]] = {}
    for one in in_order(found):
        passed: dict[str, tuple[str, ...]] = {}
        for step in to_steps(from_json(one.config)) if one.uses and not one.error else ():
            of_step = labels.get(step.model, {})
            passed.update((tensor, of_step[output]) for output, tensor in step.outputs.items() if output in of_step)
        labels[one.model] = passed | one.labels
    return labels[model.model]


class ModelKind(NamedTuple):
    """The properties that ensembles inherit from their steps."""

    decoupled: bool
    sequences: SequenceSpec | None


def kind_of_ensemble(ensemble: StoredModel, stored: Mapping[str, StoredModel]) -> ModelKind:
    """Returns the properties inherited from steps."""
    names = [use.model for use in ensemble.uses]
    for name in names:
        names += [use.model for use in stored[name].uses if use.model not in names] if name in stored else []
    used = [stored[name] for name in names if name in stored]
    kinds = [_kind(one.config) for one in used if one.config and not (one.uses or one.error)]
    sequences = of_ensemble([kind.sequences for kind in kinds if kind.sequences is not None])
    return ModelKind(any(kind.decoupled for kind in kinds), sequences)


@lru_cache(maxsize=1024)
def _kind(text: str) -> ModelKind:
    config = from_json(text)
    return ModelKind(config.model_transaction_policy.decoupled, to_sequence_spec(config))


def missing_uses(models: Sequence[StoredModel], known: Collection[str]) -> list[str]:
    """Returns the unknown models among those that a model uses."""
    return list(dict.fromkeys(use.model for model in models for use in model.uses if use.model not in known))
