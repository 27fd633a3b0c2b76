"""Text of generated tokens, piece by piece, up to a stop string."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from pace.llm.sequence import PLAIN_TEXT, Sequence, TextRules
from pace.llm.text.detokenizer import Detokenizer, hidden_tokens
from pace.llm.text.token_bytes import TokenBytes


class TextReader:
    """Text of one row of tokens: no partial characters, and nothing of a stop string or after it.

    Text that may turn out to begin a stop string is held back until that is known. Without a tokenizer there is no
    text.
    """

    def __init__(self, tokenizer: Any, strings: list[str] | None = None, rules: TextRules = PLAIN_TEXT) -> None:
        self.tokenizer = tokenizer
        self.strings = strings or []
        self.rules = rules
        self._search = StopSearch(tokenizer, self.strings, rules)
        self._tokens: list[int] = []
        self._restart()

    def _restart(self) -> None:
        self.cut: int | None = None
        """Position of the first stop string in the text."""
        self.matched: str | None = None
        """The stop string found there."""
        self.piece = ""
        """Text that the last tokens made certain, except for stop strings."""
        self._detokenizer = Detokenizer(self.tokenizer, self.rules)
        self._num_searched = 0
        """Number of tokens searched so far."""
        self._begin = 0
        """Start of the next search in the text."""
        self._marks: tuple[tuple[int, int, str], ...] = ()
        """Number, text position and letter of hidden tokens."""
        self._num_shown = 0

    def fresh(self) -> TextReader:
        """Returns a reader of the same row, from its beginning."""
        return TextReader(self.tokenizer, self.strings, self.rules)

    def fork(self) -> TextReader:
        """Returns the reader of a second row with the same tokens."""
        fork = copy.copy(self)
        fork._tokens, fork._detokenizer = list(self._tokens), self._detokenizer.fork()
        return fork

    # -- text to show --------------------------------------------------------------------------------------------------

    def push(self, token: int) -> str:
        """Takes a token and returns the text that it makes certain, which may be ""."""
        return self.extend([token])

    def extend(self, tokens: list[int]) -> str:
        """Takes several tokens at the cost of one. Returns the joined results of `push` for each."""
        self._tokens += tokens
        self.search(tokens)
        if self.strings:
            return self._show(is_ended=False)
        self._num_shown += len(self.piece)
        return self.piece

    def flush(self) -> str:
        """Returns the rest, at the end of the row."""
        self.piece = self._detokenizer.flush()
        return self._show(is_ended=True)

    def rollback(self, num_tokens: int) -> int:
        """Drops the last tokens. Returns the number of characters that are removed with them."""
        tokens, num_before = self._tokens[: len(self._tokens) - num_tokens], self._num_shown
        self._tokens = []
        self._restart()
        for token in tokens:
            self.push(token)
        return num_before - self._num_shown

    @property
    def shown(self) -> str:
        """All text shown so far."""
        return self._detokenizer.text[: self._num_shown]

    def text_of(self, tokens: list[int]) -> str:
        """Returns the whole text of the row's `tokens`, up to a stop string. Tokens that this reader has already taken
        must be the first ones; they are not decoded again."""
        return self._detokenizer.text_after(tokens[self._detokenizer.num_pushed :])[: self.cut]

    def _show(self, is_ended: bool) -> str:
        text, begin = self._detokenizer.text, self._num_shown
        if self.cut is not None:
            end = min(self.cut, len(text))
        elif is_ended:
            end = len(text)
        else:
            end = len(text) - self._search.num_open(text[begin:], self._marks_from(begin, len(text)))
        self._num_shown = end
        return text[begin:end]

    # -- the search for stop strings -----------------------------------------------------------------------------------

    def follow(self, sequence: Sequence) -> None:
        """Searches the generated tokens that are new since the last call, up to a stop string. Can be interrupted
        anywhere and called again."""
        while self.cut is None and self._num_searched < sequence.num_generated:
            self.search([sequence.tokens[sequence.num_prompt_tokens + self._num_searched]])

    def rewind(self, num_tokens: int) -> None:
        """Restarts the search if it has read more than `num_tokens` tokens; the next `follow` reads them again."""
        if num_tokens < self._detokenizer.num_pushed:
            self._restart()

    def search(self, tokens: list[int]) -> None:
        """Takes tokens and looks for a stop string, also in text whose end may still change. If it was interrupted, it
        may be called again with the same tokens."""
        if self.tokenizer is None:
            self._num_searched += len(tokens)
            return
        if self._search.wants_marks and len(tokens) > 1:
            for token in tokens:
                self.search([token])
            return
        if self._detokenizer.num_pushed == self._num_searched:
            self.piece = self._detokenizer.extend(tokens)
        if self.strings and self.cut is None:
            text = self._detokenizer.text
            unseen = text[self._begin :] + self._detokenizer.pending
            end = self._begin + len(unseen)
            if letter := self._search.letter_of(tokens[0]):
                before = [mark for mark in self._marks if mark[0] < self._num_searched]
                self._marks = (*before, (self._num_searched, end, letter))[-self._search.longest :]
            found = self._search.find(unseen, self._marks_from(self._begin, end))
            if found is not None:
                self.cut, self.matched = self._begin + found[0], found[1]
            self._begin = max(0, len(text) - self._search.longest + 1)
        self._num_searched += len(tokens)

    def _marks_from(self, begin: int, end: int) -> Marks:
        if not self._marks:
            return ()
        return tuple([(place - begin, letter) for _, place, letter in self._marks if begin <= place <= end])

    @property
    def certain(self) -> str:
        """Text that later tokens do not change, with stop strings."""
        return self._detokenizer.text

    @property
    def pending(self) -> str:
        """Text after `certain`; its end may still change."""
        return self._detokenizer.pending


def find_first(text: str, strings: Iterable[str]) -> tuple[int, str] | None:
    """Returns the position of the first of some strings in `text`, and that string."""
    found = None
    for string in strings:
        index = text.find(string)
        if index >= 0 and (found is None or index < found[0]):
            found = index, string
    return found


Marks = tuple[tuple[int, str], ...]
"""Positions in a text, in order, and the letter that stands for a hidden token there."""
FIRST_LETTER, OTHER_LETTER = 0xF0000, "\U0010ffff"
"""Private-use characters, which no text contains."""


class StopSearch:
    """Searches for stop strings in a text. A string may name hidden tokens, which are not part of the text, for example
    "<|im_end|>" or "\\n</s>". Each hidden token is then represented by one letter, in the string and in the text."""

    def __init__(self, tokenizer: Any, strings: list[str], rules: TextRules = PLAIN_TEXT) -> None:
        self.strings = strings
        self.longest = max(map(len, strings), default=0)
        self._hidden, table = hidden_tokens(tokenizer, rules), TokenBytes.of(tokenizer)
        joined = "\0".join(strings)
        hidden = self._hidden if strings else ()
        named = {token: name for token in hidden if (name := table.text(token)) and name in joined}
        names = sorted(set(named.values()), key=len, reverse=True)
        letters = {name: chr(FIRST_LETTER + number) for number, name in enumerate(names)}
        self._letters = {token: letters[name] for token, name in named.items()}
        self._lettered = {
            _replaced(string, letters): string for string in strings if _replaced(string, letters) != string
        }

    @property
    def wants_marks(self) -> bool:
        """True if a string names a hidden token."""
        return bool(self._letters)

    def letter_of(self, token: int) -> str | None:
        """Returns the letter of a hidden token; None for other tokens, and if no string names one."""
        if not self._letters:
            return None
        return self._letters.get(token, OTHER_LETTER if token in self._hidden else None)

    def find(self, text: str, marks: Marks = ()) -> tuple[int, str] | None:
        """Returns the position of the first stop string in `text`, and that string."""
        found = find_first(text, self.strings)
        lettered = _with_letters(text, marks) if marks else ""
        for pattern, string in self._lettered.items() if marks else ():
            index = lettered.find(pattern)
            place = index - _num_letters(marks, index)
            if index >= 0 and (found is None or place < found[0]):
                found = place, string
        return found

    def num_open(self, text: str, marks: Marks = ()) -> int:
        """Returns the number of last characters that may turn out to begin a stop string."""
        num_open = _longest_beginning(text, self.strings)
        if marks and self._lettered:
            lettered = _with_letters(text, marks)
            length = _longest_beginning(lettered, self._lettered)
            num_open = max(num_open, length - len(marks) + _num_letters(marks, len(lettered) - length))
        return num_open


def _replaced(string: str, letters: dict[str, str]) -> str:
    for name, letter in letters.items():
        string = string.replace(name, letter)
    return string


def _with_letters(text: str, marks: Marks) -> str:
    edges = [0, *(place for place, _ in marks), len(text)]
    parts = [text[begin:end] for begin, end in zip(edges, edges[1:])]
    return parts[0] + "".join([letter + part for (_, letter), part in zip(marks, parts[1:])])


def _num_letters(marks: Marks, index: int) -> int:
    """Returns the number of letters that `_with_letters` has inserted before an index of its result."""
    return sum(place + number < index for number, (place, _) in enumerate(marks))


def _longest_beginning(text: str, strings: Iterable[str]) -> int:
    """Returns the length of the longest end of `text` that begins a string but is not all of it."""
    longest = max(map(len, strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in strings):
            return length
    return 0
