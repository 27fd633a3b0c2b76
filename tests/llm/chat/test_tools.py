"""Reading tools and tool choices in the forms that clients send."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pace.grammar.whitespace import whitespace_options
from pace.llm.chat import Tool, ToolChoice, ToolError, read_choice, read_tools, schemas
from pace.llm.chat.schemas import Values, closed, json_expression, properties, split

F = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"b": {}, "a": {}}},
    "strict": True,
}


def test_both_forms():
    nested = read_tools([{"type": "function", "function": F}])
    assert nested == read_tools([{"type": "function", **F}]) == [Tool("f", "d", F["parameters"], True)]
    assert list(nested[0].parameters["properties"]) == ["b", "a"], "the client's order"
    assert read_tools([{"function": {"name": "g"}}]) == [Tool("g")]
    assert read_tools([{"name": "g", "parameters": {"properties": {}}}])[0].parameters["type"] == "object"
    assert nested[0].for_template()["function"]["parameters"] == F["parameters"]


@pytest.mark.parametrize(
    ("items", "place"),
    [({}, "tools"), (["f"], "tools[0]"), ([{"type": "web_search"}], "tools[0].type"),
     ([F, {"function": "f"}], "tools[1].function"), ([F, {"function": {"name": "a b"}}], "tools[1].function.name"),
     ([{"name": "x" * 65}], "tools[0].name"), ([{"name": ""}], "tools[0].name"), ([{}], "tools[0].name"),
     ([F, {"function": F}], "tools[1].function.name"), ([{"name": "f", "description": 3}], "tools[0].description"),
     ([{"name": "f", "strict": "yes"}], "tools[0].strict"), ([{"name": "f", "parameters": []}], "tools[0].parameters"),
     ([{"name": "f", "parameters": {"type": "array"}}], "tools[0].parameters.type"),
     ([{"name": "f", "parameters": {"properties": []}}], "tools[0].parameters.properties"),
     ([{"name": "f", "parameters": {"properties": {"a": 3}}}], "tools[0].parameters.properties.a"),
     ([{"name": "f", "parameters": {"required": "a"}}], "tools[0].parameters.required")],
)  # fmt: skip
def test_errors_name_the_place(items, place):
    with pytest.raises(ToolError) as caught:
        read_tools(items)
    assert caught.value.place == place and str(caught.value).startswith(place + " ")


def test_null_is_nothing():
    """Clients in Go write it for empty lists and objects."""
    given = {"type": None, "properties": None, "required": None, "additionalProperties": None}
    assert read_tools([{"name": "f", "parameters": given}])[0].parameters == {"type": "object"}


def test_names_are_only_names():
    assert [tool.name for tool in read_tools([{"name": "__class__"}, {"name": "a.b-c"}])] == ["__class__", "a.b-c"]


def test_choices():
    tools = read_tools([F, {"name": "g"}])
    assert read_choice(None, tools) == ToolChoice("auto") and read_choice(None, []) == ToolChoice("none")
    assert read_choice("none", tools).among(tools) == [] and read_choice("auto", []) == ToolChoice("none")
    assert read_choice("required", tools).among(tools) == tools
    named = ToolChoice("named", ("g",))
    assert read_choice({"type": "function", "function": {"name": "g"}}, tools) == named
    assert read_choice({"type": "function", "name": "g"}, tools) == named and named.among(tools) == tools[1:]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert read_choice({"type": "allowed_tools", "allowed_tools": allowed}, tools) == ToolChoice("required", ("f",))
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert read_choice(flat, tools) == ToolChoice("auto", ("g",))


@pytest.mark.parametrize(
    ("item", "place"),
    [("any", "tool_choice"), (3, "tool_choice"), ({"type": "custom"}, "tool_choice"),
     ({"type": "function"}, "tool_choice.name"),
     ({"type": "function", "function": {"name": "h"}}, "tool_choice.function.name"),
     ({"type": "allowed_tools", "mode": "never", "tools": [F]}, "tool_choice.mode"),
     ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools.tools"),
     ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "h"}]}, "tool_choice.tools[0].name")],
)  # fmt: skip
def test_choices_that_are_none(item, place):
    with pytest.raises(ToolError) as caught:
        read_choice(item, read_tools([F]))
    assert caught.value.place == place
    with pytest.raises(ToolError, match="no tools"):
        read_choice("required", [])


def test_settings_of_a_client_do_not_reach_the_grammar():
    schema = {"x-guidance": {"lenient": True, "whitespace_pattern": ".*"}, "type": "object", "properties": {}}
    made = json.loads(json_expression(schema, strict=True).removeprefix("%json "))
    assert made["x-guidance"] == whitespace_options("flexible")
    inside = {"type": "object", "properties": {"x-guidance": {"type": "string"}}}
    assert '"x-guidance": {"type": "string"}' in json_expression(inside, strict=True), "a name like any other"
    assert json.loads(json_expression({}, strict=False).removeprefix("%json "))["x-guidance"]["lenient"] is True


def test_arguments_that_a_tool_does_not_name():
    assert closed({"type": "object", "properties": {"a": {}}})["additionalProperties"] is False
    for kept in (
        {"additionalProperties": {"type": "string"}},
        {"$ref": "#/$defs/a"},
        {"anyOf": []},
        {"required": ["z"]},
    ):
        assert closed({"type": "object", **kept}) == {"type": "object", **kept}


def test_single_arguments_keep_their_definitions():
    schema = {
        "properties": {"a": {"$ref": "#/$defs/A"}, "no": False, "yes": True},
        "$defs": {"A": {}},
        "required": ["z"],
    }
    found = properties(Tool("f", parameters=schema))
    assert found["a"] == ({"$ref": "#/$defs/A", "$defs": {"A": {}}}, False)
    assert found["z"] == ({"$defs": {"A": {}}}, True) and "no" not in found and "yes" in found


def test_arguments_that_can_have_no_value_are_left_out():
    none = {"type": "boolean", "enum": ["True", "dontcare"]}
    schema = {"a": none, "b": none, "c": {"type": "integer", "enum": [1, "x"]}, "d": {"type": ["string", "null"]}}
    assert list(properties(Tool("f", parameters={"properties": schema, "required": ["b"]}))) == ["b", "c", "d"]


NULL, TEXT, LIST = {"type": "null"}, {"type": "string"}, {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "values"),
    [(TEXT, Values(True, (), ())), ({}, Values(True, (), ({},))),
     ({"type": ["string", "null"]}, Values(True, (), (NULL,))),
     ({"anyOf": [TEXT, NULL, LIST]}, Values(True, (), (NULL, LIST))), ({"enum": ["a", None, 1]}, Values(False, ("a",),
      ({"enum": [None, 1]},))), ({"const": "a"}, Values(False, ("a",), ())),
     ({"anyOf": [{"enum": ["a", "b"]}, {"const": "b"}, NULL]}, Values(False, ("a", "b"), (NULL,))),
     ({"oneOf": [TEXT, NULL]}, Values(True, (), (NULL,))), (TEXT | {"minLength": 2}, Values(True, (), (), 2)),
     (TEXT | {"maxLength": 2}, Values(False, (), (TEXT | {"maxLength": 2},))),
     ({"oneOf": [TEXT, {"const": "a"}]}, Values(False, (), ({"oneOf": [TEXT, {"const": "a"}]},))),
     ({"type": ["integer", "string"], "minimum": 1}, Values(False, (), ({"anyOf": [{"type": "integer", "minimum": 1},
      {"type": "string", "minimum": 1}]},)))],
)  # fmt: skip
def test_values_that_are_written_without_quotes(schema, values):
    def plain(found):
        """Drops the keywords that constrain nothing."""
        kept = lambda part: {key: part[key] for key in part if key not in ("title", "default", "$defs")}
        return replace(found, others=tuple(json.loads(json.dumps(found.others), object_hook=kept)))

    assert split(schema) == values
    assert plain(split(schema | {"title": "T", "default": None})) == values
    assert plain(split({"$ref": "#/$defs/it", "$defs": {"it": schema}})) == values


@pytest.mark.parametrize(
    "schema", [{"$ref": 5}, {"$ref": "#/$defs/a", "$defs": 5}, {"$ref": "#/$defs", "$defs": {"a": {}}},
               {"$ref": "x/$defs/a", "$defs": {"a": {}}}, {"enum": 5}, {"enum": []}, {"type": []}, {"type": {}},
               {"anyOf": []}, {"anyOf": [True]}, {"anyOf": 5}, {"type": "string", "minLength": "1"}],
)  # fmt: skip
def test_a_schema_that_cannot_be_split_is_one(schema):
    assert split(schema) == Values(False, (), (schema,))


def test_alternatives_do_not_multiply(monkeypatch):
    """Eight steps through fifty references each would be 4e13 schemas."""
    steps, follow = [], schemas._definition
    monkeypatch.setattr(schemas, "_definition", lambda schema: steps.append(schema) or follow(schema))
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}}
    assert split(schema).others == (schema,) and len(steps) < 200
