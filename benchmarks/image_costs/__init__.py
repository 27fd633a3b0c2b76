"""The parts of benchmarks/images.py."""
