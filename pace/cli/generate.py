"""`pace generate`: continues one prompt and prints the text as it is generated."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from functools import partial
from typing import TYPE_CHECKING

from pace.cli.arguments import (
    add_adapter_arguments,
    add_media_arguments,
    add_model_arguments,
    load_adapters,
    open_llm,
)
from pace.cli.sampling import add_sampling_arguments, sampling_config
from pace.llm.chat.template import ChatTemplate
from pace.naming import counted

if TYPE_CHECKING:
    from pace.llm import GenerateOutput, StreamEvent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, before="prompt")
    add_adapter_arguments(parser)
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the text to continue, or with --chat the question; `-` reads it from stdin, as does a pipe without "
        "PROMPT",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer the prompt as a message of a chat, with the model's chat template; `pace chat` is a conversation",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="with --chat: the system prompt, such as 'Answer in one word.'"
    )
    parser.add_argument(
        "--suffix",
        metavar="TEXT",
        help="the text after the gap that the model fills; PROMPT is the text before it. For models trained on it",
    )
    add_media_arguments(
        parser,
        "an image for a placeholder in the text, such as <|vision_start|><|image_pad|><|vision_end|>; with --chat it "
        "is put before the question. May be repeated",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of text: texts, token ids, finish reasons, metrics",
    )
    parser.add_argument("--metrics", action="store_true", help="print times and speeds on stderr at the end")
    parser.add_argument(
        "--operators",
        action="store_true",
        help="print on stderr if kernels or torch ran each operator (see --backend)",
    )
    parser.set_defaults(parser=parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        config = sampling_config(arguments)
        if arguments.system is not None and not arguments.chat:
            raise ValueError("--system needs --chat: plain text has no system prompt")
        if arguments.suffix is not None and arguments.chat:
            raise ValueError("--suffix does not work with --chat: leave one of them out")
        if arguments.suffix is not None and (arguments.image or arguments.audio):
            raise ValueError("--suffix does not work with --image and --audio: leave it out")
        for option, value in (("--logprobs", config.logprobs), ("--prompt-logprobs", config.prompt_logprobs)):
            if value is not None and not arguments.json:
                raise ValueError(f"{option} needs --json: plain text does not show them")
        prompt = read_prompt(arguments.prompt)
    except (TypeError, ValueError) as error:
        arguments.parser.error(str(error))

    from pace.llm import CallbackStreamer, StreamEvent
    from pace.llm.chat.turn import plan_turn
    from pace.llm.processors.prompts import MediaPart
    from pace.llm.text.token_bytes import TokenBytes

    model = open_llm(arguments, arguments.chat)
    adapter = load_adapters(model, arguments)
    inputs, generate = prompt, partial(model.generate, suffix=arguments.suffix, adapter=adapter)
    media = [MediaPart(kind, path, where=path) for kind in ("image", "audio") for path in getattr(arguments, kind)]
    if media:
        inputs = {"prompt": prompt, "images": arguments.image, "audio": arguments.audio}
    if arguments.chat:
        encoder = model.generator.encoder
        system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        question = {"role": "user", "content": [*media, {"type": "text", "text": prompt}] if media else prompt}
        turn = plan_turn(ChatTemplate(model.tokenizer, None, encoder), [*system, question])
        turn = dataclasses.replace(turn, hidden=TokenBytes.of(model.tokenizer).special)  # nothing is parsed
        inputs = encoder.encode(turn.prompt, turn.media, model.tokenizer, add_special_tokens=False)
        generate = partial(model.generator.generate_turn, turn, adapter=adapter)

    if not (config.has_length or model.generator.defaults.has_length):
        config.max_length = model.max_seq_len
    writer = JsonWriter(prompt) if arguments.json else TextWriter(config.num_return_sequences)
    try:
        if config.num_beams > 1:  # beams have no final text before the end
            output = generate(inputs, config)
            for row, (text, reason) in enumerate(zip(output.texts, output.finish_reasons)):
                writer.take(StreamEvent(row, None, text, reason))
        else:
            output = generate(inputs, config, CallbackStreamer(writer.take, model.tokenizer))
    except KeyboardInterrupt:
        writer.interrupted()
        raise
    writer.finished(output)
    if not arguments.json and (notice := _notice_of_cut(output, model.max_seq_len)):
        print(notice, file=sys.stderr)
    if arguments.metrics:
        print(output.metrics, file=sys.stderr)
    if arguments.operators:
        print(model.operator_report(), file=sys.stderr)
    return 0


def _notice_of_cut(output: GenerateOutput, max_length: int) -> str:
    """Returns how many texts were cut off and what allows longer ones; "" if none was."""
    rows = [row for row, reason in enumerate(output.finish_reasons) if reason == "length"]
    if not rows:
        return ""
    lengths = [len(output.generated_token_ids[row]) for row in rows]
    what = (
        "the text is" if len(output.finish_reasons) == 1 else f"{len(rows)} of {len(output.finish_reasons)} texts are"
    )
    is_full = all(
        output.request_metrics[row].num_prompt_tokens + length >= max_length for row, length in zip(rows, lengths)
    )
    advice = f"the context of {max_length} tokens is full" if is_full else "--max-new-tokens N allows more"
    return f"pace: {what} cut off after {counted(max(lengths), 'token')}: {advice}"


def read_prompt(argument: str | None) -> str:
    """Returns the argument itself, or the text on stdin for `-` (or for None if stdin is not a terminal).

    One newline at the end of stdin is dropped, because `echo` adds it.
    Raises: ValueError if there is no prompt or it is not UTF-8.
    """
    if argument not in (None, "-"):
        return argument
    if argument is None and sys.stdin.isatty():
        raise ValueError("no prompt; give it as an argument, or `-` to read it from stdin")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on stdin is not UTF-8: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")


class TextWriter:
    """Prints a single text as it is generated. Several samples interleave and beams end together, so they are printed
    when all are done, each under a line `[number]`."""

    def __init__(self, num_rows: int):
        self.texts = [""] * num_rows

    def take(self, event: StreamEvent) -> None:
        self.texts[event.row] += event.text
        if len(self.texts) == 1:
            print(event.text, end="", flush=True)

    def interrupted(self) -> None:
        """Prints the rest of the output and ends it with a newline."""
        if len(self.texts) == 1:
            print(flush=True)
        else:
            print("\n\n".join(f"[{row}]\n{text}" for row, text in enumerate(self.texts)), flush=True)

    def finished(self, output: GenerateOutput) -> None:
        self.interrupted()


class JsonWriter:
    """Prints one JSON object at the end, or when the user stops the run (then without ids and metrics)."""

    def __init__(self, prompt: str):
        self.prompt = prompt
        self.texts: dict[int, str] = {}
        self.finish_reasons: dict[int, str] = {}

    def take(self, event: StreamEvent) -> None:
        self.texts[event.row] = self.texts.get(event.row, "") + event.text
        if event.finish_reason is not None:
            self.finish_reasons[event.row] = event.finish_reason

    def interrupted(self) -> None:
        rows = sorted(self.texts)
        self._write(
            {
                "texts": [self.texts[row] for row in rows],
                "finish_reasons": [self.finish_reasons.get(row, "cancelled") for row in rows],
            }
        )

    def finished(self, output: GenerateOutput) -> None:
        result = {
            "texts": output.texts,
            "finish_reasons": output.finish_reasons,
            "generated_token_ids": output.generated_token_ids,
            "metrics": dataclasses.asdict(output.metrics),
        }
        if output.logprobs is not None:
            result["logprobs"] = [[dataclasses.asdict(token) for token in row] for row in output.logprobs]
        if output.prompt_logprobs is not None:
            result["prompt_logprobs"] = [
                [token and dataclasses.asdict(token) for token in row] for row in output.prompt_logprobs
            ]
        if output.sequence_scores is not None:
            result["sequence_scores"] = output.sequence_scores
        self._write(result)

    def _write(self, result: dict) -> None:
        print(json.dumps({"prompt": self.prompt, **result}, ensure_ascii=False), flush=True)
