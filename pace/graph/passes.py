"""Rewrites of a recorded forward pass, each from a list of instructions to a list that computes the same bits; and the
plan of its buffers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from pace.graph.instructions import (
    Attention,
    Heads,
    Instruction,
    Linear,
    Norm,
    NormHeads,
    Preparation,
    RotateHeads,
    StoreKv,
    Value,
)


def optimise(instructions: list[Instruction]) -> list[Instruction]:
    return fuse_norms(fuse_heads(instructions))


def fuse_norms(instructions: list[Instruction]) -> list[Instruction]:
    """A norm that only linears read becomes part of each of them: one barrier less.

    Where two linears read it (the attention and the MLP of a parallel block), it is computed twice, which costs less
    than waiting for it once."""
    readers = defaultdict(list)
    for instruction in instructions:
        for value in instruction.reads():
            readers[value].append(instruction)
    fused: dict[Value, Norm] = {}
    result: list[Instruction] = []
    for instruction in instructions:
        if isinstance(instruction, Norm) and all(
            _is_input(reader, instruction.out) for reader in readers[instruction.out]
        ):
            fused[instruction.out] = instruction
        elif isinstance(instruction, Linear) and instruction.x in fused:
            norm = fused[instruction.x]
            result.append(replace(instruction, x=norm.x, norm=norm.parameters))
        else:
            result.append(instruction)
    return result


def _is_input(reader: Instruction, value: Value) -> bool:
    return isinstance(reader, Linear) and reader.x is value and reader.residual is not value and reader.norm is None


def fuse_heads(instructions: list[Instruction]) -> list[Instruction]:
    """What is done to queries and keys, and storing keys and values, becomes part of the attention that follows: one
    barrier less.

    Recognised is: the norm of the queries, of the keys, the rotation of the queries, of the keys, in this order, each
    optional."""
    result: list[Instruction] = []
    for instruction in instructions:
        if not isinstance(instruction, Attention) or not result or not isinstance(result[-1], StoreKv):
            result.append(instruction)
            continue
        store = result.pop()
        before: list[NormHeads | RotateHeads] = []
        while (
            result and isinstance(result[-1], (NormHeads, RotateHeads)) and result[-1].heads in (instruction.q, store.k)
        ):
            before.insert(0, result.pop())
        preparation = _preparation(instruction.q, store, before)
        if preparation and store.layer == instruction.layer:
            result.append(replace(instruction, preparation=preparation))
        else:
            result += [*before, store, instruction]
    return result


def _preparation(q: Heads, store: StoreKv, before: list[NormHeads | RotateHeads]) -> Preparation | None:
    """`before` and `store` as one, or None where they are no case of it."""
    expected = list(before)

    def take(kind: type, heads: Heads) -> NormHeads | RotateHeads | None:
        if expected and isinstance(expected[0], kind) and expected[0].heads == heads:
            return expected.pop(0)
        return None

    query_norm, key_norm = take(NormHeads, q), take(NormHeads, store.k)
    turns = take(RotateHeads, q), take(RotateHeads, store.k)
    rotations = {turn and turn.rotation for turn in turns}
    if expected or len(rotations) > 1:
        return None
    return Preparation(
        store.k, store.v, query_norm and query_norm.parameters, key_norm and key_norm.parameters, rotations.pop()
    )


@dataclass(frozen=True)
class BufferPlan:
    """Where values live: `number[value]` is a buffer of `widths[number]` floats per token, which several values use in
    turn."""

    widths: list[int]
    number: dict[Value, int]


def plan_buffers(instructions: list[Instruction], result: Value) -> BufferPlan:
    """As few buffers as lifetimes allow; `result` gets none, for the caller provides it.

    A linear's output may take the place of its residual, which it reads element by element just before it writes."""
    last_use: dict[Value, int] = {}
    for index, instruction in enumerate(instructions):
        for value in (*instruction.reads(), *instruction.writes()):
            last_use[value] = index
    widths: list[int] = []
    number: dict[Value, int] = {}
    free: list[int] = []

    def release(index: int, instruction: Instruction) -> None:
        for value in dict.fromkeys((*instruction.reads(), *instruction.writes())):
            if last_use[value] == index and value in number and number[value] not in free:
                free.append(number[value])

    for index, instruction in enumerate(instructions):
        for value in instruction.writes():
            if value in number or value is result:
                continue
            if isinstance(instruction, Linear) and _may_replace_residual(instruction, index, last_use):
                number[value] = number[instruction.residual]
                last_use[instruction.residual] = -1  # its buffer has a new owner
            elif free:
                number[value] = free.pop(max(range(len(free)), key=lambda i: widths[free[i]]))
            else:
                number[value] = len(widths)
                widths.append(0)
            widths[number[value]] = max(widths[number[value]], value.columns)
        release(index, instruction)
    return BufferPlan(widths, number)


def _may_replace_residual(linear: Linear, index: int, last_use: dict[Value, int]) -> bool:
    residual = linear.residual
    return (
        residual is not None
        and last_use[residual] == index
        and residual is not linear.x
        and residual.per_token == linear.out.per_token
    )
