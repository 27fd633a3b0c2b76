"""The functions of `pace.ops` in a forward pass, on symbols: each appends an instruction, which describes the operation
to a program.

A model's code calls these in place of `pace.ops.native`. All that `pace.graph` knows about an operation is in a room
of this package. The class of its instruction lists the functions that record it, and its operator. It also defines how
it is lowered to csrc/program.cpp. The functions follow the class. `pace/ops/protocol.py` has their contracts.
"""

from pace.graph.instructions import Instruction
from pace.graph.recorded.elementwise import activation, gate_, glu, scale_, softcap_  # noqa: F401
from pace.graph.recorded.heads import attention, head_layer_norm_, head_rms_norm_, rotary_, store_kv  # noqa: F401
from pace.graph.recorded.mixtures import experts, route  # noqa: F401
from pace.graph.recorded.norms import gated_norm, layer_norm, rms_norm  # noqa: F401
from pace.graph.recorded.products import add_adapters_, heads_linear, linear, linear_glu  # noqa: F401
from pace.graph.recorded.rows import concatenate, embedding, given_rows, place_rows_, pool  # noqa: F401
from pace.graph.recorded.states import causal_conv, recurrence  # noqa: F401

OPERATOR_OF = {name: kind.operator for kind in Instruction.__subclasses__() for name in kind.operations}
"""Function of `ForwardOps` -> its operator; None for products, which belong to the operator of their weight."""
