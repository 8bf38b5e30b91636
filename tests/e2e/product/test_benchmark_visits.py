"""The benchmark of sequences and streams, as short as can be: it shows that all of it runs, not how fast."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import stateful
from benchmarks.measuring import Tally


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("group", stateful.GROUPS)
def test_a_group_measures_every_case(group: str, tmp_path: Path) -> None:
    whole = stateful.group(group, turns=1)
    ours = replace(whole, settings=tuple(one for one in whole.settings if one.server == "qinfer"))
    tally = Tally(planned=len(ours.settings), strict=False)

    stateful.measure(ours, tmp_path, (0.2, 0.1), tally, lambda _: None)

    assert [sample.setting for sample in tally.samples] == sorted(ours.settings, key=lambda one: one.encoding != "json")
    assert not [sample for sample in tally.samples if sample.errors or not sample.cpu_us["gateway"]]
