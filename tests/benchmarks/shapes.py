"""Sizes of models for the tests of benchmarks."""

SMALL = dict(
    num_hidden_layers=2,
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
