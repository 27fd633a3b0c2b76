"""Schemas of requests, one file for each kind (pydantic)."""
