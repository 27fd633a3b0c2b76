"""Decisions: `POST /v1/systemone`."""
