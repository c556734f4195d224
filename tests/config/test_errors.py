"""What a file holds cannot command a terminal, nor pretend to be another line."""

import unicodedata

from titanlite.config.errors import CheckpointError, printable

BIDI_CONTROLS = {"LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def test_every_control_character_is_escaped_but_line_feed_and_tab():
    unsafe = ("Cc", "Cs", "Zl", "Zp")
    for code in range(0x110000):
        character = chr(code)
        if unicodedata.category(character) in unsafe or unicodedata.bidirectional(character) in BIDI_CONTROLS:
            shown = printable(character)
            assert shown == character if code in (9, 10) else shown.isascii() and shown.isprintable(), hex(code)


def test_ordinary_text_of_any_language_stays_and_twice_is_once():
    for text in (
        "Zürich, 東京, שלום, \U0001f469\u200d\U0001f680, a\tb\nc",
        r"C:\x1b",
        once := printable("\x1b[2J\u202e"),
    ):
        assert printable(text) == text
    assert str(CheckpointError("\x1b[2J\u202e")) == once == r"\x1b[2J\u202e"
