"""HTTP: the port, connections and their limits, access control, and ASGI helpers for routes."""
