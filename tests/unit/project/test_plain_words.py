"""`scripts.plain_words`, which `make lint` runs: its patterns, its readers, and what it counts as one name."""

import pytest

from scripts.plain_words import Place, faults, lua_prose, markdown_prose, names_of, python_prose


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("What waits for a lane is refused.", "headless"),
        ("Refuses requests. Who has less than that is let in.", "headless"),
        ("Those that nobody", "vague"),
        ("It is no error, whoever asks.", "vague"),
        ("One reads, the others have none.", "vague"),
    ],
)
def test_a_headless_sentence_and_a_vague_word_are_faults(text: str, kind: str) -> None:
    counts, lines = faults([Place("a.py", 3, text)])

    assert counts[kind] == 1
    assert lines[0].startswith(f"a.py:3: {kind}: ")


@pytest.mark.parametrize(
    "text", ["What is a lane?", "That is why it waits here.", "The limit in bytes; 0 = none.", "Returns None."]
)
def test_questions_and_values_are_no_faults(text: str) -> None:
    assert faults([Place("a.py", 1, text)]) == ({}, [])


def test_every_kind_of_prose_is_read() -> None:
    python = '"""A module."""\n# a comment\nraise ValueError(f"no model {name} is there")\nkey = "one"\n'
    markdown = "A paragraph\nof two lines.\n\n```sh\nnot this\n```\n\n| a | table |\n"

    assert [place[1:] for place in python_prose("a.py", python)] == [
        (2, "a comment"),
        (1, "A module."),
        (3, "no model "),
        (3, " is there"),
    ]
    assert [place[1:] for place in lua_prose("a.lua", "local a = 1 -- one\nreturn a\n")] == [(1, "one")]
    assert next(place[1:] for place in markdown_prose("a.md", markdown)) == (1, "A paragraph\nof two lines.\n")


def test_methods_of_a_protocol_are_one_name() -> None:
    protocol = "class Sink(Protocol):\n    def put(self): ...\n"
    implementation = "class File:\n    def put(self): ...\n    def other(self): ...\n"
    sources = {"base.py": protocol, "a.py": implementation, "b.py": implementation}

    names = names_of(sources)

    assert names.functions == {"put": {"a protocol"}, "other": {"a.py", "b.py"}}
    assert names.doubled() == ["File"]
