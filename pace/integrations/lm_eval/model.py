"""The model type "pace" of lm-eval: one engine for all requests of a task."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from pace.llm import LLMModel, SamplingConfig
from pace.llm.loading.options import LoadOptions

logger = logging.getLogger("pace")

MAX_GEN_TOKS = 256
"""Default maximum tokens of an answer, the same as in lm-eval's other models."""
AT_ONCE = 64
"""Requests of a window with batch_size "auto": more than fit into a step, but few enough that common prefixes stay in
the prefix cache."""
OPTIONS = {field.name for field in fields(LoadOptions)} - {"model_name_or_path", "tokenizer_name_or_path"}

Encoded = tuple[Any, list[int], list[int]]
"""A request: its texts or None, the tokens of its context, and those of its continuation."""


@register_model("pace")
class PaceLM(TemplateLM):
    """A checkpoint on pace. Values equal those of the `hf` model up to rounding, and do not depend on the batch
    size."""

    def __init__(
        self,
        pretrained: str | LLMModel,
        tokenizer: str | None = None,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`pretrained`: a directory, a GGUF file or a Hub id, loaded with `options` as arguments of `LLMModel`; or a
        loaded model.
        `batch_size`: number of requests submitted together; None and "auto" choose a good one. The engine forms its own
        steps. `max_batch_size` limits it.
        `device`: accepted for lm-eval's command line; pace runs on the CPU.
        `max_length`: maximum tokens of a text; longer ones lose their beginning.
        `max_gen_toks`: default maximum tokens of an answer.
        `add_bos_token`, `prefix_token_id`, `think_end_token`, `enable_thinking`, `chat_template_args`: as in `hf`.
        Raises TypeError for unknown options, and what `LLMModel` raises.
        """
        super().__init__()
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise TypeError(f"the model type pace has no {', '.join(unknown)}; of loading there are {sorted(OPTIONS)}")
        if device not in (None, "cpu"):
            logger.info("pace runs on the CPU, and not on %s", device)
        if isinstance(pretrained, LLMModel):
            if tokenizer is not None or options:
                raise ValueError(
                    f"a loaded model has its tokenizer and options; got {['tokenizer'] * (tokenizer is not None) + list(options)}"
                )
            self._model, self._pretrained = pretrained, "a loaded model"
        else:
            self._model, self._pretrained = LLMModel(pretrained, tokenizer, **options), str(pretrained)
        self.tokenizer = self._model.get_tokenizer()
        if self.tokenizer is None:
            raise ValueError(f"tasks are texts, and {self._pretrained} has no tokenizer; name one with tokenizer=")
        if max_length is not None and not 2 <= max_length <= self._model.max_seq_len:
            raise ValueError(f"max_length must be from 2 to the model's {self._model.max_seq_len}; got {max_length}")
        self._at_once = _read_batch_size(batch_size, max_batch_size)
        self._max_length = max_length
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._think_end_token = think_end_token
        self._template_arguments = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_arguments["enable_thinking"] = enable_thinking

    # -- texts and tokens ----------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token that precedes a text without a context."""
        for token in (self._prefix_token_id, self.tokenizer.bos_token_id):
            if token is not None:
                return token
        return self.eot_token_id

    @property
    def max_length(self) -> int:
        return self._max_length or self._model.max_seq_len

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def batch_size(self) -> int:
        return self._at_once

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encodes a text. No first token is added if the text already begins with its name."""
        add = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add = False
        return self.tokenizer.encode(string, **({} if add is None else {"add_special_tokens": add}))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._template_arguments,
        )

    def get_model_info(self) -> dict[str, Any]:
        """Returns what lm-eval stores with its results."""
        report = self._model.memory_report()
        return {
            "model_num_parameters": sum(report.weight_counts.values()),
            "model_bytes": sum(report.weights.values()),
            "model_source": "pace",
        }

    # -- scores --------------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores continuations. Each window first scores one request of each context; the others then hit the prefix
        cache."""
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), desc="Scoring continuations", disable=disable_tqdm) as bar:
            for window in self._windows(len(requests)):
                firsts = {tuple(requests[index][1]): index for index in reversed(window)}.values()
                for wave in (sorted(firsts), sorted(set(window) - set(firsts))):
                    for index, answer in zip(wave, self._score([requests[index] for index in wave])):
                        answers[index] = answer
                        if requests[index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                    bar.update(len(wave))
        return answers

    def _score(self, requests: list[Encoded]) -> list[tuple[float, bool]]:
        rows, starts = [], []
        for _, context, continuation in requests:
            row = _end_of(context + continuation, self.max_length + 1)
            rows.append(row)
            starts.append(max(1, len(row) - len(continuation)))
        return [
            (float(scores.logprobs.double().sum()), bool(scores.are_likeliest.all()))
            for scores in (self._model.score_from(rows, starts) if rows else [])
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[Encoded] = []
        ends = []
        for (text,) in (request.args for request in requests):
            pieces = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *utils.make_disjoint_window(piece)) for piece in pieces]
            ends.append(len(windows))
        values = [value for value, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        sums = [sum(values[begin:end]) for begin, end in zip([0, *ends], ends)]
        for request, value in zip(requests, sums):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    # -- answers -------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = []
        with tqdm(total=len(requests), desc="Generating", disable=disable_tqdm) as bar:
            for window in self._windows(len(requests)):
                asked = [self._ask(*requests[index].args) for index in window]
                try:
                    for index, (request, stop) in zip(window, asked):
                        text = postprocess_generated_text(request.result().texts[0], stop, self._think_end_token)
                        texts.append(text)
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                        bar.update(1)
                finally:
                    for request, _ in asked:
                        request.cancel()
        return texts

    def _ask(self, context: str, arguments: dict[str, Any]) -> tuple[Any, list[str]]:
        """Submits a request for one answer, and returns it with its stop strings."""
        wanted = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        end = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        stop = handle_stop_sequences(wanted.pop("until", None), end)
        max_new_tokens = wanted.pop("max_gen_toks")
        room = self.max_length - max_new_tokens
        if room <= 0:
            raise ValueError(
                f"answers of {max_new_tokens} tokens leave nothing of the model's {self.max_length}; lower max_gen_toks"
            )
        if not wanted.get("do_sample"):
            wanted = {name: value for name, value in wanted.items() if name != "temperature"}
        config = SamplingConfig(
            max_new_tokens=max_new_tokens, stop_strings=[text for text in stop if text] or None, **wanted
        )
        return self._model.add_request(_end_of(self.tok_encode(context), room), config), stop

    def _windows(self, count: int) -> Iterator[list[int]]:
        for begin in range(0, count, self._at_once):
            yield list(range(begin, min(count, begin + self._at_once)))


def _end_of(tokens: list[int], most: int) -> list[int]:
    """Returns the last `most` tokens. Logs a warning if a text loses its beginning."""
    if len(tokens) > most:
        logger.warning("a text of %d tokens loses its beginning: there is room for %d", len(tokens), most)
    return tokens[-most:]


def _read_batch_size(batch_size: int | str | None, largest: int | None) -> int:
    """Parses "4", 4, "auto" or "auto:4", which means "auto" here."""
    if batch_size is None or str(batch_size).startswith("auto"):
        found = AT_ONCE
    elif str(batch_size).isdigit() and int(batch_size) > 0:
        found = int(batch_size)
    else:
        raise ValueError(f'batch_size must be a number of requests or "auto", got {batch_size!r}')
    return min(found, largest or found)
