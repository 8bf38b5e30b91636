"""`qinfer compare`: two targets score the same rows as bulk jobs, and are compared."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.console import (
    DEFAULT_URL,
    FAILED,
    CommandFailed,
    JsonOption,
    Options,
    UrlOption,
    gateway_client,
    option,
    show,
    table,
    with_options,
)
from qinfer.cli.jobs.jobs import INPUT_OPTIONS, InputsArgument, job_options, pairs
from qinfer.cli.jobs.waiting import BY_SIGNAL, StopSignals, WaitInterrupted
from qinfer.errors import InvalidRequest, QinferError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qinfer.cli.jobs.output_rows import Comparison
    from qinfer.client import Client, Job, JobStatus
    from qinfer.client.job_flows import JobOptions
    from qinfer.traffic.differences import Rule

EXAMPLE = "Example: qinfer compare digits:3 digits:4 data/rows.parquet --sample 10000 --column image=pixels --key id"

Target = tuple[str, int]
"""A model and a version; 0 = the highest ready version."""

_RULES = ("argmax", "equal", "within")

StableArgument = Annotated[
    str, typer.Argument(metavar="STABLE", help="MODEL:VERSION to compare with, or MODEL: its highest ready version.")
]
CanaryArgument = Annotated[
    str, typer.Argument(metavar="CANARY", help="The target to compare with STABLE, in the same form.")
]
_share = partial(option, float, min=0)
COMPARE_OPTIONS: Options = {
    "sample": option(int, 10_000, "Number of first rows to compare; 0: all.", min=0),
    "agree": option(
        list[str] | None,
        None,
        "OUTPUT=argmax, equal or within: when rows agree. Default: equal for texts and whole numbers, argmax for "
        "vectors of floats, within the tolerance for other floats.",
    ),
    "tolerance": _share(1e-6, "The distance up to which floats are within the tolerance."),
    "relative": _share(1e-5, "A tolerance as a share of STABLE's value, added to --tolerance."),
    "allow": _share(0.0, "The share of rows that may differ; more is exit code 1.", max=1),
    "show_rows": option(int, 5, "Number of most different rows to show for each output.", "--show", min=0),
    "redact": option(bool, False, "Show no values of these rows.", "--redact"),
    "output": option(
        str, "", "The folder for the jobs' outputs; default: _compare beside the first input.", "--output", "-o"
    ),
}


@with_options(INPUT_OPTIONS, COMPARE_OPTIONS)
def compare(
    stable: StableArgument,
    canary: CanaryArgument,
    inputs: InputsArgument,
    *,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Compare two versions of a model, or two models, on files, before either gets requests.

    Both score the same rows as bulk jobs, whose outputs stay in the output folder; it is replaced by the next
    comparison of the same targets. Ctrl-C cancels the jobs.

    Exit codes: 0 the rows agree, except for the share of --allow; 1 more of them differ, or a job has failed; 64 wrong
    usage or a refused job; 66 no such input; 69 the server can't be reached or is overloaded; 130, 143 signals
    """
    try:
        from qinfer.cli.jobs.output_rows import JobRows, OutputComparison
    except ImportError:
        raise CommandFailed("reading a job's output needs pyarrow: pip install 'qinfer-ml[bulk]'") from None
    from qinfer.traffic.differences import Rule

    targets = [read_target(stable), read_target(canary)]
    if targets[0] == targets[1]:
        raise InvalidRequest(f"'{stable}' would be compared with itself; name two versions, such as digits:3 digits:4")
    how = {name: given.pop(name) for name in COMPARE_OPTIONS}
    rules = read_rules(how["agree"], Rule(tolerance=how["tolerance"], relative=how["relative"]))
    with gateway_client(url) as client:
        outputs, others = _outputs(client, targets, given["tensors"] or [], rules)
        options: JobOptions = {**job_options(given), "limit": how["sample"], "error_threshold": -1, "overwrite": True}
        done = _scored(client, targets, inputs, how["output"] or beside(inputs[0]), options)
    comparison = OutputComparison(outputs, rules, how["show_rows"], redact=how["redact"])
    comparison.read(*(JobRows(status.output_url) for status in done))
    labels = [f"{status.model}:{status.version}" for status in done]
    found = comparison.result(labels[0], labels[1], others, how["allow"])
    show(found, lambda: _view(found), as_json=as_json)
    if found.differ:
        raise typer.Exit(FAILED)


def read_target(text: str) -> Target:
    """Reads `MODEL:VERSION` or `MODEL`; version 0 = the highest ready version."""
    name, colon, version = text.rpartition(":")
    if not (colon and version.isascii() and version.isdecimal() and len(version) < 20):
        name, version = text, "0"
    if not name:
        raise InvalidRequest(f"'{text}' names no model; expected MODEL:VERSION, such as digits:3")
    return name, int(version)


def read_rules(agree: Sequence[str] | None, rule: "Rule") -> dict[str, "Rule"]:
    """Reads `--agree`: output → its rule; "" → the rule of all other outputs."""
    import msgspec

    rules = {"": rule}
    for output, by in pairs("--agree", agree).items():
        if by not in _RULES:
            raise InvalidRequest(f"--agree '{output}={by}' can't be read; expected {', '.join(_RULES)}")
        rules[output] = msgspec.structs.replace(rule, agree=by)
    return rules


def beside(location: str) -> str:
    """Returns the folder `_compare` beside the inputs."""
    fixed = re.split(r"[*\[]", location, maxsplit=1)[0]
    folder, slash, _ = fixed.rstrip("/").rpartition("/") if fixed == location else fixed.rpartition("/")
    if "**" in location:
        folder, slash, _ = folder.rpartition("/")
    return f"{folder}{slash}_compare"


def _outputs(
    client: "Client", targets: Sequence[Target], wanted: Sequence[str], rules: Mapping[str, "Rule"]
) -> tuple[list[str], list[str]]:
    known = [[one.name for one in client.metadata(model, version or None).outputs] for model, version in targets]
    common = [name for name in known[0] if name in known[1]]
    has = f"both have the outputs: {', '.join(common) or 'none'}"
    if not common:
        raise InvalidRequest(f"the two can't be compared; {has}")
    if unknown := sorted({*wanted, *rules} - {"", *common}):
        raise InvalidRequest(f"'{unknown[0]}' can't be compared; {has}")
    return list(wanted) or common, [] if wanted else sorted({*known[0]} ^ {*known[1]})


def _scored(
    client: "Client", targets: Sequence[Target], inputs: Sequence[str], folder: str, options: "JobOptions"
) -> list["JobStatus"]:
    """Cancels the jobs after an error or a signal."""
    jobs: list[Job] = []
    done: list[JobStatus] = []
    with StopSignals(wanted=True) as stop:
        try:
            for model, version in targets:
                to = f"{folder.rstrip('/')}/{model}-{version or 'latest'}"
                of_target: JobOptions = {**options, "version": version}
                jobs.append(client.submit_job(model, inputs, to, **of_target))
            stop.release()
            for job in jobs:
                done.append(job.wait(progress=True))
                if done[-1].state != "completed":
                    raise CommandFailed(f"job {job.id} is {done[-1].state}: {done[-1].error or 'it was ended'}")
        except (QinferError, WaitInterrupted) as error:
            for job in jobs[len(done) :]:
                with suppress(QinferError):
                    job.cancel()
            if isinstance(error, WaitInterrupted):
                raise typer.Exit(BY_SIGNAL + error.signum) from None
            raise
    return done


def _view(found: "Comparison") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    outputs = [
        (
            *(one.output, one.by or "-", f"{one.agreement:.2%}", f"{one.rows - one.agreeing:,} of {one.rows:,}"),
            *(_number(one.mean), _number(one.largest) + (f", {one.unmeasured:,} none" if one.unmeasured else "")),
        )
        for one in found.outputs
    ]
    title = f"{found.canary} compared with {found.stable}"
    parts: list[RenderableType] = [table(title, "output, by, agreement>, differ>, mean>, max>", outputs)]
    if found.samples:
        samples = [(one.output, one.row, one.stable, one.canary, _number(one.distance)) for one in found.samples]
        columns = f"output, row, {found.stable}, {found.canary}, distance>"
        parts.append(table("The rows in which each output differs most", columns, samples))
    if found.others:
        parts.append(Text(f"not compared, because only one target has it: {', '.join(found.others)}", style="yellow"))
    if any(found.failed.values()):
        counts = ", ".join(f"{count:,} by {name}" for name, count in found.failed.items() if count)
        parts.append(Text(f"rows that could not be scored: {counts}", style="yellow"))
    share = found.differing / found.rows if found.rows else 0.0
    line = f"{found.differing:,} of {found.rows:,} rows differ ({share:.2%}); {found.allowed:.2%} may"
    parts.append(Text(line, style="red" if found.differ else "green"))
    return Group(*parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
