"""The operations that models are made of, in two implementations with the same functions.

`pace.ops.native` runs the C++ kernels; `pace.ops.reference` is plain torch, any float dtype, and the specification of
the other. A model takes one of the two as the first argument of `forward`; nothing here chooses between them.
"""
