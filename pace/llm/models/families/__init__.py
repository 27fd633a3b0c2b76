"""One file a family: its config and its layers, with the checkpoint's name of every tensor."""
