"""Models that people download, from packages of the package index: `make real`."""
