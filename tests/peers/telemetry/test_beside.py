"""Words that come while a text is written never end up in it: on one terminal, in one file, or apart."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.telemetry.beside import Beside

COLUMNS = 12


class Terminal(io.StringIO):
    """What a person sees: lines that wrap as a terminal's do, with the few codes that Beside uses."""

    def __init__(self):
        super().__init__()
        self.rows, self.row, self.column = [[]], 0, 0

    def isatty(self):
        return True

    def write(self, text):
        for token in re.findall(r"\x1b\[\d*[A-Z]|.", text, re.DOTALL):
            self._take(token)
        return len(text)

    def _take(self, token):
        if token == "\n":
            self._down()
            self.column = 0
        elif token == "\r":
            self.column = 0
        elif token == "\x1b[2K":
            self.rows[self.row] = []
        elif token == "\x1b[A":
            self.row -= 1
        elif token.startswith("\x1b"):
            self.column = int(token[2:-1]) - 1
        else:
            self._put(token)

    def _put(self, character):
        if self.column == COLUMNS:
            self._down()
            self.column = 0
        row = self.rows[self.row]
        row += [" "] * (self.column + 1 - len(row))
        row[self.column] = character
        self.column += 1

    def _down(self):
        self.row += 1
        self.rows += [[]] * (self.row + 1 - len(self.rows))

    @property
    def seen(self):
        last = max((number for number, row in enumerate(self.rows) if row), default=-1)
        return ["".join(row) for row in self.rows[: last + 1]]


def alone(text):
    terminal = Terminal()
    terminal.write(text)
    return terminal.seen


@given(st.lists(st.text("ab \n", max_size=15), max_size=8), st.data())
def test_what_stands_on_a_terminal_in_the_end_is_the_text_alone(pieces, data):
    terminal = Terminal()
    out = Beside(terminal, terminal, COLUMNS)
    said = []
    for piece in pieces:
        out.write(piece)
        before = "".join(pieces[: len(said) + 1])
        said.append(piece)
        for _ in range(data.draw(st.integers(0, 2)) if before and not before.endswith("\n") else 0):
            out.notify("waiting", "waiting for a peer of stage 1")
    out.write(".")
    assert terminal.seen == alone("".join(pieces) + ".")


def test_words_stand_on_a_line_of_their_own_while_a_text_waits():
    terminal = Terminal()
    out = Beside(terminal, terminal, COLUMNS)
    out.notify("joined", "joined")
    out.write("def m")
    out.notify("waiting", "waiting for a peer of stage 1")
    assert terminal.seen == ["joined", "def m", "waiting for"]
    out.write("ain")
    assert terminal.seen == ["joined", "def main"]


@pytest.mark.parametrize("ends", [("text", "words"), ("one", "one")])
def test_apart_the_text_is_whole_and_in_one_file_words_have_lines_of_their_own(tmp_path, ends):
    with (tmp_path / ends[0]).open("a") as text, (tmp_path / ends[1]).open("a") as words:
        out = Beside(text, words, COLUMNS)
        out.write("def m")
        out.notify("waiting", "waiting")
        out.notify("waiting", "found")
        out.write("ain\n")
    if ends == ("one", "one"):
        assert (tmp_path / "one").read_text() == "def m\nwaiting\nfound\nain\n"
    else:
        assert (tmp_path / "text").read_text() == "def main\n"
        assert (tmp_path / "words").read_text() == "waiting\nfound\n"
