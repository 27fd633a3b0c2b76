"""Schemas that constrain texts in the measurements of grammars."""

from __future__ import annotations

NAMED = {"type": "string", "maxLength": 8}
RECORD = {
    "type": "object",
    "properties": {
        "first_name": NAMED,
        "occupation": {"enum": ["gardener", "engineer", "physician"]},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2026},
    },
    "required": ["first_name", "occupation", "year_of_birth"],
    "additionalProperties": False,
}
SCHEMAS = {
    "records": {"type": "array", "items": RECORD, "minItems": 500},
    "skeleton": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"short_summary": {"type": "string", "minLength": 8, "maxLength": 16}},
            "required": ["short_summary"],
            "additionalProperties": False,
        },
        "minItems": 500,
    },
    "strings": {"type": "array", "items": {"type": "string"}, "minItems": 500},
}
