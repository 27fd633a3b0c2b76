"""`/openapi.json`: its references resolve, and it describes errors correctly."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pace.server.errors import ApiError
from pace.server.kinds import ASKING, GENERATING
from pace.server.schemas import description


@pytest.mark.parametrize("kind", [*GENERATING, *ASKING], ids=lambda kind: kind.name)
def test_what_a_body_refers_to_is_there(kind):
    components: dict[str, Any] = {}
    described = description.body(kind.schema, components)
    schema = described["content"]["application/json"]["schema"]
    assert schema["type"] == "object" and schema["properties"] and "$defs" not in schema
    references = set(re.findall(r"'#/components/schemas/([^']+)'", repr((schema, components))))
    assert references == components.keys()


@pytest.mark.parametrize("is_anthropic", [False, True])
def test_errors_are_as_described(is_anthropic):
    error = ApiError(400, "no")
    sent = error.anthropic() if is_anthropic else error.openai()
    schema = description.operation(is_anthropic=is_anthropic)["default"]["content"]["application/json"]["schema"]
    assert set(schema["required"]) == sent.keys()
    assert set(schema["properties"]["error"]["required"]) == sent["error"].keys()


def test_the_whole_description(serving):
    described = serving.ask("/openapi.json").json
    references = set(re.findall(r"'#/components/schemas/([^']+)'", repr(described["paths"])))
    assert references and references <= described["components"]["schemas"].keys()
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert operation["responses"].keys() == {"200", "default"}, path
    prompt = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert len(prompt["properties"]["prompt"]["anyOf"]) == 4
