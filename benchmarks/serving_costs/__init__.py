"""What benchmarks/serving.py is made of."""
