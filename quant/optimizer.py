"""The user's own optimizer over 8-bit states: tile by tile decode, step, encode, while the tile is in cache.

The optimizer steps flat tiles of a parameter as if they were parameters. That this gives what stepping the whole gives
is not believed but tried, as is which states are signed: `codecs_of` steps a small parameter of its own both ways.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from memopt.errors import NonFiniteGradientError, UnsupportedError
from memopt.quant.codec import VERSION, Codec, Coded, decode, encode
from memopt.quant.sizes import BLOCK, LEAST_CODED, TILE, num_blocks
from memopt.quant.team import Team
from memopt.stepping import (
    Attached,
    Groups,
    blank_copy,
    core_step,
    is_torchs_own,
    roll_dice_again,
    same_dice,
    value_of,
)

FORMAT = "memopt.8bit_states"
_MOST = 1e18  # of a gradient: its square is a float32
_CODES, _SCALES = ".codes", ".scales"


class CodedState(dict[str, Any]):
    """The state of one parameter: torch's entries, those in 8 bits as `<name>.codes` and `<name>.scales`.

    Copies and pickles are plain dicts with float32 tensors again.
    """

    def __init__(self, like: torch.Tensor, names: Sequence[str]) -> None:
        super().__init__()
        self.size, self.stride, self.numel, self.device = like.size(), like.stride(), like.numel(), like.device
        self.names = tuple(names)  # in torch's order
        self.kinds: dict[str, tuple[Codec, torch.dtype]] = {}

    def add(self, name: str, codec: Codec, dtype: torch.dtype) -> None:
        coded = Coded.empty(codec, self.numel, self.device)
        self.kinds[name] = codec, dtype
        self[name + _CODES], self[name + _SCALES] = coded.codes, coded.scales

    def coded(self, name: str) -> Coded:
        return Coded(self.kinds[name][0], self[name + _CODES], self[name + _SCALES])

    def __missing__(self, name: str) -> Any:
        if name in self.kinds:
            raise KeyError(f"{name} is kept in 8 bits: read it from optimizer.state_dict()")
        raise KeyError(name)

    def plain(self) -> dict[str, Any]:
        """What torch's optimizer would keep; the tensors are new."""
        return {name: self._decoded(name) if name in self.kinds else self[name] for name in self.names}

    def _decoded(self, name: str) -> torch.Tensor:
        return _whole(self.coded(name), self.kinds[name][1]).as_strided(self.size, self.stride)

    def compact(self) -> dict[str, Any]:
        """As `plain`, with the codes themselves."""
        return {name: self._described(name) if name in self.kinds else self[name] for name in self.names}

    def _described(self, name: str) -> dict[str, Any]:
        codec, dtype = self.kinds[name]
        return {
            "format": FORMAT,
            "version": VERSION,
            "codec": codec.value,
            "dtype": str(dtype).removeprefix("torch."),
            "size": list(self.size),
            "stride": list(self.stride),
            "codes": self[name + _CODES],
            "scales": self[name + _SCALES],
        }

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.plain(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return copy.deepcopy(self.plain(), memo)
        return {  # a profiler's copy has sizes, no values
            name: torch.empty_strided(self.size, self.stride, dtype=self.kinds[name][1])
            if name in self.kinds
            else copy.deepcopy(self[name], memo)
            for name in self.names
        }


class _Work:
    """Float32 buffers for one tile."""

    def __init__(self, numel: int, num_states: int, device: torch.device) -> None:
        self.device = device
        self._length = BLOCK * num_blocks(min(numel, TILE))
        self._memory = torch.empty((num_states + 1) * self._length, device=device)

    def buffer(self, i: int, numel: int) -> torch.Tensor:
        """Memory of whole blocks for `numel` elements of the i-th state."""
        return self._memory[i * self._length :][: BLOCK * num_blocks(numel)]

    def spare(self, numel: int) -> torch.Tensor:
        return self._memory[-self._length :][: BLOCK * num_blocks(numel)]


def _tiles(numel: int, length: int) -> list[tuple[int, int]]:
    return [(start, min(start + length, numel)) for start in range(0, numel, length)]


@dataclass(frozen=True, slots=True)
class _Tile:
    """A flat part of a parameter, with its part of the gradient, to be stepped as if it were a parameter."""

    values: torch.Tensor
    start: int
    stop: int


def _tiles_of(p: torch.Tensor, length: int) -> list[_Tile]:
    assert p.grad is not None
    values, gradient = _flat(p, p), _flat(p.grad, p)
    found = []
    for start, stop in _tiles(p.numel(), length):
        found.append(_Tile(values[start:stop], start, stop))
        found[-1].values.grad = gradient[start:stop]
    return found


def _without_states(optimizer: Optimizer) -> Optimizer:
    """A copy of the object for one thread, to be shown tiles."""
    own: Optimizer = object.__new__(type(optimizer))
    own.__dict__.update(optimizer.__dict__)
    own.state = defaultdict(dict)
    return own


class QuantizedOptimizer:
    """An optimizer whose states are in 8 bits. `install` and `remove` change the object itself.

    Args:
        optimizer: any torch optimizer that treats each element on its own: `codecs_of` says whether it does.
        codecs: of its states, by name.
        names: those of the parameters whose states are coded, by identity.
        nonfinite: "skip" leaves a step out whose gradients are not all finite, "raise" raises NonFiniteGradientError;
            nothing is changed either way.
        note: takes a line of text about what happened.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        codecs: Mapping[str, Codec],
        names: Mapping[int, str],
        nonfinite: str,
        note: Callable[[str], None],
    ) -> None:
        self.optimizer, self.codecs, self.names, self.nonfinite, self.note = optimizer, codecs, names, nonfinite, note
        self.num_skipped = 0
        self._core = core_step(optimizer)
        self._team = Team()
        self._hooks: list[Any] = []
        self._attached: Attached | None = None

    # On and off the object

    def install(self, is_stepper: bool = True) -> None:
        """Encode what is there. Without `is_stepper` another one calls `admits` and `core`."""
        optimizer = self.optimizer
        self._hooks = [
            optimizer.register_state_dict_post_hook(_as_plain),
            optimizer.register_load_state_dict_pre_hook(lambda _, found: expanded(found)),
            optimizer.register_load_state_dict_post_hook(lambda _: self.loaded()),
        ]
        if is_stepper:
            self._attached = Attached(optimizer, self)
        self.loaded()

    def remove(self) -> None:
        """Put the object back; its states are torch's own again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._attached is not None:
            self._attached.remove()
            self._attached = None
        self._team.close()
        state = self.optimizer.state
        for p, own in list(state.items()):
            if isinstance(own, CodedState):
                state[p] = own.plain()

    def loaded(self) -> None:
        """Encode the states that are in full precision. Raises ValueError if one is not finite."""
        state = self.optimizer.state
        for p, own in list(state.items()):
            if id(p) in self.names and own and not isinstance(own, CodedState) and self._can_be_coded(p):
                for name, t in own.items():
                    if _is_like(t, p) and not bool(torch.isfinite(t).all()):
                        raise ValueError(f"{name} of {self.names[id(p)]} is not finite: it has no 8-bit code")
                state[p] = self._encoded(p, own)

    def _encoded(self, p: torch.Tensor, own: dict[str, Any]) -> CodedState:
        made = CodedState(p, list(own))
        chosen = [name for name, t in own.items() if _is_like(t, p) and name in self.codecs]
        flat = {name: _flat(own[name], p) for name in chosen}
        made.update((name, x) for name, x in own.items() if name not in chosen)
        work = _Work(p.numel(), 1, p.device)
        for name in chosen:
            made.add(name, self.codecs[name], own[name].dtype)
        for start, stop in _tiles(p.numel(), TILE):
            for name in chosen:
                _write(flat[name][start:stop], work, 0, made.coded(name).part(start, stop))
        return made

    def _can_be_coded(self, p: torch.Tensor) -> bool:
        return id(p) in self.names and can_be_coded(p) and (p.grad is None or p.grad.layout is torch.strided)

    # The step

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """One optimizer step. Returns the closure's value, None without one."""
        value = value_of(closure)
        if self.admits():
            self.core(self.optimizer)
        return value

    def admits(self) -> bool:
        """Whether all gradients are finite: the step may be taken. Raises NonFiniteGradientError if so chosen."""
        if getattr(self.optimizer, "found_inf", None) is not None:
            return True  # a GradScaler has looked, and the kernel itself leaves the step out
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and not _is_finite(p.grad, _MOST if id(p) in self.names else torch.inf):
                    part = self.names.get(id(p), f"a parameter of shape {list(p.shape)}")
                    if self.nonfinite == "raise":
                        raise NonFiniteGradientError(part)
                    self.num_skipped += 1
                    self.note(f"a step was left out: the gradient of {part} is not finite")
                    return False
        return True

    def core(self, optimizer: Optimizer) -> None:
        """Step what the optimizer shows: parameters with 8-bit states tile by tile, the rest as its class does."""
        groups = optimizer.param_groups
        shown = [group["params"] for group in groups]
        coded = [[p for p in params if p.grad is not None and self._can_be_coded(p)] for params in shown]
        rest = [[p for p in params if p.grad is None or not self._can_be_coded(p)] for params in shown]
        parts = Groups(optimizer, self._core)
        try:
            as_they_are = {i: rest[i] for i in range(len(groups)) if rest[i] or not coded[i]}
            if as_they_are or not groups:
                parts.step_shown(as_they_are, is_last=not any(coded))
            if self._team.num > 1 and is_torchs_own(optimizer):
                coded = self._step_together(parts, coded)
            num_left = sum(len(_tiles(p.numel(), TILE)) for params in coded for p in params)

            def step(i: int, tile: torch.Tensor) -> None:
                nonlocal num_left
                num_left -= 1
                parts.step_shown({i: [tile]}, is_last=num_left == 0)

            for i, params in enumerate(coded):
                work: _Work | None = None
                largest = max((p.numel() for p in params), default=0)
                for p in params:
                    if work is None or work.device != p.device:
                        work = _Work(largest, self._num_states, p.device)
                    self._step_tiles(p, work, functools.partial(step, i))
        finally:
            parts.restore()

    @property
    def _num_states(self) -> int:
        return max(1, len(self.codecs))

    def _step_tiles(self, p: torch.Tensor, work: _Work, step: Callable[[torch.Tensor], None]) -> None:
        """Step `p` tile by tile, each with its part of the gradient and the state."""
        state = self.optimizer.state
        if state.get(p) and not isinstance(state[p], CodedState):
            state[p] = self._encoded(p, state[p])  # somebody put it there
        own = state.get(p)
        made = own if isinstance(own, CodedState) else None
        is_new = made is None
        rest: dict[str, Any] = {}
        for tile in _tiles_of(p, TILE):
            new = self._stepped(tile, None if is_new else made, state, work, step)
            if made is None:
                made = CodedState(p, list(new))
                for name, t in new.items():
                    if name in self.codecs and _is_like(t, tile.values):
                        made.add(name, self.codecs[name], t.dtype)
            rest = self._coded(tile, made, new, work)
        if made is not None:
            made.update(rest)
            state[p] = made

    def _step_together(self, parts: Groups, coded: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Step those that have 8-bit states already on several threads at once. Returns the others.

        Each thread has a copy of the optimizer object to show a tile to, and runs its kernels alone: threads that meet
        once in a tile lose less than threads that meet in each of its forty kernels.
        """
        state, team = self.optimizer.state, self._team
        most = max((p.numel() for params in coded for p in params), default=0)
        length = BLOCK * num_blocks(-(-min(most, TILE) // team.num))  # all buffers together are as one thread's
        jobs: deque[tuple[int, CodedState, _Tile]] = deque()
        left: list[list[torch.Tensor]] = []
        for i, params in enumerate(coded):
            left.append([])
            for p in params:
                own = state.get(p)
                if isinstance(own, CodedState) and p.device.type == "cpu":
                    jobs += [(i, own, tile) for tile in _tiles_of(p, length)]
                else:
                    left[-1].append(p)
        if not jobs:
            return left
        works = [_Work(length, self._num_states, torch.device("cpu")) for _ in range(team.num)]  # also freed here
        free = list(works)
        rests: dict[int, tuple[CodedState, dict[str, Any]]] = {}  # by identity of the state
        settings: dict[int, dict[str, Any]] = {}

        def work() -> None:
            own, buffers = _without_states(self.optimizer), free.pop()

            def step(i: int, tile: torch.Tensor) -> None:
                own.param_groups = [{"params": [tile], **{k: copy.copy(v) for k, v in parts.before[i].items()}}]
                self._core(own)
                settings[i] = {k: v for k, v in own.param_groups[0].items() if k != "params"}

            while jobs:
                try:
                    i, made, tile = jobs.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    new = self._stepped(tile, made, own.state, buffers, functools.partial(step, i))
                    rests[id(made)] = made, self._coded(tile, made, new, buffers)
                except BaseException:
                    jobs.clear()
                    raise

        team.run(work)
        for made, rest in rests.values():  # the same after each tile
            made.update(rest)
        parts.settle(settings)
        return left

    def _stepped(
        self,
        tile: _Tile,
        made: CodedState | None,
        state: dict[torch.Tensor, Any],
        work: _Work,
        step: Callable[[torch.Tensor], None],
    ) -> dict[str, Any]:
        """Step one tile with its part of the state, None for a new one. Returns the state that the step left."""
        if made is not None:
            state[tile.values] = self._decoded(made, tile, work)
        try:
            step(tile.values)
        finally:
            new: dict[str, Any] = state.pop(tile.values, {})
        return new

    def _coded(self, tile: _Tile, made: CodedState, new: dict[str, Any], work: _Work) -> dict[str, Any]:
        """Encode the tile's part of the state. Returns what is not coded of it."""
        for i, name in enumerate(made.kinds):
            _write(new[name], work, i, made.coded(name).part(tile.start, tile.stop))
        return {name: x for name, x in new.items() if name not in made.kinds}

    def _decoded(self, made: CodedState, tile: _Tile, work: _Work) -> dict[str, Any]:
        """The state of one tile: coded parts in the buffers, the others as they were before the first tile."""
        number = {name: i for i, name in enumerate(made.kinds)}
        found: dict[str, Any] = {}
        for name in made.names:
            if name in number:
                buffer = _read(made.coded(name).part(tile.start, tile.stop), work, number[name])
                found[name] = buffer.to(made.kinds[name][1])
            else:
                x = made[name]
                found[name] = x.clone() if isinstance(x, torch.Tensor) else copy.copy(x)
        return found


def can_be_coded(p: torch.Tensor) -> bool:
    """Whether the states of `p` can be in 8 bits: it is dense, a float, and not small."""
    return (
        type(p) in (torch.Tensor, torch.nn.Parameter)
        and p.layout is torch.strided
        and p.device.type in ("cpu", "cuda")
        and p.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and p.numel() >= LEAST_CODED
        and torch.ops.aten.is_non_overlapping_and_dense.default(p)
    )


def _is_like(t: Any, p: torch.Tensor) -> bool:
    return isinstance(t, torch.Tensor) and t.shape == p.shape and t.is_floating_point() and t.dim() > 0


def _flat(t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The elements of `t` in the order of the memory of `p`; a copy if it lies otherwise."""
    t = t.detach()
    if t.stride() != p.stride():
        t = torch.empty_strided(p.size(), p.stride(), dtype=t.dtype, device=t.device).copy_(t)
    return t.as_strided((t.numel(),), (1,), t.storage_offset())


def _whole(coded: Coded, dtype: torch.dtype) -> torch.Tensor:
    """All of a state, flat."""
    numel, device = coded.codes.numel(), coded.codes.device
    whole, work = torch.empty(numel, dtype=dtype, device=device), _Work(numel, 1, device)
    for start, stop in _tiles(numel, TILE):
        whole[start:stop].copy_(_read(coded.part(start, stop), work, 0))
    return whole


def _read(coded: Coded, work: _Work, i: int) -> torch.Tensor:
    """Decode a tile's state into the i-th buffer."""
    numel = coded.codes.numel()
    buffer = work.buffer(i, numel)
    decode(coded, buffer, work.spare(numel))
    return buffer[:numel]


def _write(x: torch.Tensor, work: _Work, i: int, into: Coded) -> None:
    """Encode a tile's state; it is copied to the i-th buffer unless it is there."""
    buffer = work.buffer(i, x.numel())
    if x.data_ptr() != buffer.data_ptr():
        buffer[: x.numel()].copy_(x.view(-1))
        buffer[x.numel() :].zero_()
    encode(buffer, into, work.spare(x.numel()))


def _is_finite(g: torch.Tensor, most: float) -> bool:
    if g.layout is not torch.strided:
        g = g.coalesce().values()
    if g.numel() == 0:
        return True
    low, high = torch.aminmax(g.detach())
    return bool(low >= -most) and bool(high <= most) and bool(torch.isfinite(low)) and bool(torch.isfinite(high))


# Checkpoints


def _as_plain(optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    state = {key: own.plain() if isinstance(own, CodedState) else own for key, own in found["state"].items()}
    return {**found, "state": state}


def compact_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with 8-bit states as they are: a quarter of the bytes.

    It loads into an optimizer whose states are in 8 bits; for a plain one, `expanded` makes torch's format of it.
    """
    found = optimizer.state_dict()
    index = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    state = {}
    for key, own in found["state"].items():
        mine = optimizer.state.get(index[key]) if key in index else None
        state[key] = mine.compact() if isinstance(mine, CodedState) else own
    return {**found, "state": state}


def expanded(found: dict[str, Any]) -> dict[str, Any]:
    """A `compact_state_dict` in torch's own format; any other state dict as it is.

    Raises ValueError for codes of a version that is not known.
    """
    state = {key: _expanded(own) if isinstance(own, dict) else own for key, own in found["state"].items()}
    return {**found, "state": state}


def _expanded(own: dict[str, Any]) -> dict[str, Any]:
    return {name: _of_description(x) if _is_description(x) else x for name, x in own.items()}


def _is_description(x: Any) -> bool:
    return isinstance(x, dict) and x.get("format") == FORMAT


def _of_description(x: dict[str, Any]) -> torch.Tensor:
    if x["version"] != VERSION:
        raise ValueError(f"8-bit states of version {x['version']}: this memopt reads version {VERSION}")
    coded = Coded(Codec(x["codec"]), x["codes"], x["scales"])
    return _whole(coded, getattr(torch, x["dtype"])).as_strided(x["size"], x["stride"])


# Whether an optimizer can have 8-bit states


def codecs_of(optimizer: Optimizer) -> dict[str, Codec]:
    """The codec of each state that this optimizer keeps for each element, by name; empty if it keeps none.

    Raises UnsupportedError if it does not treat each element on its own. Tried on copies; the optimizer is left alone.
    """
    name = type(optimizer).__name__
    try:
        with same_dice():
            whole, pieces = _probe(optimizer, [(0, 960)]), _probe(optimizer, [(0, 512), (512, 960)])
    except Exception as e:
        raise UnsupportedError(f"8-bit states of {name}", f"it can't be stepped on a small parameter: {e}") from e
    for a, b in zip(whole, pieces, strict=True):
        if a.keys() != b.keys() or not all(torch.allclose(a[k], b[k], rtol=1e-4, atol=1e-7) for k in a):
            raise UnsupportedError(
                f"8-bit states of {name}", "a parameter stepped in pieces becomes another: it looks beyond the element"
            )
    last = whole[-1]
    found: dict[str, Codec] = {}
    for state in last.keys() - {_VALUES}:
        steps = [kept[state] for kept in whole]
        if any(bool((t < 0).any()) for t in steps):
            found[state] = Codec.SIGNED
        elif all(bool((b >= a).all()) for a, b in itertools.pairwise(steps)):
            found[state] = Codec.ACCUMULATOR
        else:
            found[state] = Codec.NON_NEGATIVE
    return found


_VALUES = ""  # the parameters themselves, beside the names of their states


def _probe(optimizer: Optimizer, pieces: Sequence[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
    """Values and states of one parameter, put together from its pieces, after each of some steps of a copy."""
    own = blank_copy(optimizer)
    roll_dice_again()
    generator = torch.Generator().manual_seed(0)
    parts: list[list[torch.Tensor]] = []
    for group in own.param_groups:
        whole = torch.randn(24, 40, generator=generator)
        flat = whole.view(-1)
        parts.append([whole] if len(pieces) == 1 else [flat[a:b].clone() for a, b in pieces])
        group["params"] = [t.requires_grad_() for t in parts[-1]]
    core = core_step(own)
    found: list[dict[str, torch.Tensor]] = []
    for scale in (1.0, 1.0, 1e-2, 1.0, 1e-2):
        for params in parts:
            gradient = torch.randn(24, 40, generator=generator) * scale
            for p, (a, b) in zip(params, pieces, strict=True):
                p.grad = gradient.view(-1)[a:b].view_as(p).clone()
        core(own)
        kept: dict[str, list[torch.Tensor]] = {}
        for params in parts:
            for p in params:
                kept.setdefault(_VALUES, []).append(p.detach().reshape(-1).clone())
                for state, t in own.state[p].items():
                    if isinstance(t, torch.Tensor) and t.shape == p.shape:
                        kept.setdefault(state, []).append(t.detach().reshape(-1).float())
                    elif isinstance(t, torch.Tensor) and t.numel() > 1:
                        raise ValueError(f"its state {state} has a shape of its own")
        found.append({state: torch.cat(ts) for state, ts in kept.items()})
    return found
