"""Bulk scoring side by side: qinfer, the hand-written loop and Ray Data in turns, medians of the rounds.

python -m benchmarks.bulk.suite                     writes its section of RESULTS.md (about 15 minutes)
python -m benchmarks.bulk.suite --rows-share 0.05   a twentieth of the rows: prints, writes nothing
"""

import argparse
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pyarrow.parquet as pq

from benchmarks import environments, page, processes
from benchmarks.bulk.contestants import Contestant, Run, RunFailed, Task, hand_loop, ray_data, serving
from benchmarks.bulk.data import DATA_SETS, DataSet
from benchmarks.machine import describe
from benchmarks.models import MODELS, write_repository

WORK = environments.HERE / ".work" / "bulk"
BAR = 0.9
"""qinfer's rows per second, as a share of the hand-written loop's."""
STARTUP_BAR_S = 1.0


class Line(NamedTuple):
    """The medians of one contestant on one data set."""

    data: str
    contestant: str
    rates: list[float]
    startup_s: float
    cpu_s: float
    memory_bytes: int

    @property
    def rate(self) -> float:
        return median(self.rates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="qinfer,hand_loop,ray_data", help="contestants, with commas")
    parser.add_argument("--data", default=",".join(DATA_SETS), help="data sets, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows-share", type=float, default=1.0, help="of the rows; below 1 nothing is written")
    options = parser.parse_args()
    data_sets = [DATA_SETS[name] for name in options.data.split(",")]
    with processes.alone(WORK):
        runs = measure(data_sets, options.only.split(","), options.rounds, options.rows_share)
    lines = [_line(data, name, rows, results) for (data, name, rows), results in runs.items()]
    text = table(lines)
    print(text)
    if options.rows_share == 1.0 and len(runs) == len(DATA_SETS) * 3:
        page.write("bulk", section(text, options.rounds), describe())
    return 0


Key = tuple[str, str, int]


def measure(data_sets: Sequence[DataSet], names: Sequence[str], rounds: int, share: float) -> dict[Key, list[Run]]:
    """Runs everybody in turns, the data set outermost: its files stay in the page cache for all."""
    runs: dict[Key, list[Run]] = defaultdict(list)
    with serving(WORK, [data.model for data in data_sets], {data.model: data.batch for data in data_sets}) as qinfer:
        contestants: Mapping[str, Contestant] = {"qinfer": qinfer, "hand_loop": hand_loop, "ray_data": ray_data}
        for data in data_sets:
            rows = int(data.rows * share)
            files = data.write(WORK, rows)
            model_file = write_repository(MODELS[data.model], WORK / "peers")
            for number in range(rounds):
                order = [*names[number % len(names) :], *names[: number % len(names)]]
                for name in order:
                    out = WORK / "out"
                    shutil.rmtree(out, ignore_errors=True)
                    out.mkdir()
                    task = Task(data=data, model_file=model_file, files=files, out=out, batch=data.batch)
                    run = contestants[name](task)
                    check(out, rows)
                    runs[data.name, name, rows].append(run)
                    print(f"{data.name} round {number + 1} {name}: {rows / run.seconds:,.0f} rows/s", flush=True)
    return runs


def check(out: Path, rows: int) -> None:
    """Counts the output's rows: a contestant that wrote fewer or more has not done the job."""
    written = sum(pq.read_metadata(path).num_rows for path in out.rglob("*.parquet"))
    if written != rows:
        raise RunFailed(f"{written:,} rows were written instead of {rows:,}")


def _line(data: str, name: str, rows: int, runs: Sequence[Run]) -> Line:
    return Line(
        data,
        name,
        [rows / run.seconds for run in runs],
        median(run.startup_s for run in runs),
        median(run.cpu_s for run in runs) / rows,
        max(run.memory_bytes for run in runs),
    )


def table(lines: Sequence[Line]) -> str:
    """Returns the figures and the verdicts as Markdown."""
    by_name = {(line.data, line.contestant): line for line in lines}
    text = [
        "| data | who | rows/s | slowest … fastest | x hand loop | start-up s | CPU µs a row | largest process MiB |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    verdicts = []
    for line in lines:
        hand = by_name.get((line.data, "hand_loop"))
        share = f"{line.rate / hand.rate:.2f}" if hand else "-"
        cpu = f"{line.cpu_s * 1e6:.2f}" if line.cpu_s else "-"
        memory = f"{line.memory_bytes / 2**20:.0f}" if line.memory_bytes else "-"
        spread = f"{min(line.rates):,.0f} … {max(line.rates):,.0f}"
        text.append(
            f"| {line.data} | {line.contestant} | {line.rate:,.0f} | {spread} | {share} | {line.startup_s:.2f} "
            f"| {cpu} | {memory} |"
        )
        if line.contestant == "qinfer" and hand:
            ok = line.rate >= BAR * hand.rate
            verdicts.append(f"- {'PASS' if ok else 'MISS'}: {line.data} {share} of the hand loop, at least {BAR}")
            ok = line.startup_s <= STARTUP_BAR_S
            verdicts.append(
                f"- {'PASS' if ok else 'MISS'}: {line.data} start-up {line.startup_s:.2f} s, at most {STARTUP_BAR_S} s"
            )
    return "\n".join([*text, "", *verdicts, ""])


def section(text: str, rounds: int) -> str:
    """Returns the section of RESULTS.md."""
    return (
        "Made by `make bench-bulk`: rows per second from the first to the last row, with writing, two scoring "
        f"processes each, medians of {rounds} rounds in turns; Parquet in and out on a local disk. `scalars`: 5M rows "
        "of 16 float columns, model 16→64→8. `lists`: 1M rows of 512 floats, model 512→2048→2048→256. qinfer also "
        f"writes where each row came from, and its error columns; the others write the output only.\n\n{text}"
    )


if __name__ == "__main__":
    sys.exit(main())
