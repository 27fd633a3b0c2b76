"""`pace serve`: HTTP APIs of OpenAI and Anthropic for one model (docs/serving.md)."""
