"""HTTP itself: the port, connections and their bounds, who may ask, and what routes need of ASGI."""
