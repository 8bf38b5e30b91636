"""What a tenant may read and write of the stores: by settings, by text, and by where links in directories lead."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from qinfer.core.settings import StoreSettings, TenantStores
from qinfer.core.store_urls import UrlGrant, folders_of, is_below
from qinfer.errors import Forbidden
from qinfer.storage.open import readable, writable

ALLOW = ("s3://data", "file:///srv/lake")


def test_without_tenants_all_that_is_allowed_is_granted() -> None:
    assert StoreSettings(allow=ALLOW).grant_of("") == UrlGrant(ALLOW, ALLOW)


def test_one_tenant_has_all_that_is_allowed() -> None:
    """Its keys are there to keep strangers out."""
    assert StoreSettings(allow=ALLOW).grant_of("acme") == UrlGrant(ALLOW, ALLOW)


def test_each_of_several_tenants_has_a_folder_of_its_name() -> None:
    folders = ("s3://data/acme", "file:///srv/lake/acme")

    assert StoreSettings(allow=ALLOW).grant_of("acme", is_shared=True) == UrlGrant(folders, folders, "acme")


def test_an_entry_says_what_its_tenant_may_use() -> None:
    entry = {"read": ["s3a://data/common/", "s3://data/acme"], "write": ["s3://data/acme/out"]}
    stores = StoreSettings(allow=ALLOW, tenants={"acme": TenantStores.model_validate(entry)})

    for is_shared in (False, True):
        grant = stores.grant_of("acme", is_shared=is_shared)
        assert grant == UrlGrant(("s3://data/common", "s3://data/acme"), ("s3://data/acme/out",), "acme")


def test_an_entry_allows_nothing_beyond_the_allowed_stores() -> None:
    """The narrower of two prefixes counts, and one that meets none is nothing."""
    entry = TenantStores(read=("s3://data", "s3://other"), write=("file:///srv",))
    stores = StoreSettings(allow=("s3://data/in", "file:///srv/lake"), tenants={"acme": entry})

    assert stores.grant_of("acme") == UrlGrant(("s3://data/in",), ("file:///srv/lake",), "acme")


def test_a_prefix_that_is_no_url_is_refused_at_the_start() -> None:
    with pytest.raises(ValidationError, match="credentials"):
        TenantStores(read=("s3://key:secret@data/in",))


@pytest.mark.parametrize("tenant", ["", ".", ".."])
def test_no_folder_has_the_name_of_a_way_up(tenant: str) -> None:
    assert folders_of(tenant, ALLOW) == ()


def test_a_store_within_another_one_has_no_folders_of_tenants() -> None:
    """`s3://data/acme/other` would be in the folder of acme."""
    assert folders_of("other", ("s3://data/acme", "s3://data")) == ("s3://data/other",)
    assert folders_of("other", ("file:///",)) == ("file:///other",)


def test_what_a_process_grants_is_narrowed_to_what_another_one_does() -> None:
    granted = UrlGrant(("s3://data/acme", "s3://old"), ("s3://data",), "acme")

    assert granted.narrowed(UrlGrant(("s3://data",), ("s3://data/acme",))) == UrlGrant(
        ("s3://data/acme",), ("s3://data/acme",), "acme"
    )


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("s3://data/acme", True),
        ("s3://data/acme/x.parquet", True),
        ("s3://data/acme/a b?#%2e/x", True),
        ("s3://data/acme//x", True),
        ("s3://data/acme-2/x", False),
        ("s3://data/acme/../other/x", False),
        ("s3://data/acme/./x", False),
        ("s3://data/other/acme", False),
        ("gs://data/acme/x", False),
    ],
)
def test_objects_are_below_a_prefix_by_whole_parts_of_their_names(url: str, allowed: bool) -> None:  # noqa: FBT001
    assert is_below(url, "s3://data/acme") is allowed


class Lake:
    """A directory with the folders of two tenants, and ways from one into the other."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}/lake"
        for name in ("acme", "other"):
            (folder / "lake" / name / "out").mkdir(parents=True)
            (folder / "lake" / name / "x.parquet").touch()
        (folder / "lake" / "acme-2").mkdir()
        (folder / "lake" / "other" / "folder").symlink_to("../acme")
        (folder / "lake" / "other" / "file").symlink_to("../acme/x.parquet")
        (folder / "lake" / "other" / "own").symlink_to("out")
        (folder / "linked").symlink_to("lake")
        self.linked = f"file://{folder}/linked"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "acme/x.parquet",
        "acme",
        "acme-2",
        "",
        "other/folder/x.parquet",
        "other/folder/new/deep",
        "other/file",
        "other/a\0b",
    ],
)
def test_what_leads_out_of_the_prefixes_is_refused(lake: Lake, path: str) -> None:
    """By a link too, and where nothing is yet."""
    own = (f"{lake.url}/other",)
    for stores in (readable(UrlGrant(own, (), "other")), writable(UrlGrant((), own, "other"))):
        with pytest.raises(Forbidden, match=r"tenant 'other' may (read|write); .* QINFER_STORES__TENANTS"):
            stores(f"{lake.url}/{path}".rstrip("/"))


@pytest.mark.parametrize("path", ["other", "other/x.parquet", "other/own/part-0", "other/new/deep"])
def test_what_stays_within_the_prefixes_is_opened(lake: Lake, path: str) -> None:
    """Whichever way is taken there: the prefix may be a link itself."""
    own = (f"{lake.linked}/other",)

    for base in (lake.url, lake.linked):
        assert readable(UrlGrant(own, ()))(f"{base}/{path}")


def test_nothing_leads_into_a_folder_that_is_denied(tmp_path: Path) -> None:
    """Neither by name nor by a link, in an allowed folder; a URL of another kind of store is compared as text."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (tmp_path / "way").symlink_to(secret)
    places = (f"file://{tmp_path}", "s3://data")
    grant = UrlGrant(places, places, deny=(f"file://{secret}", "s3://data/secret"))

    for opened in (readable(grant), writable(grant)):
        for url in (f"file://{secret}/x", f"file://{tmp_path}/way/x", f"file://{secret}", "s3://data/secret/x"):
            with pytest.raises(Forbidden):
                opened.check(url)
        opened.check(f"file://{tmp_path}/secrets")
        opened.check("s3://data/secrets")
