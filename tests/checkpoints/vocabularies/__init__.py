"""Vocabularies that come in files of their own, against what their libraries make of texts."""
