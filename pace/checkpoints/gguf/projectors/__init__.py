"""mmproj files of llama.cpp: the towers of a model, whose text part is another GGUF file. One file a family."""
