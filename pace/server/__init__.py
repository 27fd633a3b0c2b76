"""`pace serve`: HTTP in the forms of OpenAI and Anthropic, in front of one model (docs/serving.md)."""
