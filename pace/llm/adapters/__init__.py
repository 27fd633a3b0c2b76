"""LoRA adapters: their weights, the slots of a loaded model that hold them, and merging them into a checkpoint."""
