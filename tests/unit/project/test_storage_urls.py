"""Which stores requests may name: by the text of a URL, and against every trick that text can play."""

import pytest

from qinfer.core.settings import StoreSettings
from qinfer.core.store_urls import check_url, normalised
from qinfer.errors import Forbidden, InvalidRequest, SettingsError

ODD_NAMES = (
    *("größe 100.parquet", "x%2Fy", "a%20b", "50%", "50%25", "a#b", "a?b", "what?", "run[1]", "a*b", "a+b&c=d;e,f@g:h"),
    *("'a' \"b\"", "{a}|^~`$!(b)", "x%20", "?a=b"),
)
ALLOW = ("s3://data/in", "gs://lake", "file:///srv/data", "az://box/a", "abfss://box@acc.dfs.core.windows.net/a")


@pytest.mark.parametrize(
    ("url", "spelled"),
    [
        ("s3://data/in", "s3://data/in"),
        ("s3://data/in/", "s3://data/in"),
        ("s3://data/in/2026/x.parquet", "s3://data/in/2026/x.parquet"),
        ("s3://data/in/2026/*.parquet", "s3://data/in/2026/*.parquet"),
        ("S3A://data/in/x", "s3://data/in/x"),
        ("gcs://lake/x", "gs://lake/x"),
        ("gs://lake", "gs://lake"),
        ("file:///srv/data/x", "file:///srv/data/x"),
        ("local://localhost/srv/data/x", "file:///srv/data/x"),
        ("abfs://box/a/b", "az://box/a/b"),
        ("abfss://box@acc.dfs.core.windows.net/a/b", "abfss://box@acc.dfs.core.windows.net/a/b"),
        *(
            (f"{folder}/{name}", f"{folder}/{name}")
            for folder in ("s3://data/in", "file:///srv/data")
            for name in ODD_NAMES
        ),
    ],
)
def test_what_is_within_a_prefix_is_allowed_in_one_spelling(url: str, spelled: str) -> None:
    """The spelling is what is opened."""
    assert check_url(url, ALLOW) == spelled


@pytest.mark.parametrize(
    "url",
    [
        "s3://data/inside/x",
        "s3://data/in-2/x",
        "s3://data-2/in/x",
        "s3://data",
        "s3://Data/in/x",
        "s3://data/*/x",
        "s3://evil/data/in/x",
        "gs://data/in/x",
        "gs://lake.evil/x",
        "gs://lake:9000/x",
        "file:///srv/database/x",
        "file:///srv",
        "memory://data/in/x",
        "abfss://box@evil.dfs.core.windows.net/a/b",
        "abfs://box@acc.dfs.core.windows.net/a/b",
    ],
)
def test_what_only_looks_alike_is_not(url: str) -> None:
    """Nor another bucket, another scheme, or what is above."""
    with pytest.raises(Forbidden, match="QINFER_STORES__ALLOW"):
        check_url(url, ALLOW)


def test_nothing_is_allowed_by_default() -> None:
    """Stores are opened by the operator only."""
    with pytest.raises(Forbidden):
        check_url("s3://data/in/x", StoreSettings().allow)


@pytest.mark.parametrize(
    "url",
    [
        "s3://data/in/../secret",
        "s3://data/in/./x",
        "s3://data/in//x",
        "s3:///data/in/x",
        "s3://data/in/%2e%2e/x",
        "s3://data/in/%252e",
        "s3://data/in/%25252e",
        "s3://data/in/a%2F%2E./x",
        "s3://data/in/x%5cy",
        "s3://data/in/x%00",
        "s3://data\\in/x",
        "s3://data/in\\..\\x",
        "s3://key:secret@data/in/x",
        "s3://key@data/in/x",
        "s3://da*a/in/x",
        "s3://data/in/x?versionId=1",
        "s3://data/in/x?a=b&versionId=1",
        "az://box/a/x?versionid=1",
        "gs://lake/x?generation=1",
        "s3://data/in/x?X-Amz-Signature=1",
        "s3://data/in/x ",
        "s3:// data/in/x",
        "s3://data/in/x\n",
        " s3://data/in/x",
        "s3://data/in/x\x00",
        "simplecache::s3://data/in/x",
        "zip://x.csv::s3://data/in/x",
        "/srv/data/x",
        "srv/data/x",
        "file://srv/data/x",
        "file:/srv/data/x",
        "s3:data/in/x",
        "://data/in/x",
        "",
        "s3://" + "x" * 3000,
    ],
)
def test_what_could_mean_more_than_it_says_is_refused(url: str) -> None:
    """Even where the prefix of its text is allowed; everything is, here."""
    with pytest.raises(InvalidRequest):
        check_url(url, (*ALLOW, "file:///", "s3://data"))


def test_a_refusal_does_not_repeat_credentials() -> None:
    """Errors are logged."""
    with pytest.raises(InvalidRequest) as caught:
        check_url("s3://key:hunter2@data/in", ALLOW)

    assert "hunter2" not in caught.value.message
    with pytest.raises(InvalidRequest, match="'s3://data/in/x': a store's URL may hold no") as caught:
        check_url("s3://data/in/x?sig=hunter2", ALLOW)
    assert "hunter2" not in caught.value.message


def test_a_refusal_names_the_url() -> None:
    """A job has many."""
    with pytest.raises(InvalidRequest, match=r"'s3://data/in/\.\./x': a store's URL may not hold '\.\.'"):
        check_url("s3://data/in/../x", ALLOW)


def test_a_setting_is_checked_at_the_start() -> None:
    """And kept in its one spelling."""
    assert StoreSettings(allow=("S3A://data/in/",)).allow == ("s3://data/in",)
    with pytest.raises(ValueError, match=r"no URL of a store"):
        StoreSettings(allow=("data",))
    with pytest.raises(SettingsError, match="'::' chains"):
        normalised("zip::s3://x")
