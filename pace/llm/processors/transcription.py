"""What Qwen3-ASR is asked for the words of a clip, and how its answer is read.

Source: `processing_qwen3_asr.py` of transformers. The model answers `language English<asr_text>Hello.`; a prompt that
ends in `language English<asr_text>` chooses the language."""

from __future__ import annotations

from pace.llm.processors.prompts import MediaPart, PromptEncoder
from pace.llm.processors.qwen_audio import Qwen3ASRAudioProcessor
from pace.naming import shown

MARKER = "<asr_text>"
"""What an answer has between the language and the text."""
LANGUAGES = {
    "ar": "Arabic", "yue": "Cantonese", "zh": "Chinese", "cs": "Czech", "da": "Danish", "nl": "Dutch", "en": "English",
    "fil": "Filipino", "fi": "Finnish", "fr": "French", "de": "German", "el": "Greek", "hi": "Hindi", "hu": "Hungarian",
    "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay",
    "fa": "Persian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "es": "Spanish",
    "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese",
}  # fmt: skip
"""Code of a language -> the name that the model knows."""
_NAMES = {word.lower(): name for code, name in LANGUAGES.items() for word in (code, name)}
_HEAD = "language "
_PROMPT = (
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n" + Qwen3ASRAudioProcessor.placeholder + "<|im_end|>\n"
    "<|im_start|>assistant\n{}"
)


def language_name(language: str | None) -> str | None:
    """Returns the model's name of a language, given by name or code in letters of any case; None for "" and None.
    Raises ValueError for an unknown language."""
    if not language:
        return None
    name = _NAMES.get(language.strip().lower())
    if name is None:
        known = ", ".join(f"{code} ({name})" for code, name in LANGUAGES.items())
        raise ValueError(f"language must be one of {known}; got {shown(language)}")
    return name


def check_transcribes(encoder: PromptEncoder, model: str = "this model") -> None:
    """Raises ValueError for a model that takes no sound, or that was not trained to transcribe in this form."""
    encoder.check_kind(MediaPart("audio", None), model)
    if not getattr(encoder.processors["audio"], "transcribes", False):
        raise ValueError(f"{model} takes sound, but is not a model for transcriptions; ask it for the words in a chat")


def transcription_prompt(language: str | None = None, prompt: str = "") -> str:
    """Returns the text of a prompt with the placeholder of one clip. `language` is the model's name of it, None to let
    the model find it. `prompt` has words that are likely to occur."""
    begun = "" if language is None else f"{_HEAD}{language}{MARKER}"
    return _PROMPT.format(prompt, begun)


class TranscriptReader:
    """Reads an answer in pieces. Holds back what may be the language, and white space that may be at the end."""

    def __init__(self, language: str | None) -> None:
        """`language` is None if the answer begins with the language that the model found."""
        self.language = language
        self._is_words = language is not None
        self._has_begun = False
        self._held = ""

    def read(self, text: str, is_last: bool = False) -> str:
        """Returns the new part of the transcript. All parts joined have no white space at their ends. An answer without
        the marker is a transcript as a whole, which is known at its end only."""
        self._held += text
        if not self._is_words:
            head, marker, rest = self._held.partition(MARKER)
            if marker:
                self.language, self._held, self._is_words = _language(head), rest, True
            elif not is_last:
                return ""
        words = self._held if self._has_begun else self._held.lstrip()
        found = words.rstrip()
        self._has_begun |= bool(found)
        self._held = words[len(found) :]
        return found


def _language(head: str) -> str | None:
    """Returns the language in the text before the marker; None if there is none."""
    name = head.strip().removeprefix(_HEAD.strip()).strip()
    return None if name in ("", "None") else name
