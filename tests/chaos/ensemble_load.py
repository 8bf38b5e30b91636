"""Ensembles under faults: those that clients ask for sums, as they ask models, and one that keeps a sum for each.

    fast   same ─┐
           same ─┴▶ plus            three steps, two of them side by side
    slow   late ─▶ pair ─▶ same     `late` takes a while that a kill can fall into, `pair` is an ensemble
    kept   twice ─▶ total ─▶ half   `total` is stateful

What the callers see is judged as that of models is: an ensemble is asked as any model.
"""

from collections.abc import Sequence as Items
from pathlib import Path

from onnx import helper

from tests.chaos import sequence_load, verdict
from tests.chaos.load import FAST, SLOW
from tests.chaos.repository import write_stub
from tests.chaos.verdict import Ledger, Verdict
from tests.support import models
from tests.support.ensembles import scale

KEPT = "kept"

_IDLE = "max_sequence_idle_microseconds: 120000000"

_PORT = '{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 1 ] }}'

Step = tuple[str, dict[str, str], dict[str, str]]


def write_models(repository: Path, delay_s: float = 0.2) -> tuple[str, ...]:
    """Writes the ensembles and their models; returns the names of all."""
    for name, factor in (("same", 1.0), ("twice", 2.0), ("half", 0.5)):
        scale(repository, name, factor, width=1)
    plus = [helper.make_node("Add", ["a", "b"], ["sum"])]
    models.write(repository, "plus", plus, [("a", "FP32", (1,)), ("b", "FP32", (1,))], [("sum", "FP32", (1,))])
    write_stub(repository, "late", delay_s=delay_s, max_batch_size=4)
    models.accumulator(repository, "total", strategy="oldest { max_candidate_sequences: 400 }", more=_IDLE)
    same = "same", {"x": "x"}, {"y": "m"}
    _write(repository, "pair", "x", "y", same, ("same", {"x": "m"}, {"y": "y"}))
    sides = ("same", {"x": "a"}, {"y": "l"}), ("same", {"x": "b"}, {"y": "r"})
    _write(repository, FAST, "ab", "sum", *sides, ("plus", {"a": "l", "b": "r"}, {"sum": "sum"}))
    late = "late", {"a": "a", "b": "b"}, {"sum": "m"}
    _write(repository, SLOW, "ab", "sum", late, ("pair", {"x": "m"}, {"y": "n"}), ("same", {"x": "n"}, {"y": "sum"}))
    total = "total", {"INPUT": "d"}, {"OUTPUT": "s"}
    _write(repository, KEPT, "x", "y", ("twice", {"x": "x"}, {"y": "d"}), total, ("half", {"x": "s"}, {"y": "y"}))
    return "same", "twice", "half", "plus", "late", "total", "pair", FAST, SLOW, KEPT


def _write(repository: Path, name: str, inputs: str, output: str, *steps: Step) -> None:
    lines = [f'name: "{name}" platform: "ensemble" max_batch_size: 4']
    lines += [_PORT.format(kind="input", name=one) for one in inputs]
    lines += [_PORT.format(kind="output", name=output), "ensemble_scheduling {"]
    for model, taken, made in steps:
        maps = [("input_map", *pair) for pair in taken.items()] + [("output_map", *pair) for pair in made.items()]
        text = " ".join(f'{field} {{ key: "{key}" value: "{value}" }}' for field, key, value in maps)
        lines.append(f'  step {{ model_name: "{model}" model_version: -1 {text} }}')
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text("\n".join([*lines, "}"]))


def judge(ledger: Ledger, sequences: Items[sequence_load.Told], *, kills: int, dead_letters: int) -> Verdict:
    """Counts, and says what is wrong: each request ends once, with the right answer, and no sequence is lost.

    Args:
        ledger: What the callers of `fast` and `slow` have seen.
        sequences: What those of `kept` have.
        kills: Processes that were killed.
        dead_letters: Entries that were buried.
    """
    sums = verdict.judge(ledger, kills=kills, dead_letters=dead_letters)
    kept = sequence_load.judge(sequences, handed_over=0, kills=kills, models=(KEPT,))
    seen, told = _counts(sums.line), _counts(kept.line)
    right = seen["succeeded"] + told["steps"] - told["wrong"]
    wrong = seen["duplicates"] + seen["failed"] + told["wrong"] + len(ledger.problems)
    line = (
        f"ensembles: requests={seen['accepted'] + told['steps']} right={right} expired={seen['expired']} "
        f"cancelled={seen['cancelled']} sequences={told['sequences']} lost={seen['lost'] + told['lost']} "
        f"wrong={wrong} kills={kills}"
    )
    return Verdict(line, sums.problems + kept.problems)


def _counts(line: str) -> dict[str, int]:
    return {name: int(count) for name, count in (word.split("=") for word in line.split())}
