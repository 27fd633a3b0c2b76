"""KV cache in blocks of 16 positions, shared and copied on write."""

from pace.llm.cache.manager import CacheManager

__all__ = ["CacheManager"]
