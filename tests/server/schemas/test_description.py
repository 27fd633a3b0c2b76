"""`/openapi.json`: its references resolve, and it describes errors correctly."""

from __future__ import annotations

import re

import pytest

from pace.server.endpoints import ENDPOINTS
from pace.server.errors import ApiError
from pace.server.schemas import description


@pytest.mark.parametrize("is_anthropic", [False, True])
def test_errors_are_as_described(is_anthropic):
    error = ApiError(400, "no")
    sent = error.anthropic() if is_anthropic else error.openai()
    schema = description.responses(is_anthropic=is_anthropic)["default"]["content"]["application/json"]["schema"]
    assert set(schema["required"]) == sent.keys()
    assert set(schema["properties"]["error"]["required"]) == sent["error"].keys()


def test_the_whole_description(serving):
    described = serving.ask("/openapi.json").json
    references = set(re.findall(r"'#/components/schemas/([^']+)'", repr(described)))
    assert references == described["components"]["schemas"].keys()
    assert "$defs" not in repr(described)
    for endpoint in ENDPOINTS:
        body = described["paths"][endpoint.paths[0]]["post"]["requestBody"]["content"][endpoint.body_type]["schema"]
        assert body["type"] == "object" and body["properties"], endpoint.paths
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert operation["responses"].keys() == {"200", "default"}, path
    prompt = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert len(prompt["properties"]["prompt"]["anyOf"]) == 4
