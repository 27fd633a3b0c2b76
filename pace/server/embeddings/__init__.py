"""Vectors, scores and labels of texts over HTTP: `/v1/embeddings`, `/v1/rerank`, `/v1/score`, `/v1/classify`."""
