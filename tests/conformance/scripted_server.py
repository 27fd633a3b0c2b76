"""`pace serve` on the bundled model, with scripted answers to questions for which the model is too small.

    python -m tests.conformance.scripted_server SCRIPT [options of pace serve]

SCRIPT is a JSON object: text in a prompt -> the answer.
"""

from __future__ import annotations

import json
import sys

from pace.cli import main
from pace.llm.generator import Generator
from pace.server import service
from tests.conformance.script import Script


class ScriptedService(service.Service):
    def use(self, generator: Generator) -> None:
        generator.defaults.logits_processors = [Script(generator.tokenizer, answers)]
        super().use(generator)


if __name__ == "__main__":
    answers = json.loads(sys.argv[1])
    service.Service = ScriptedService
    raise SystemExit(main(["serve", *sys.argv[2:]]))
