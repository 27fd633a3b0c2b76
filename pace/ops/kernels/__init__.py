"""The functions of `pace.ops.native`, by what they do: checks, then one call of C++."""
