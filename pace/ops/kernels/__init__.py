"""The functions of `pace.ops.native`, one module per topic: argument checks, then one call of C++."""
