"""Converts prompts of clients to token ids. Runs in workers: tokenizing long texts takes time."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from pace.grammar import Grammar, GrammarError
from pace.grammar.json_schema import check_size
from pace.llm.chat import Tool, ToolChoice, ToolError, read_choice, read_tools
from pace.llm.chat.template import ChatTemplate, TemplateRefusal
from pace.llm.chat.turn import Turn, plan_turn
from pace.llm.constraints.thinking import find_reasoning
from pace.llm.infill import Infill
from pace.llm.inputs import warn_of_second_bos
from pace.llm.processors.prompts import NO_MEDIA, MediaPart, MediaPartError, Prompt, PromptEncoder
from pace.server.errors import ApiError, invalid
from pace.server.jobs import ChatPrompt, GenerationJob, TextPrompts
from pace.server.limits import Limits
from pace.server.schemas.media import texts_of

logger = logging.getLogger("pace")

PROMPTS = "a string, a list of strings, a list of token ids, or a list of such lists"


class PromptReader:
    """Reads prompts for one model. Each thread has a copy of the tokenizer, which is not safe to share."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_length: int,
        limits: Limits,
        encoder: PromptEncoder = NO_MEDIA,
        model_name: str = "this model",
    ) -> None:
        """`max_length` is the maximum length of prompt and answer together. A text of more than
        `limits.bytes_per_token` bytes for each of these tokens is refused before it is tokenised. `encoder` has the
        media that requests may have; `model_name` is for errors about others."""
        self.encoder = encoder
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.max_length = max_length
        self._limits = limits
        self._max_bytes = limits.bytes_per_token * max_length
        self._local = threading.local()
        self._lock = threading.Lock()
        self._passed_over: set[str] = set()
        """Names that were logged already."""

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Any:
        """This thread's tokenizer. Raises ApiError if the model has none."""
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: send token ids to /v1/completions")
        if not hasattr(self._local, "tokenizer"):
            self._local.tokenizer = copy.deepcopy(self._tokenizer)
        return self._local.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """This thread's template. Raises ApiError if the model has none."""
        if not hasattr(self._local, "template"):
            try:
                self._local.template = ChatTemplate(self.tokenizer, None, self.encoder)
            except ValueError as error:
                raise ApiError(400, str(error)) from None
        return self._local.template

    def read(
        self, job: GenerationJob, grammar: Grammar | None = None
    ) -> tuple[list[Prompt], Turn | None, Infill | None]:
        """Returns the tokens and media of each prompt, the turn of a conversation, and how to fill a gap. Media are
        counted by their headers, and not decoded yet. An answer without calls follows `grammar`. Raises ApiError for
        prompts that cannot be read or are too long, and for token ids outside the vocabulary."""
        turn = infill = None
        for param, tokens in job.tokens_named.items():
            self._check_tokens(tokens, param)
        if isinstance(job.prompt, ChatPrompt):
            turn, param = self.plan(job.prompt, grammar), job.prompt.param
            rows = [self._encode(turn.prompt, turn.media, job.prompt.add_special_tokens, param)]
        elif job.prompt.suffix is not None:
            infill, param = self._infill(), "prompt"
            rows = self._gaps(job.prompt, infill)
        else:
            rows, param = self._texts(job.prompt), "prompt"
        if job.truncate_prompt is not None:
            if any(row.runs for row in rows):
                raise invalid("truncate_prompt_tokens", "is not supported with images or sound; leave it out")
            rows = [Prompt(row.tokens[-job.truncate_prompt :]) for row in rows]
        for row in rows:
            if not row.tokens:
                raise invalid(param, "has no tokens")
            if len(row.tokens) >= self.max_length:
                raise self._too_long(len(row.tokens), param)
        return rows, turn, infill

    def plan(self, prompt: ChatPrompt, grammar: Grammar | None = None) -> Turn:
        """Returns the turn that follows a conversation. Raises ApiError."""
        self._log_passed_over(prompt.passed_over)
        tools, choice = self._tools(prompt)
        names = ("content", "reasoning_content")
        contents = [message.get(name) for message in prompt.messages for name in names]
        self.check_bytes(sum(len(text.encode()) for each in contents for text in texts_of(each)), prompt.param)
        self._check_media(contents)
        try:
            return plan_turn(
                self.template,
                prompt.messages,
                tools,
                choice,
                prompt.parallel_calls,
                grammar,
                prompt.add_generation_prompt,
                prompt.continue_final_message,
                prompt.template_kwargs,
            )
        except TemplateRefusal as error:  # roles that must alternate, say
            raise ApiError(400, error.reason, param=prompt.param) from None
        except ApiError:
            raise
        except GrammarError as error:
            raise ApiError(400, str(error), param=error.place) from None
        except Exception as error:
            raise ApiError(400, f"these messages are invalid: {error}", param=prompt.param) from None

    @property
    def has_thoughts(self) -> bool:
        """True if the model's thoughts have known marks, so that a thinking budget can hold."""
        return find_reasoning(self._tokenizer) is not None

    def pass_over_budget(self, job: GenerationJob) -> None:
        """Logs a thinking budget for a model without thoughts. Raises ApiError if the job needs them."""
        if job.needs_thoughts:
            raise invalid(
                job.budget_param, f"needs a model whose thoughts have known marks: {self._model_name!r} has none"
            )
        self._log_passed_over((f"{job.budget_param} for a model without thoughts",))

    def _check_media(self, contents: list[Any]) -> None:
        """Raises ApiError for media that the model does not take."""
        for part in (part for each in contents if isinstance(each, list) for part in each):
            if isinstance(part, MediaPart):
                try:
                    self.encoder.check_kind(part, f"the model {self._model_name!r}")
                except MediaPartError as error:
                    raise ApiError(400, str(error), param=error.place) from None

    def _log_passed_over(self, names: tuple[str, ...]) -> None:
        """Logs once per name what requests ask for without effect."""
        with self._lock:
            fresh = [name for name in names if name not in self._passed_over]
            self._passed_over.update(fresh)
        for name in fresh:
            logger.warning("%s: ignored, here and in later requests, because this server does not support it", name)

    def _tools(self, prompt: ChatPrompt) -> tuple[list[Tool], ToolChoice]:
        """Returns the callable tools and the tool choice. Raises ApiError."""
        items = prompt.tools or []
        if len(items) > self._limits.tools:
            raise invalid("tools", f"may have at most {self._limits.tools} entries, got {len(items)}")
        try:
            tools = read_tools(items)
            for index, tool in enumerate(tools):
                try:
                    check_size(tool.parameters, self._limits.grammar)
                except ValueError as error:
                    raise ToolError(f"tools[{index}]", f"has invalid parameters: {error}") from None
            choice = read_choice(prompt.tool_choice, tools)
        except ToolError as error:
            raise ApiError(400, str(error), param=error.place) from None
        num_bytes = sum(len(repr(tool.parameters)) + len(tool.description) for tool in choice.among(tools))
        if num_bytes > self._limits.grammar_bytes:
            raise invalid("tools", f"have {num_bytes} characters; the maximum is {self._limits.grammar_bytes}")
        return tools, choice

    def render(self, prompt: ChatPrompt) -> str:
        """Returns the text that the model's chat template makes of messages, with a placeholder for each medium."""
        return self.plan(prompt).prompt

    def encode_chat(self, prompt: ChatPrompt, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the token ids of a conversation, as `read_chat`."""
        return self.read_chat(prompt, add_special_tokens).tokens

    def read_chat(self, prompt: ChatPrompt, add_special_tokens: bool | None = None) -> Prompt:
        """Returns the tokens and media of a conversation. `add_special_tokens` overrides the prompt's own."""
        turn = self.plan(prompt)
        adds = prompt.add_special_tokens if add_special_tokens is None else add_special_tokens
        return self._encode(turn.prompt, turn.media, adds, prompt.param)

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        return self._encode(text, (), add_special_tokens, param).tokens

    def _encode(self, text: str, media: Sequence[MediaPart], add_special_tokens: bool, param: str) -> Prompt:
        self.check_bytes(len(text.encode()), param)
        tokenizer = self.tokenizer
        try:
            prompt = self.encoder.encode(text, media, tokenizer, add_special_tokens)
        except (ImportError, ValueError) as error:
            raise ApiError(400, str(error), param=getattr(error, "place", None) or param) from None
        warn_of_second_bos(text, prompt.tokens, self._tokenizer)
        return prompt

    def bad_words(self, words: list[str]) -> list[list[int]]:
        """Returns the tokens of each word at the start of a text and after a space."""
        runs = [self.encode(start + word, False, "bad_words") for word in words for start in ("", " ")]
        return [list(run) for run in dict.fromkeys(map(tuple, runs)) if run]

    def _infill(self) -> Infill:
        """Returns how the model fills a gap. Raises ApiError if it cannot."""
        try:
            return Infill.of(self.tokenizer)
        except ValueError as error:
            raise ApiError(400, str(error), param="suffix", code="unsupported_parameter") from None

    def _gaps(self, prompts: TextPrompts, infill: Infill) -> list[Prompt]:
        """Returns prompts with a gap between each and the suffix."""
        self.check_bytes(len(prompts.suffix.encode()), "suffix")
        return [
            Prompt(infill.prompt(self.tokenizer, item, prompts.suffix, prompts.add_special_tokens))
            for item in self._checked(prompts)
        ]

    def _texts(self, prompts: TextPrompts) -> list[Prompt]:
        return [
            self._encode(item, prompts.media, prompts.add_special_tokens, "prompt")
            if isinstance(item, str)
            else Prompt(item)
            for item in self._checked(prompts)
        ]

    def _checked(self, prompts: TextPrompts) -> Iterator[str | list[int]]:
        """Yields the prompts, either all texts or all token ids. Raises ApiError."""
        is_text = isinstance(prompts.items[0], str)
        for item in prompts.items:
            if is_text and isinstance(item, str):
                self.check_bytes(len(item.encode()), "prompt")
            elif not is_text and isinstance(item, list) and item and all(map(_is_token, item)):
                self._check_tokens(item, "prompt")
                self._check_no_placeholders(item)
            else:
                raise invalid("prompt", f"must be {PROMPTS}, and none may be empty")
            yield item

    def _check_no_placeholders(self, tokens: list[int]) -> None:
        try:
            self.encoder.check_ids(tokens)
        except ValueError as error:
            raise ApiError(400, f"prompt: {error}", param="prompt") from None

    def check_length(self, tokens: list[int], param: str = "prompt") -> None:
        """Raises ApiError for more tokens than the context holds, with a token of the answer."""
        if len(tokens) >= self.max_length:
            raise self._too_long(len(tokens), param)

    def _check_tokens(self, tokens: list[int], param: str) -> None:
        if max(tokens) >= self._vocab_size:
            raise ApiError(
                400, f"{param}: token ids must be from 0 to {self._vocab_size - 1}, got {max(tokens)}", param=param
            )

    def check_bytes(self, num_bytes: int, param: str) -> None:
        """Raises ApiError for a text that is too long to be tokenised."""
        if num_bytes > self._max_bytes:
            raise ApiError(
                400,
                f"{param}: prompt is too long: {num_bytes} bytes of text are more than the context can hold. "
                f"{self._context}",
                param=param,
                code="context_length_exceeded",
                n_ctx=self.max_length,
            )

    @property
    def _context(self) -> str:
        """Limit in the wording that clients recognise: OpenAI's. "prompt is too long: N tokens > M" is Anthropic's."""
        return f"This model's maximum context length is {self.max_length} tokens, the answer included"

    def _too_long(self, num_tokens: int, param: str) -> ApiError:
        return ApiError(
            400,
            f"{param}: prompt is too long: {num_tokens} tokens > {self.max_length - 1} maximum. {self._context}",
            param=param,
            code="context_length_exceeded",
            n_prompt_tokens=num_tokens,
            n_ctx=self.max_length,
        )


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31
