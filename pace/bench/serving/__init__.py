"""A load on a server that speaks as OpenAI's does, and how fast it answers: `pace bench --serve URL`."""
