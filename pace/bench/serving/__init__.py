"""Load test of a server with OpenAI's protocol: `pace bench --serve URL`."""
