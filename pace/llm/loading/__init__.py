"""Loading: from the name of a checkpoint to a model with its weights. `load` has the entry points."""
