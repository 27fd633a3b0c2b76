"""Vocabularies in their libraries' own file formats, against the tokens of those libraries."""
