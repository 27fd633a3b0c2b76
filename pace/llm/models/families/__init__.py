"""One file per family: its config and its layers, with the checkpoint's name of every tensor."""
