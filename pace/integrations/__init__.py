"""Integrations of pace into other libraries. Each is an extra: `pip install "pace-llm[NAME]"`."""
