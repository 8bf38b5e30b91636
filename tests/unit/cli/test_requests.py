"""`qinfer requests`: its filters."""

from qinfer.cli.requests import read_filters


def test_omitted_options_choose_all_and_zero_seconds_none() -> None:
    omitted = {"model": "", "version": 0, "state": None, "older_than": 0.0}

    assert read_filters({**omitted, "newer_than": None}) == {}
    assert read_filters({**omitted, "newer_than": 0.0}) == {"newer_than_s": 0.0}
