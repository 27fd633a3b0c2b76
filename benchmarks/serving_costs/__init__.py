"""The parts of benchmarks/serving.py."""
