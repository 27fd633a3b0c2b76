"""JSON that is valid by construction: every token is chosen from the tokens that the schema allows.

    python examples/pace_llm_json.py
    python examples/pace_llm_json.py --prompt "Describe a castle as JSON: " --schema castle.json

Needs llguidance: pip install "pace-llm[grammar]".
"""

import argparse
import json
from pathlib import Path

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["music", "books", "trains"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate JSON of a schema with pace.")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    parser.add_argument("--prompt", default="A person as JSON: ")
    parser.add_argument("--schema", type=Path, help="a file with a JSON schema (default: a person)")
    args = parser.parse_args()

    model = LLMModel(args.model)
    schema = json.loads(args.schema.read_text()) if args.schema else PERSON
    output = model.generate(args.prompt, SamplingConfig(json_schema=schema))
    print(json.dumps(json.loads(output.texts[0]), indent=2))
    metrics = output.metrics
    print(
        f"{metrics.num_forced_tokens} of {metrics.num_generated_tokens} tokens needed no step: nothing else could come"
    )


if __name__ == "__main__":
    main()
