"""Batches of requests from a file, with results to a file, in OpenAI's batch form: `pace batch IN.jsonl OUT.jsonl`."""
