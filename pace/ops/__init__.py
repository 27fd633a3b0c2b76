"""The operations that models are made of, in two implementations with the same functions.

`pace.ops.native` runs the C++ kernels; `pace.ops.reference` is plain torch, any float dtype, and the specification of
the other. `pace.ops.protocol` says what each function promises. A model is made with one of the two; nothing here
chooses between them.
"""
