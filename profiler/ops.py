"""What is known of each op before it runs: what it writes, whether it draws random numbers, whether it can be
replayed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload

# [Note: Creation ops] Raw kernels and numpy fill storages that only a creation op made visible: `out = zeros_like(x);
# kernel[grid](x, out)` shows the mode nothing but `zeros_like`. What such an op made is never made again.
_CREATION = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "new_ones",
        "full",
        "full_like",
        "new_full",
        "scalar_tensor",
        "lift_fresh",
        "lift_fresh_copy",
    ]
)

# [Note: Hidden writers] These change their running statistics in training, though the schema does not say so. Without
# statistics to update they compute the same outputs, so a replay leaves those out.
# name -> (positions of the hidden outputs, position of the training flag)
_HIDDEN_WRITERS = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
}


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts of one overload, valid for each call of it."""

    name: str
    is_query: bool  # returns no tensor and writes none: not an op of the step
    is_mutable: bool  # the schema says that it writes an argument
    is_pure: bool  # replayable, unless the call itself says otherwise (see `draws_random`)
    is_random: bool
    written: tuple[int, ...]  # positions of arguments that it writes
    written_names: tuple[str, ...]  # names of keyword-only arguments that it writes
    hidden: tuple[int, ...]  # positions of arguments that it writes without saying so ...
    training: int  # ... if the flag at this position is true
    dropout: int  # position of `dropout_p`, -1 if it has none


@cache
def facts_of(func: OpOverload) -> OpFacts:
    """Facts of `func`, an overload such as torch.ops.aten.addmm.default. Of a higher-order op nothing is known."""
    given: object = func
    if not isinstance(given, OpOverload):
        return OpFacts(str(func), True, False, False, False, (), (), (), -1, -1)
    schema = func._schema
    namespace, _, base = schema.name.partition("::")
    arguments = schema.arguments
    writes = [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    hidden, training = _HIDDEN_WRITERS.get(base, ((), -1))
    dropout = next((i for i, a in enumerate(arguments) if a.name == "dropout_p"), -1)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    returns_tensor = any("Tensor" in str(r.type) for r in schema.returns)
    return OpFacts(
        name=str(func),
        is_query=not returns_tensor and not writes,
        is_mutable=bool(writes),
        is_pure=namespace in ("aten", "prims") and base not in _CREATION and not writes and returns_tensor,
        is_random=is_random,
        written=tuple(i for i, a in writes if not a.kwarg_only),
        written_names=tuple(a.name for _, a in writes if a.kwarg_only),
        hidden=hidden,
        training=training,
        dropout=dropout if is_random else -1,
    )


def draws_random(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call advances a generator. An attention kernel without dropout does not."""
    if not facts.is_random:
        return False
    if facts.dropout < 0:
        return True
    p = args[facts.dropout] if facts.dropout < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(p)


def written_tensors(
    facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any], *, hidden: bool = True
) -> Iterator[torch.Tensor]:
    """Tensors that this call writes, those of [Note: Hidden writers] included."""
    for i in facts.written:
        if i < len(args):
            yield from tensors_in(args[i])
        else:
            yield from tensors_in(tuple(kwargs.values()))
    for name in facts.written_names:
        yield from tensors_in(kwargs.get(name))
    if hidden and facts.hidden and args[facts.training]:
        for i in facts.hidden:
            yield from tensors_in(args[i])


def without_hidden_writes(facts: OpFacts, args: Sequence[Any]) -> tuple[Any, ...]:
    """`args` for a replay: see [Note: Hidden writers]."""
    if not facts.hidden or not args[facts.training]:
        return tuple(args)
    return tuple(None if i in facts.hidden else a for i, a in enumerate(args))


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """Tensors in an op's argument or result: a tensor, or nested lists and tuples of them."""
    return iter(flat_tensors((x,)))


def flat_tensors(xs: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors in an op's arguments, in order, those in lists and tuples included."""
    found: list[torch.Tensor] = []
    for x in xs:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found.extend(flat_tensors(x))
    return found


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def saved_by_custom_function(caller: FrameType) -> bool:
    """Whether the Python frame that called a pack hook is that of a custom autograd Function's `apply`.

    Raw kernels in such a Function may have written what it saves, unseen: fused losses put gradients where logits were.
    """
    return caller.f_code is _APPLY
