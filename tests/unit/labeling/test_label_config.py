"""Label configs: what is read of them, and what is refused."""

import pytest

from qinfer.errors import InvalidRequest
from qinfer.labeling.rules import MAX_CHARACTERS, Control, parse_label_config

CONFIG = """
<View>
  <!-- a comment, and a style --><Style>.a > .b { color: red }</Style>
  <Text name="text" value="$body"/><Image name="image" value="$picture.url"/>
  <Choices name="mood" toName="text" choice="multiple">
    <Choice value="Negative" alias="neg"/><View><Choice value="pos"/></View><Choice/>
  </Choices>
  <RectangleLabels name="box" toName="image,other"><Label value="a &amp; b"/></RectangleLabels>
  <Choices name="any" toName="text" value="$options"/>
  <Filter name="filter" toName="box"/>
</View>
"""


def test_controls_and_objects() -> None:
    """Labels belong to the control around them; an alias is what results hold."""
    config = parse_label_config(CONFIG)

    assert config.controls == {
        "mood": Control("mood", "choices", ("text",), ("neg", "pos"), is_multiple=True),
        "box": Control("box", "rectanglelabels", ("image", "other"), ("a & b",)),
        "any": Control("any", "choices", ("text",), is_dynamic=True),
    }
    assert config.objects == {"text": "body", "image": "picture.url"}


@pytest.mark.parametrize("xml", ["", " \n", "<View></View>"])
def test_a_project_without_controls(xml: str) -> None:
    """A new project has none."""
    assert parse_label_config(xml).controls == {}


def test_a_declared_encoding_is_that_of_a_file() -> None:
    """The text came as text."""
    config = parse_label_config('<?xml version="1.0" encoding="latin-1"?><Text name="é" value="$t"/>')

    assert config.objects == {"é": "t"}


BOMB = '<!DOCTYPE a [<!ENTITY x "{}"><!ENTITY y "&x;&x;">]><View>&y;</View>'


@pytest.mark.parametrize(
    ("xml", "said"),
    [
        ("<View>", "not XML: no element found"),
        ("{}", "not XML"),
        (BOMB.format("x" * 1000), "has a DTD"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>', "has a DTD"),
        ("<a>&x;</a>", "undefined entity"),
        ("<a>" * 200, "too large"),
        ("<a>" + "<b/>" * 60_000 + "</a>", "too large"),
        (" " * (MAX_CHARACTERS + 1), f"{MAX_CHARACTERS + 1} characters"),
        ("<a>\ud800</a><b/>", "not XML: junk after document element"),
    ],
)
def test_what_is_refused(xml: str, said: str) -> None:
    """Nothing of it is expanded, fetched or crashed by."""
    with pytest.raises(InvalidRequest, match=said):
        parse_label_config(xml)
