"""Decisions: the probability of each answer to a question about a state, from the logits of any chat model."""
