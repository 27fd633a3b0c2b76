"""Rewrites of a recorded forward pass, and the plan of its buffers. Each rewrite returns a list of instructions that
computes the same bits."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import combinations

from torch import Tensor

from pace.graph.instructions import Columns, Heads, Instruction, Value, overlap
from pace.graph.recorded.elementwise import Glu, Scale
from pace.graph.recorded.heads import Attention, NormHeads, Preparation, RotateHeads, StoreKv
from pace.graph.recorded.mixtures import Experts, Route
from pace.graph.recorded.norms import Norm
from pace.graph.recorded.products import AddAdapters, Linear
from pace.graph.symbols import Add


def fuse(instructions: list[Instruction], result: Value) -> list[Instruction]:
    """Applies all rewrites; `result` is the value that the caller reads."""
    return fuse_norms(fuse_sums(fuse_routes(fuse_heads(fuse_adapters(instructions)))), result)


def fuse_adapters(instructions: list[Instruction]) -> list[Instruction]:
    """Merges the adapters of a product into it, and the activation of its gate. Its sums are then still in the cache,
    and gate and up are never written apart."""
    num_uses = Counter(value for instruction in instructions for value in instruction.values())
    kept: list[Instruction] = []
    for instruction in instructions:
        last = kept[-1] if kept else None
        if isinstance(last, Linear) and isinstance(instruction, AddAdapters) and _adds_to(instruction, last):
            kept[-1] = replace(last, adapters=instruction.adapters)
        elif (
            isinstance(last, Linear)
            and last.adapters
            and last.apart
            and isinstance(instruction, Glu)
            and instruction.x == last.out.whole
            and num_uses[last.out] == 3
        ):
            kept[-1] = replace(last, out=instruction.out, activation=instruction.function, apart=False)
        else:
            kept.append(instruction)
    return kept


def _adds_to(added: AddAdapters, product: Linear) -> bool:
    """True if these are the adapters of the product, and nothing comes between the two sums."""
    is_plain = product.activation is None and product.adapters is None and (product.apart or not product.weight.glu)
    return is_plain and added.y == product.out.whole and added.x == product.x and added.norm == product.norm


def fuse_routes(instructions: list[Instruction]) -> list[Instruction]:
    """Merges a routing that only experts read into each of them, which saves a barrier."""
    readers: dict[Value, list[Instruction]] = defaultdict(list)
    for instruction in instructions:
        for operand in instruction.reads():
            readers[operand.value].append(instruction)
    fused: dict[Columns, Route] = {}
    kept: list[Instruction] = []
    for instruction in instructions:
        if (
            isinstance(instruction, Route)
            and all(
                isinstance(reader, Experts) and reader.choices.value is instruction.out
                for reader in readers[instruction.out]
            )
            and instruction.logits.is_whole
        ):
            fused[instruction.out.whole] = instruction
        elif isinstance(instruction, Experts) and instruction.choices in fused:
            route = fused[instruction.choices]
            vectors = {"choice_bias": route.choice_bias, "expert_scale": route.expert_scale}
            kept.append(replace(instruction, choices=route.logits, router=route.router, **vectors))
        else:
            kept.append(instruction)
    return kept


def fuse_sums(instructions: list[Instruction]) -> list[Instruction]:
    """Merges a norm with the sum that follows it, if nothing else reads the norm, and with a factor of that sum. This
    saves barriers."""
    num_reads = Counter(operand.value for instruction in instructions for operand in instruction.reads())
    kept: list[Instruction] = []
    for instruction in instructions:
        last = kept[-1] if kept else None
        if isinstance(instruction, Add) and isinstance(last, Norm) and num_reads[last.out] == 1:
            others = [term for term in (instruction.a, instruction.b) if term.value is not last.out]
            if len(others) == 1 and last.residual is None:
                kept[-1] = replace(last, out=instruction.out, residual=others[0])
                continue
        if isinstance(instruction, Scale) and isinstance(last, Norm) and instruction.x == last.out.whole:
            if last.residual is not None and last.factor == 1.0 and not isinstance(instruction.factor, Tensor):
                kept[-1] = replace(last, factor=instruction.factor)
                continue
        kept.append(instruction)
    return kept


def fuse_norms(instructions: list[Instruction], result: Value) -> list[Instruction]:
    """Merges a norm that only products read into each of them, which saves a barrier.

    If two products read it (attention and MLP of a parallel block), it is computed twice, which costs less than waiting
    for it once."""
    readers: dict[Value, list[int]] = defaultdict(list)
    for index, instruction in enumerate(instructions):
        for value in instruction.values():
            readers[value].append(index)
    fused: dict[Columns, Norm] = {}
    kept: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        is_inner = isinstance(instruction, Norm) and instruction.out is not result and instruction.residual is None
        if is_inner and _can_wait(instructions, index, readers[instruction.out][1:]):
            fused[instruction.out.whole] = instruction
        elif isinstance(instruction, (Linear, Experts, AddAdapters)) and instruction.x in fused:
            norm = fused[instruction.x]
            kept.append(replace(instruction, x=norm.x, norm=norm.parameters))
        else:
            kept.append(instruction)
    return kept


def _can_wait(instructions: list[Instruction], index: int, readers: list[int]) -> bool:
    """True if the instructions that read the norm at `index` can compute it. They must be products without a norm, and
    nothing may change the norm's input before them."""
    norm = instructions[index]
    if not all(_multiplies(instructions[reader], norm.out) for reader in readers):
        return False
    between = instructions[index + 1 : max(readers, default=index)]
    return not any(changed and overlap(changed, norm.x) for changed in (other.changes() for other in between))


def _multiplies(reader: Instruction, value: Value) -> bool:
    """True if `reader` is a product without a norm whose x is the whole value, and the value is not its residual."""
    if isinstance(reader, AddAdapters):
        return reader.norm is None and reader.x == value.whole and reader.y.value is not value
    return (
        isinstance(reader, (Linear, Experts))
        and reader.norm is None
        and reader.x == value.whole
        and (reader.residual is None or reader.residual.value is not value)
    )


def fuse_heads(instructions: list[Instruction]) -> list[Instruction]:
    """Merges the preparation of queries, keys and values, and the cache write, into the attention that follows, which
    saves a barrier.

    Recognised are the norms of queries and keys, then their rotations, each optional, or the rotations before the
    norms. The norm of the values may be anywhere among them. A layer that stores nothing has only those of queries. The
    prepared heads need not be written back, so nothing else may read them later. Queries, keys and values must not
    share columns."""
    result: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        if not isinstance(instruction, Attention):
            result.append(instruction)
            continue
        store = result.pop() if result and isinstance(result[-1], StoreKv) else None
        own = [instruction.q, *([store.k, store.v] if store else [])]
        before: list[NormHeads | RotateHeads] = []
        while result and isinstance(result[-1], (NormHeads, RotateHeads)) and result[-1].heads in own:
            before.insert(0, result.pop())
        preparation = _preparation(instruction.q, store, before)
        if (
            preparation
            and (store is None or store.layer == instruction.layer)
            and _are_private(instruction, own, preparation, instructions[index + 1 :])
        ):
            result.append(replace(instruction, preparation=preparation))
        else:
            result += [*before, *([store] if store else []), instruction]
    return result


def _preparation(q: Heads, store: StoreKv | None, before: list[NormHeads | RotateHeads]) -> Preparation | None:
    """Combines `before` and `store`, or returns None if they do not match the pattern, or if there is nothing to
    combine."""
    k, v = (store.k, store.v) if store else (None, None)
    of_values = [change for change in before if change.heads == v]
    expected = [change for change in before if change.heads != v]
    if len(of_values) > 1 or not all(isinstance(change, NormHeads) for change in of_values) or not (store or before):
        return None

    def take(kind: type, heads: Heads | None) -> NormHeads | RotateHeads | None:
        if expected and isinstance(expected[0], kind) and expected[0].heads == heads:
            return expected.pop(0)
        return None

    norm_last = bool(expected) and isinstance(expected[0], RotateHeads) and isinstance(expected[-1], NormHeads)
    found: dict[type, tuple] = {}
    for kind in (RotateHeads, NormHeads) if norm_last else (NormHeads, RotateHeads):
        found[kind] = take(kind, q), take(kind, k)
    rotations = {turn and turn.rotation for turn in found[RotateHeads][: 2 if store else 1]}
    if expected or len(rotations) > 1:
        return None
    norms = [norm and norm.parameters for norm in found[NormHeads]]
    value_norm = of_values[0].parameters if of_values else None
    return Preparation(k, v, *norms, rotations.pop(), norm_last, value_norm)


def _are_private(attention: Attention, own: list[Heads], preparation: Preparation, later: list[Instruction]) -> bool:
    """True if queries, keys and values (`own`) do not overlap, and nothing else reads the prepared heads."""
    if any(overlap(one, other) for one, other in combinations(own, 2)):
        return False
    prepared = own if preparation.value_norm else own[:2]
    others = [attention.latent_q] if attention.latent_q else []
    others += [read for other in later for read in other.reads()]
    return not any(overlap(read, heads) for read in others for heads in prepared)


@dataclass(frozen=True)
class BufferPlan:
    """Assignment of values to buffers: `number[value]` is a buffer of `widths[number]` floats per token. Several values
    use a buffer in turn."""

    widths: list[int]
    number: dict[Value, int]


def plan_buffers(instructions: list[Instruction], result: Value) -> BufferPlan:
    """Assigns values to buffers, reusing buffers whose values are no longer read. `result` gets none, because the
    caller provides its memory.

    A product's output may use the buffer of its residual: it reads each element of the residual just before it writes
    that element."""
    last_use: dict[Value, int] = {}
    for index, instruction in enumerate(instructions):
        for value in instruction.values():
            last_use[value] = index
    widths: list[int] = []
    number: dict[Value, int] = {}
    free: list[int] = []

    def release(index: int, instruction: Instruction) -> None:
        for value in instruction.values():
            if last_use[value] == index and value in number and number[value] not in free:
                free.append(number[value])

    for index, instruction in enumerate(instructions):
        value = instruction.makes()
        if value and value is not result:
            if isinstance(instruction, (Linear, Experts)) and _may_replace_residual(instruction, index, last_use):
                number[value] = number[instruction.residual.value]
                last_use[instruction.residual.value] = -1  # the buffer has a new owner
            elif free:
                number[value] = free.pop(max(range(len(free)), key=lambda i: widths[free[i]]))
            else:
                number[value] = len(widths)
                widths.append(0)
            widths[number[value]] = max(widths[number[value]], value.columns)
        release(index, instruction)
    return BufferPlan(widths, number)


def _may_replace_residual(product: Linear | Experts, index: int, last_use: dict[Value, int]) -> bool:
    if product.residual is None:
        return False
    residual = product.residual.value
    is_read_otherwise = sum(operand.value is residual for operand in product.reads()) > 1
    return last_use[residual] == index and not is_read_otherwise and residual.per_token == product.out.per_token
