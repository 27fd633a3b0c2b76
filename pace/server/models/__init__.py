"""Several models in one server: a pool of them by name, unloaded when idle, loaded by their next request."""
