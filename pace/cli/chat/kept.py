"""`pace chat --session FILE`: a conversation that goes on in the next run, with what the cache holds of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pace.checkpoints.files import parse_json
from pace.cli.chat.attachments import from_saved, to_saved
from pace.cli.chat.conversation import Conversation
from pace.naming import counted

if TYPE_CHECKING:
    from pace.llm import LLMModel
    from pace.llm.clients.session import Session


def check_folder(path: str) -> None:
    """Raises ValueError if a conversation could not be written to `path` at its end."""
    folder = Path(path).expanduser().absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "may not be written to by this user" if folder.is_dir() else "is not a folder"
        raise ValueError(f"--session {path} could not be written at the end: {folder} {what}; give another path")


class KeptConversation:
    """The file of a conversation. Reads it at the beginning, and writes it at the end if the conversation has
    changed."""

    def __init__(self, path: str, model: LLMModel, conversation: Conversation, notice: Callable[[str], None]) -> None:
        """Raises ValueError for a file of another model, or without a conversation."""
        self._path, self._model, self._conversation, self._notice = Path(path).expanduser(), model, conversation, notice
        self._loaded: Session | None = None
        """Holds what the file has in the cache, which may be more than the prefix cache keeps of it."""
        if self._path.exists():
            self._read()
        self._before = conversation.messages

    def _read(self) -> None:
        from pace.llm.clients.session import Session

        generator = self._model.generator
        with generator.adapters.using(self._conversation.adapter) as adapter:
            session, note = Session.load(generator.driver, self._path, adapter=adapter)
        self._loaded = session
        try:
            self._conversation.resume(from_saved(parse_json(note, "its conversation")))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{self._path} holds no conversation for this model: {error}") from None
        self._notice(f"({counted(len(self._conversation.messages), 'message')} from {self._path})")

    def write(self) -> None:
        """Writes the conversation, and ends the use of the file. Raises OSError if it cannot be written."""
        messages = self._conversation.messages
        if messages is not self._before and messages != self._before:
            self._write(messages)
        if self._loaded is not None:
            self._loaded.close()

    def _write(self, messages: list[dict]) -> None:
        note = json.dumps(to_saved(messages), ensure_ascii=False).encode()
        from pace.llm.inputs import Prompts

        prompt = self._conversation.beginning()
        with self._model.session(self._conversation.adapter) as session:
            if prompt.tokens:
                session.append(Prompts([prompt.tokens], None, [prompt.media]))
            session.save(self._path, note)
        self._before = messages
        self._notice(f"({counted(len(messages), 'message')} in {self._path})")
