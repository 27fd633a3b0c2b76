"""A file of requests answered into a file of results, in OpenAI's batch form: `pace batch IN.jsonl OUT.jsonl`."""
