"""The operations of a model's forward pass and of sampling, in two implementations with the same functions.

`pace.ops.native` runs the C++ kernels. `pace.ops.reference` is plain torch for any float dtype, and the specification
of the native functions. `pace.ops.protocol` states the contract of each function. A model is made with one of the two;
nothing here chooses between them.
"""
