"""Detokenizer: turns tokens into text piece by piece. The joined pieces are exactly the text of all tokens decoded at
once."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Iterable, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

from pace.llm.sequence import PLAIN_TEXT, TextRules
from pace.llm.text.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
"""Character that a decoder puts for bytes that are not (yet) a character."""
BASE_CLASSES = ("pace.tokenizer.tokenizer", "transformers.tokenization_utils")
"""Modules of the base tokenizers, which a model's own may subclass and change."""


def decode(tokenizer: Any, tokens: list[int], skip_special_tokens: bool = True) -> str:
    """Returns the text of tokens, without the usual cleanup of spaces."""
    if not tokens:
        return ""
    return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def decoder_of(tokenizer: Any, skip_special_tokens: bool = True) -> Callable[[list[int]], str]:
    """Returns `decode` for one tokenizer, with or without special tokens. It calls the tokenizers package directly if
    the tokenizer's own method adds nothing. A stream decodes twice for each token, and that method costs several times
    as much."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    methods = [getattr(type(tokenizer), name) for name in ("decode", "_decode") if hasattr(type(tokenizer), name)]
    if backend is not None and all(method.__module__.startswith(BASE_CLASSES) for method in methods):
        return lambda tokens: backend.decode(tokens, skip_special_tokens=skip_special_tokens)
    return lambda tokens: decode(tokenizer, tokens, skip_special_tokens)


class Detokenizer:
    """Follows one sequence of tokens; `text` only grows.

    A new token is decoded together with those of the piece before it, to keep a space that belongs to it. A character
    is held back until all of its bytes are there. Invalid bytes become a replacement character, returned once a later
    token ends it, or by `flush`.

    Tokens of a single byte, `<0x0A>`, are held back as long as they follow each other. If one byte of such a run is no
    part of a character, these tokenizers replace the whole run. (sentencepiece with byte fallback: Llama 2, Mistral.)
    """

    def __init__(self, tokenizer: Any, rules: TextRules = PLAIN_TEXT) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        self._decode = decoder_of(tokenizer, skip_special_tokens=rules.hidden is None)
        self._table = TokenBytes.of(tokenizer)
        self._hidden = hidden_tokens(tokenizer, rules)
        context = list(rules.context)
        # Replaced as a whole, so an interrupted push has no effect.
        self._state = _Followed("", context, len(context), 0, rules.prompt_end)

    @property
    def text(self) -> str:
        """All pieces returned so far."""
        return self._state.text

    @property
    def num_pushed(self) -> int:
        """Number of tokens taken so far."""
        return self._state.num_pushed

    def fork(self) -> Detokenizer:
        """Returns a second one that has followed the same tokens."""
        return copy.copy(self)

    def push(self, token: int) -> str:
        """Takes a token and returns the text that is now certain, maybe "". An error or Ctrl-C leaves the state
        unchanged."""
        return self.extend([token])

    def extend(self, tokens: list[int]) -> str:
        """Takes one token or more at the cost of one. Returns the joined results of `push` for each."""
        held, last = self._holding(tokens), tokens[-1]
        text = "" if last in self._hidden or self._table.is_byte(last) else self._held_text(held)
        if not text or text.endswith(REPLACEMENT):
            self._state = held
            return ""
        return self._give(held, text)

    def flush(self) -> str:
        """Returns the text held back, complete or not. The next token starts afresh."""
        return self._give(self._state, self._held_text(self._state))

    @property
    def pending(self) -> str:
        """Text of the tokens not yet in `text`; its end may still change."""
        return self._pending_of(self._state)

    def pending_after(self, tokens: list[int]) -> str:
        """Returns what `pending` would be if these tokens were held back, too."""
        return self._pending_of(self._holding(tokens))

    def _holding(self, tokens: list[int]) -> _Followed:
        state, shown = self._state, tokens
        if self.rules.hidden:
            shown = [token for token in tokens if token not in self.rules.hidden]
        num_pushed = state.num_pushed + len(tokens)
        return state._replace(tokens=[*state.tokens, *shown], num_pushed=num_pushed)

    def _give(self, held: _Followed, text: str) -> str:
        """Returns the new piece of `text`, the text of all tokens held back, and updates the state."""
        piece, left = self._beyond_prompt(text, held.left)
        tokens = held.tokens[held.num_given :]
        self._state = _Followed(held.text + piece, tokens, len(tokens), held.num_pushed, left)
        return piece

    def _pending_of(self, state: _Followed) -> str:
        return self._beyond_prompt(self._held_text(state), state.left)[0]

    def _held_text(self, state: _Followed) -> str:
        """Returns the text of the tokens held back, including the end of the prompt."""
        before = self._decode(state.tokens[: state.num_given]) if state.num_given else ""
        text = self._decode(state.tokens) if state.tokens else ""
        return _beyond(before, text)

    def _beyond_prompt(self, text: str, left: str) -> tuple[str, str]:
        """Returns `text` without the prompt's end, and what is left of that. `left` is the part of it still to come."""
        if not left or not text:
            return text, left
        is_first = not self.rules.context and left == self.rules.prompt_end
        if is_first and left.startswith(" ") and not text.startswith(" "):  # SentencePiece has omitted the blank
            left = left[1:]
        beyond = _beyond(left, text)
        return beyond, "" if beyond else left[len(text) :]


class _Followed(NamedTuple):
    """State of a `Detokenizer`."""

    text: str
    tokens: list[int]
    """Tokens of the last piece and those held back."""
    num_given: int
    """Number of these tokens that are in `text` or in the prompt."""
    num_pushed: int
    left: str
    """Part of the prompt's end that the tokens in `text` have not repeated yet."""


def _beyond(before: str, text: str) -> str:
    """Returns the part of `text` after `before`, its beginning. An incomplete character at the end of `before` may
    differ."""
    return text[len(before if text.startswith(before) else commonprefix([before, text])) :]


def decode_after(tokenizer: Any, tokens: list[int], rules: TextRules) -> str:
    """Returns the text of all generated tokens at once."""
    return Detokenizer(tokenizer, rules).pending_after(tokens)


def hidden_tokens(tokenizer: Any, rules: TextRules) -> frozenset[int]:
    """Returns the tokens that are no text."""
    return TokenBytes.of(tokenizer).special if rules.hidden is None else rules.hidden


def context_of(prompt: list[int], tokenizer: Any) -> tuple[int, ...]:
    """Returns `TextRules.context` for the text that continues a prompt: a few tokens, regardless of the prompt's
    length.

    The first is a token with text, after which the tokenizer keeps a blank. Tokens of a character that the prompt cuts
    off follow. The first is no single-byte token, since bytes of the continuation may join its run. If such a run is no
    text, the decoder replaces all of it, so all of it is needed. A prompt of special tokens has no context.
    """
    table = TokenBytes.of(tokenizer)
    num_open = _num_open(prompt, table)
    whole, first, run = prompt[: len(prompt) - num_open], [], []
    for token in reversed(whole):
        if token in table.special or not table[token]:
            continue
        if not table.is_byte(token):
            first = [token]
            break
        run.append(token)
    run.reverse()
    try:
        text = b"".join([table[token] for token in run]).decode()
        run = run[len(run) - len(text[-1:].encode()) :] if not first else []
    except UnicodeDecodeError:
        pass
    return (*first, *run, *prompt[len(whole) :])


def _num_open(prompt: list[int], table: TokenBytes) -> int:
    """Returns how many of the last tokens hold bytes of an incomplete character."""
    parts: list[bytes] = []
    for token in reversed(prompt[-4:]):  # the maximum number of bytes of a character
        if token in table.special:
            break
        parts.append(table[token])
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(reversed(parts)))
    num_bytes, count = len(decoder.getstate()[0]), 0
    while num_bytes > 0:
        num_bytes -= len(parts[count])
        count += 1
    return count


def find_stop(text: str, stop_strings: list[str]) -> int | None:
    """Returns the position of the first stop string in `text`, or None."""
    return min((index for index in (text.find(stop) for stop in stop_strings) if index >= 0), default=None)


Marks = Sequence[tuple[int, str]]
"""Positions in a text, in order, and the letter that stands for a hidden token there."""
FIRST_LETTER, OTHER_LETTER = 0xF0000, "\U0010ffff"
"""Private-use characters, which no text contains."""


class StopSearch:
    """Searches stop strings in a text. A string may name hidden tokens, which are no text: "<|im_end|>", or "\\n</s>".
    Each hidden token is then represented by one letter, in the string and in the text."""

    def __init__(self, tokenizer: Any, strings: list[str], rules: TextRules = PLAIN_TEXT) -> None:
        self.strings = strings
        self.longest = max(map(len, strings), default=0)
        self._hidden, table = hidden_tokens(tokenizer, rules), TokenBytes.of(tokenizer)
        joined = "\0".join(strings)
        named = {token: name for token in self._hidden if (name := table.text(token)) and name in joined}
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
        found = [(text.find(string), string) for string in self.strings]
        if marks and self._lettered:
            lettered = _with_letters(text, marks)
            for pattern, string in self._lettered.items():
                index = lettered.find(pattern)
                found.append((index - _num_letters(marks, index), string))
        return min((one for one in found if one[0] >= 0), key=lambda one: one[0], default=None)

    def num_open(self, text: str, marks: Marks = ()) -> int:
        """Returns how many of the last characters may turn out to begin a stop string."""
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
    """Returns the number of letters before an index of the text with letters."""
    return sum(place + number < index for number, (place, _) in enumerate(marks))


def _longest_beginning(text: str, strings: Iterable[str]) -> int:
    """Returns the length of the longest end of `text` that begins a string but is not all of it."""
    longest = max(map(len, strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in strings):
            return length
    return 0


class TextPieces:
    """Turns tokens of one sequence into text to show: no partial characters, and nothing of a stop string or after it.

    Text that may turn out to begin a stop string is held back until that is known.
    """

    def __init__(self, tokenizer: Any, stop_strings: list[str] | None = None, rules: TextRules = PLAIN_TEXT) -> None:
        self.detokenizer = Detokenizer(tokenizer, rules)
        self._search = StopSearch(tokenizer, stop_strings or [], rules)
        self._marks: list[tuple[int, str]] = []
        """Hidden tokens, by their positions in the whole text."""
        self._num_released = 0
        self._held = ""
        self._stopped = False

    def push(self, token: int) -> str:
        """Returns the text that this token makes certain, maybe ""."""
        return self.release(self.detokenize([token]))

    def flush(self) -> str:
        """Returns the rest, at the end of the sequence."""
        return self.release(self.detokenize_rest(), ended=True)

    def detokenize(self, tokens: list[int]) -> str:
        """Returns text of these and earlier tokens that is certain except for stop strings: the first half of
        `push`."""
        if not self._search.wants_marks:
            return self.detokenizer.extend(tokens)
        return "".join([self._detokenize_marked(token) for token in tokens])

    def _detokenize_marked(self, token: int) -> str:
        piece = self.detokenizer.push(token)
        if letter := self._search.letter_of(token):
            place = len(self.detokenizer.text + self.detokenizer.pending)
            self._marks = [*self._marks, (place, letter)][-self._search.longest :]
        return piece

    def detokenize_rest(self) -> str:
        """Returns the rest of the text: the first half of `flush`."""
        return self.detokenizer.flush()

    def release(self, piece: str, ended: bool = False) -> str:
        """Returns the part of the text so far that may be shown: the second half of `push` and `flush`."""
        if not self._search.strings:
            return piece
        if self._stopped:
            return ""
        self._held += piece
        marks = [(place - self._num_released, letter) for place, letter in self._marks]
        marks = [(place, letter) for place, letter in marks if 0 <= place <= len(self._held)]
        found = self._search.find(self._held, marks)
        if found is not None:
            self._stopped = True
            return self._held[: found[0]]
        num_certain = len(self._held) - (0 if ended else self._search.num_open(self._held, marks))
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        self._num_released += num_certain
        return certain
