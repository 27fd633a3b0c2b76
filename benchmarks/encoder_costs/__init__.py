"""The parts of benchmarks/encoders.py."""
