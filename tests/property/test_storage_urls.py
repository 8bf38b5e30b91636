"""URLs of stores, whatever they are: nothing outside a prefix is allowed, and nothing but qinfer's errors is raised."""

from urllib.parse import unquote

from hypothesis import assume, given
from hypothesis import strategies as st

from qinfer.core.store_urls import check_url
from qinfer.errors import Forbidden, InvalidRequest

PREFIX = "s3://bucket/allowed/here"
TRICKS = ("s3", "S3a", "file", "://", "/", "//", "..", ".", "@", ":", "::", "%2e", "%2f", "%5c", "\\", "?", "#", "*")
PIECES = st.sampled_from((*TRICKS, "bucket", "allowed", "here", "-x", "é", "x", " ", "\n"))
SEGMENT = st.text(st.characters(exclude_characters="/\\?%", min_codepoint=33, codec="utf-8"), min_size=1)


@given(
    st.one_of(
        st.lists(PIECES, max_size=12).map("".join), st.text(), st.lists(PIECES).map(lambda p: PREFIX + "".join(p))
    )
)
def test_what_is_allowed_is_within_the_prefix(url: str) -> None:
    try:
        spelled = check_url(url, [PREFIX])
    except (Forbidden, InvalidRequest):
        return

    assert spelled == PREFIX or spelled.startswith(PREFIX + "/")
    assert unquote(spelled) == spelled or ".." not in unquote(spelled).split("/")
    assert ".." not in spelled.split("/")
    assert check_url(spelled, [PREFIX]) == spelled


@given(st.lists(SEGMENT, max_size=5))
def test_every_plain_name_within_is_allowed(segments: list[str]) -> None:
    assume(not any(segment in ("", ".", "..") or "\x7f" in segment or "::" in segment for segment in segments))
    url = "/".join([PREFIX, *segments])
    assume(len(url) < 2000)

    assert check_url(url, [PREFIX]) == url
    assert check_url(url, ["s3://bucket"]) == url


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/"), min_size=1))
def test_a_longer_name_is_not_within(more: str) -> None:
    for url in (f"{PREFIX}{more}", f"s3://bucket{more}/allowed/here/x"):
        try:
            check_url(url, [PREFIX])
        except (Forbidden, InvalidRequest):
            continue
        raise AssertionError(url)
