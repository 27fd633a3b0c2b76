"""Memory that opening a model takes."""
