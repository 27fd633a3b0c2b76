"""`pace transcribe`: prints the words of a clip of sound."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from pace.cli.arguments import add_model_arguments, open_llm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, before="file")
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a WAV file, `-` for stdin; FLAC, MP3 and Ogg need pace-llm[audio]",
    )
    parser.add_argument(
        "--language", metavar="NAME", help="the language, such as English or en (default: the model finds it)"
    )
    parser.add_argument("--prompt", metavar="TEXT", default="", help="words that are likely to occur, such as names")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text: text, language, metrics"
    )
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    from pace.llm.processors.transcription import language_name

    is_piped = arguments.file == "-"
    if arguments.file is None:
        arguments.parser.error("no sound; give a file, or `-` to read it from stdin")
    if not (is_piped or os.path.isfile(arguments.file)):
        arguments.parser.error(f"there is no file {arguments.file}")
    try:
        language = language_name(arguments.language)
    except ValueError as error:
        arguments.parser.error(str(error))
    sound = sys.stdin.buffer.read() if is_piped else arguments.file
    transcript = open_llm(arguments).transcribe(sound, language, arguments.prompt)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(transcript), ensure_ascii=False))
        return 0
    print(transcript.text)
    if transcript.finish_reason == "length":
        print("pace: the text is cut off: the context is full", file=sys.stderr)
    return 0
