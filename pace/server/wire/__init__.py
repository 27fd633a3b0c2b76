"""Forms in which answers go over the wire, one file each; none knows the engine."""
