"""The benchmark of sequences and streams, as short as can be: it shows that all of it runs, not how fast."""

from pathlib import Path

import pytest

from benchmarks import stateful
from benchmarks.results import Sample


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("group", stateful.GROUPS)
def test_a_visit_measures_every_case(group: str, tmp_path: Path) -> None:
    visit = stateful.Visit(
        group=group, server="qinfer", encodings=("json", "grpc"), number=1, seconds=0.2, warm_up_s=0.1
    )
    samples: list[Sample] = []

    stateful.visit(visit, tmp_path, samples.append)

    measured = {(sample.setting.model, sample.setting.encoding) for sample in samples}
    assert measured == {(case.name, encoding) for case in visit.cases for encoding in case.encodings}
    assert not [sample for sample in samples if sample.errors or not sample.cpu_us["gateway"]]
