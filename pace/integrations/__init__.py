"""pace inside other libraries, each of which is an extra: `pip install "pace-llm[NAME]"`."""
