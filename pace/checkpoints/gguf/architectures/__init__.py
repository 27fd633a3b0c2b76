"""Records of the architectures of GGUF files: how their metadata and tensors become those of the Hub."""
