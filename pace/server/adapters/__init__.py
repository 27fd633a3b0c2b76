"""LoRA adapters of a served model: named by `model` in requests, listed and loaded by `/lora-adapters`."""
