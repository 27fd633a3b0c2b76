"""Parts of `pace.ops.reference`."""
