"""Mistakes in ensembles, and between ensembles and their steps, are told with Triton's texts."""

from dataclasses import replace
from itertools import pairwise

import pytest

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import from_json, normalise, parse, to_json, to_spec
from qinfer.models.config.ensembles import fit, refit
from qinfer.models.ensemble_graph import (
    MAX_DECOUPLED,
    MAX_NESTING,
    MAX_STEPS,
    EnsemblePlan,
    ResolvedModel,
    plan_ensemble,
)
from qinfer.models.sequence_spec import ControlKind, ControlSpec, DirectSpec, SequenceSpec
from qinfer.models.spec import EnsembleStep, ModelSpec, Reshape, TensorSpec

HEAD = """
platform: "ensemble" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] }
"""
FIRST = 'step { model_name: "a" model_version: -1 input_map { key: "x" value: "IN" } '
FIRST += 'output_map { key: "y" value: "mid" } }'
SECOND = 'step { model_name: "b" model_version: 2 input_map { key: "x" value: "mid" } '
SECOND += 'output_map { key: "y" value: "OUT" } }'


def normal(text: str) -> ModelSpec:
    return to_spec(from_json(to_json(normalise(parse(text), "e"))))


def scheduling(*steps: str) -> str:
    return HEAD + "ensemble_scheduling { " + " ".join(steps) + " }"


def model(name: str, **options: object) -> ModelSpec:
    fields: dict[str, object] = {
        "name": name,
        "backend": "stub",
        "max_batch_size": 8,
        "inputs": (TensorSpec(name="x", datatype="FP32", dims=(2,)),),
        "outputs": (TensorSpec(name="y", datatype="FP32", dims=(2,)),),
    }
    return ModelSpec(**(fields | options))  # type: ignore[arg-type]


def planned(spec: ModelSpec, *models: ModelSpec) -> EnsemblePlan:
    known = {one.name: one for one in models}
    return plan_ensemble(spec, lambda step: ResolvedModel(known[step.model], step.version or 1))


def test_an_ensemble_is_accepted() -> None:
    spec = normal(scheduling(FIRST, SECOND))

    assert spec.steps == (
        EnsembleStep("a", 0, {"x": "IN"}, {"y": "mid"}),
        EnsembleStep("b", 2, {"x": "mid"}, {"y": "OUT"}),
    )
    assert spec.instances == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "ensemble scheduling must be set for ensemble e whose platform is ensemble"),
        ('backend: "onnxruntime" ensemble_scheduling { }', "be set for model 'e' whose platform is not ensemble"),
        (scheduling(), "must specify 'step' for ensemble 'e'"),
        (scheduling("step { }"), "must specify 'model_name' in step 0 of ensemble 'e'"),
        (scheduling('step { model_name: "a" }'), "must specify 'input_map' in step 0 of ensemble 'e'"),
        (
            scheduling('step { model_name: "a" input_map { key: "x" value: "IN" } }'),
            "must specify 'output_map' in step 0 of ensemble 'e'",
        ),
        (scheduling(FIRST, SECOND) + "instance_group { }", "instance group should not be specified for ensemble 'e'"),
        (scheduling(FIRST, SECOND) + "optimization { }", "optimization should not be specified for ensemble 'e'"),
        (scheduling(FIRST, SECOND) + "model_warmup { }", "model_warmup can not be specified for ensemble 'e'"),
        (
            scheduling(FIRST, FIRST, SECOND),
            "ensemble tensor 'mid' can appear in an output map only once for ensemble 'e' step 1",
        ),
        (scheduling(SECOND), "ensemble input 'IN' for ensemble e is not used"),
        (scheduling(FIRST), "ensemble output 'OUT' for ensemble e is not used"),
        (
            scheduling(FIRST, SECOND.replace('"mid"', '"other"')),
            "output 'OUT' for ensemble 'e' is not written; ensemble tensor 'mid' is unused in ensemble 'e'",
        ),
        (scheduling(FIRST, SECOND, FIRST.replace("mid", "more")), "ensemble tensor 'more' is unused in ensemble 'e'"),
    ],
)  # fmt: skip
def test_mistakes_of_a_configuration(text: str, message: str) -> None:
    with pytest.raises(ModelLoadFailed, match=message):
        normal(text)


def test_steps_that_wait_for_one_another() -> None:
    """A cycle is a tensor that can't be written."""
    loop = 'step { model_name: "b" model_version: -1 input_map { key: "x" value: "OUT" } input_map { key: "z" '
    loop += 'value: "IN" } output_map { key: "y" value: "OUT" } }'

    with pytest.raises(ModelLoadFailed, match="output 'OUT' for ensemble 'e' is not written"):
        normal(scheduling(loop))


@pytest.mark.parametrize(
    ("a", "message"),
    [
        (
            model("a", max_batch_size=2),
            "ensemble e allows maximum batch size 4, but it contains model a which only allows maximum batch size to "
            "be 2",
        ),
        (
            model("a", inputs=(TensorSpec(name="z", datatype="FP32", dims=(2,)),)),
            "in ensemble e, ensemble tensor IN is mapping to non-existing input x in model a",
        ),
        (
            model("a", inputs=tuple(TensorSpec(name=name, datatype="FP32", dims=(2,)) for name in "xz")),
            "in ensemble e, input z in model a is not mapped to any ensemble tensors",
        ),
        (
            model("a", outputs=(TensorSpec(name="z", datatype="FP32", dims=(2,)),)),
            "in ensemble e, ensemble tensor mid is mapped from non-existing output y in model a",
        ),
        (
            model("a", inputs=(TensorSpec(name="x", datatype="INT8", dims=(2,)),)),
            "in ensemble e, ensemble tensor IN: inconsistent data type: TYPE_FP32 is inferred from model e while "
            "TYPE_INT8 is inferred from model a",
        ),
        (
            model("a", outputs=(TensorSpec(name="y", datatype="FP32", dims=(3,)),)),
            "in ensemble e, ensemble tensor mid: inconsistent shape: [-1,3] is inferred from model a while [-1,2] is "
            "inferred from model b",
        ),
    ],
)
def test_steps_that_do_not_fit(a: ModelSpec, message: str) -> None:
    with pytest.raises(ModelLoadFailed) as raised:
        planned(normal(scheduling(FIRST, SECOND)), a, model("b"))

    assert raised.value.message.startswith(message)


@pytest.mark.parametrize(
    ("reshape", "message"),
    [
        ("", "in ensemble e, ensemble tensor IN: inconsistent shape: [-1,4] is inferred from model e while [-1,2,2] "),
        ("4, 1", "in ensemble e, ensemble tensor IN: inconsistent shape: [-1,4,1] is inferred from model e while [-1,"),
        ("2, 3", "model input 'IN' has different size for dims and reshape: [4] and [2, 3]"),
    ],
)
def test_shapes_of_an_ensemble_that_do_not_fit_as_its_steps_see_them(reshape: str, message: str) -> None:
    matrix = (TensorSpec(name="x", datatype="FP32", dims=(2, 2)),)
    dims = "dims: [ 4 ]" + (f" reshape {{ shape: [ {reshape} ] }}" if reshape else "")

    text = scheduling(FIRST, SECOND).replace("dims: [ 2 ]", dims, 1)

    with pytest.raises(ModelLoadFailed) as raised:
        planned(normal(text), model("a", inputs=matrix), model("b"))

    assert message in raised.value.message


def test_the_reshapes_on_the_way_of_a_tensor() -> None:
    """Each ensemble that it comes through, from the inside out and in again; readers within see the inner shape."""
    into, out = Reshape((2,), (2, 1), batched=True), Reshape((2, 1), (2,), batched=True)
    x, y, z = (TensorSpec(name=name, datatype="FP32", dims=(2, 1)) for name in "xyz")
    steps = EnsembleStep("c", 0, {"x": "x"}, {"y": "y"}), EnsembleStep("c", 0, {"x": "y"}, {"y": "z"})
    seen = [replace(tensor, dims=(2,), reshape=(2, 1)) for tensor in (x, y)]
    inner = model("a", backend="", inputs=seen[:1], outputs=(seen[1], z), steps=steps)
    outer = normal(scheduling(FIRST, SECOND.replace('"b" model_version: 2', '"a" model_version: -1')))

    made = planned(outer, inner, model("c", inputs=(x,), outputs=(y,)))

    assert [step.reshapes for step in made.steps] == [{"x": (into,)}, {}, {"x": (out, into)}, {}]
    assert made.reshapes == {"OUT": (out,)}


@pytest.mark.parametrize(
    ("shape", "rows", "batched", "expected"),
    [
        ((3, 5, 4), 3, True, ((3, 5, 2, 2), 3)),
        ((5, 4), 0, True, ((1, 5, 2, 2), 1)),
        ((5, 4), 0, False, ((5, 2, 2), 0)),
        ((1, 5, 4), 1, False, ((5, 2, 2), 0)),
        ((4,), 0, False, ((4, 2, 2), 0)),
        ((), 0, True, ((0, 2, 2), 0)),
    ],
)
def test_a_tensor_is_fitted_to_the_ensemble_that_reshapes_it(
    shape: tuple[int, ...],
    rows: int,
    batched: bool,  # noqa: FBT001 - a parameter of the test
    expected: tuple[tuple[int, ...], int],
) -> None:
    """As to a model; what has no place in it has another number of elements then."""
    assert refit(shape, rows, [Reshape((-1, 4), (-1, 2, 2), batched)]) == expected
    assert refit(shape, rows, []) == (shape, rows)


def test_a_model_without_batches_may_take_a_batch() -> None:
    """As long as the shapes with the batch dimension are alike, as in Triton."""
    whole = (TensorSpec(name="x", datatype="FP32", dims=(-1, 2)),)

    made = planned(normal(scheduling(FIRST, SECOND)), model("a", max_batch_size=0, inputs=whole), model("b"))

    assert [step.version for step in made.steps] == [1, 2]


def test_ensembles_that_contain_one_another() -> None:
    first = normal(scheduling(FIRST, SECOND))
    again = replace(first, name="a", inputs=model("a").inputs, outputs=model("a").outputs)
    again = replace(again, steps=(EnsembleStep("e", 0, {"IN": "x"}, {"OUT": "y"}),))

    with pytest.raises(ModelLoadFailed, match=r"circular dependency between ensembles: e -> \.\.\. -> a -> e"):
        planned(first, again, first, model("b"))


def test_an_ensemble_that_grows_too_large() -> None:
    level = model("a")
    known = {"a": level}
    for depth in range(11):
        halves = ("x", "mid"), ("mid", "y")
        steps = tuple(EnsembleStep(level.name, 0, {"x": taken}, {"y": made}) for taken, made in halves)
        level = known[f"e{depth}"] = model(f"e{depth}", backend="", steps=steps)

    with pytest.raises(ModelLoadFailed, match=f"more than {MAX_STEPS} steps"):
        plan_ensemble(level, lambda step: ResolvedModel(known[step.model], 1))


def test_ensembles_that_are_too_deep_within_one_another() -> None:
    level = model("a")
    known = {"a": level}
    for depth in range(2000):
        steps = (EnsembleStep(level.name, 0, {"x": "x"}, {"y": "y"}),)
        level = known[f"e{depth}"] = model(f"e{depth}", backend="", steps=steps)

    for name in ("e1999", f"e{MAX_NESTING}"):
        with pytest.raises(ModelLoadFailed, match=f"more than {MAX_NESTING} ensembles are within one another"):
            plan_ensemble(known[name], lambda step: ResolvedModel(known[step.model], 1))
    assert len(plan_ensemble(known[f"e{MAX_NESTING - 1}"], lambda step: ResolvedModel(known[step.model], 1)).steps) == 1


def test_an_optional_input_that_nobody_gives() -> None:
    """An ensemble within may leave it out, and its steps get nothing for it."""
    optional = (*model("a").inputs, TensorSpec(name="z", datatype="FP32", dims=(2,), optional=True))
    inner = model("a", backend="", inputs=optional, steps=(EnsembleStep("c", 0, {"x": "x", "z": "z"}, {"y": "y"}),))
    flow = planned(normal(scheduling(FIRST, SECOND)), inner, model("b"), model("c", inputs=optional)).flow(())

    (number,) = flow.start({"IN": 1})

    assert dict(flow.step_inputs(number)) == {"x": 1}


def two_sources(merges: bool) -> ModelSpec:  # noqa: FBT001 - a parameter of tests
    """Returns an ensemble of two decoupled steps side by side: a third one reads both, or both are outputs."""
    steps = [EnsembleStep(name, 0, {"x": "IN"}, {"y": tensor}) for name, tensor in (("a", "OUT"), ("b", "mid"))]
    outputs = [TensorSpec(name=name, datatype="FP32", dims=(2,)) for name in ("OUT", "mid")]
    if merges:
        steps.append(EnsembleStep("c", 0, {"x": "OUT", "z": "mid"}, {"y": "end"}))
        outputs = [TensorSpec(name="end", datatype="FP32", dims=(2,))]
    spec = normal(scheduling(FIRST, SECOND))
    return replace(spec, steps=tuple(steps), outputs=tuple(outputs))


@pytest.mark.parametrize(("merges", "at"), [(True, "c"), (False, "e")])
@pytest.mark.parametrize("both", [True, False])
def test_tensors_of_different_decoupled_steps_do_not_meet(merges: bool, at: str, both: bool) -> None:  # noqa: FBT001
    """Nor do those of a decoupled step and of none: nobody knows which of them belong together."""
    inputs = tuple(TensorSpec(name=name, datatype="FP32", dims=(2,)) for name in "xz")
    models = model("a", decoupled=True), model("b", decoupled=both), model("c", inputs=inputs)

    with pytest.raises(ModelLoadFailed) as raised:
        planned(two_sources(merges), *models)

    text = f"in ensemble e, step of model '{at}' receives inputs originated from different decoupled models"
    assert raised.value.message == text


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_an_ensemble_is_decoupled_if_a_step_is(said: bool, is_decoupled: bool) -> None:  # noqa: FBT001
    """Whatever its configuration says, as in Triton."""
    text = scheduling(FIRST, SECOND) + f"model_transaction_policy {{ decoupled: {str(said).lower()} }}"

    made = planned(normal(text), model("a"), model("b", decoupled=is_decoupled))

    assert made.spec.decoupled == is_decoupled


def test_the_stages_of_an_ensemble_within_another() -> None:
    inner = model("a", backend="", steps=(EnsembleStep("c", 0, {"x": "x"}, {"y": "y"}),))

    made = planned(normal(scheduling(SECOND, FIRST)), inner, model("b", decoupled=True), model("c", decoupled=True))

    assert [(step.model.name, step.stage) for step in made.steps] == [("c", 0), ("b", 1)]
    assert made.last_stage == 2


def test_too_many_decoupled_steps() -> None:
    tensors = ["IN", *map(str, range(MAX_DECOUPLED)), "OUT"]
    steps = tuple(EnsembleStep("a", 0, {"x": i}, {"y": o}) for i, o in pairwise(tensors))

    with pytest.raises(ModelLoadFailed, match=f"more than {MAX_DECOUPLED} decoupled steps"):
        planned(replace(normal(scheduling(FIRST, SECOND)), steps=steps), model("a", decoupled=True))


def test_an_ensemble_has_sequences_if_a_step_has() -> None:
    """Its idle time is the longest, and it takes text as correlation id only where each of them does."""
    number = ControlSpec(name="id", kind=ControlKind.CORRID, datatype="UINT64")
    stateful = SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=1, max_idle_s=9.0, controls=(number,))
    other = replace(stateful, max_idle_s=5.0, controls=(replace(number, datatype="BYTES"),))

    made = planned(
        normal(scheduling(FIRST, SECOND)), model("a", sequences=other), model("b", sequences=stateful)
    ).spec.sequences
    iterative = planned(
        normal(scheduling(FIRST, SECOND)), model("a", sequences=replace(other, iterative=True)), model("b")
    )

    assert made is not None
    assert (made.max_idle_s, made.controls, made.max_rows, made.is_explicit) == (9.0, (number,), 1, False)
    assert iterative.spec.sequences is None


def test_settings_that_stateful_ensembles_can_not_have() -> None:
    sequences = SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=1)
    spec = normal(scheduling(FIRST, SECOND) + "response_cache { enable: true }")

    with pytest.raises(ModelLoadFailed, match="does not currently support model e with 'sequence_batching' scheduler"):
        planned(spec, model("a", sequences=sequences), model("b"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("response_cache { enable: true }", "Response Cache does not currently support model e with 'decoupled' trans"),
        (
            'parameters { key: "qinfer.split" value { string_value: "true" } }',
            "'qinfer.split' is not for models with 'decoupled",
        ),
    ],
)
def test_settings_that_decoupled_ensembles_can_not_have(settings: str, message: str) -> None:
    spec = normal(scheduling(FIRST, SECOND) + settings)

    with pytest.raises(ModelLoadFailed, match=message):
        planned(spec, model("a", decoupled=True), model("b"))


@pytest.mark.parametrize(
    ("shape", "rows", "dims", "batched", "expected"),
    [
        ((2,), 0, (2,), True, (1, 2)),
        ((3, 2), 0, (2,), True, (3, 2)),
        ((1, 2), 1, (2,), False, (2,)),
        ((1, 2), 1, (-1, 2), False, (1, 2)),
        ((3, 2), 3, (2,), False, (3, 2)),
        ((3, 2), 3, (2,), True, (3, 2)),
    ],
)
def test_shapes_between_models_with_and_without_batches(
    shape: tuple[int, ...],
    rows: int,
    dims: tuple[int, ...],
    batched: bool,  # noqa: FBT001 - a parameter of the test
    expected: tuple[int, ...],
) -> None:
    assert fit(shape, rows, dims, batched=batched) == expected
