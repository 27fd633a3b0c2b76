"""GGUF files of BLOOM, Falcon, MPT, OLMo 1, StarCoder and Apertus."""
