"""Recompute dropped activations by replaying recorded aten ops; the user's Python runs once.

[Note: How the tape works] While the model's forward runs, a dispatch mode sees each op. An op whose outputs the plan
drops becomes a `Node`: the op and references to its inputs. Autograd's saved tensors pass a pack hook: a tensor over a
storage that a node made is replaced by a `Dropped` handle (value and geometry), so its memory goes when Python lets go
of it. When backward asks for it, the nodes that lead to it from kept values run again, in their first order, without
autograd.

[Note: Need] A replayed value is cached only while it is needed: by saved tensors that backward has not asked for yet,
or by armed nodes. A node is armed while some output of it is needed and not cached. `policies/simulate.py` plays the
same rules.

[Note: Sources] A kept value that a node reads is a `Source`: an alias that shares the version counter of the original.
A write that the mode sees copies it first; a write from outside is noticed by its version, and the replay refuses.

[Note: Escapes] A detached alias can be written by numpy and raw kernels, which no mode sees. So a value that the user's
code detaches is kept from there on, and so is what custom Functions save.

A decision that does not fit the run (an op that the plan does not know, a call that never comes) keeps a value that
could have been dropped, or drops one that could have been kept. It can't change a number.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Set
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.errors import ReplayError
from memopt.flags import Flags, backend_flags, under_flags
from memopt.offload.activations import OffloadedActivations, Stored
from memopt.offload.parameters import OffloadedParameters
from memopt.offload.residency import Offloaded
from memopt.profiler.frames import ModuleFrames
from memopt.profiler.ops import (
    OpFacts,
    draws_random,
    facts_of,
    flat_tensors,
    saved_by_custom_function,
    without_hidden_writes,
    written_tensors,
)


class Fate(NamedTuple):
    """What becomes of one op's outputs, by flat position: dropped (empty: all), or sent to a store."""

    drops: tuple[int, ...] | None = None
    moves: tuple[int, ...] = ()


# Module path -> overload -> call -> fate.
Decisions = Mapping[str, Mapping[OpOverload, Mapping[int, Fate]]]
_DROP_ALL = Fate(drops=())

_DETACH = torch.ops.aten.detach.default
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_thread = threading.local()  # .replaying: true while a replay runs in this thread; .recording: the active one


class Value:
    """The content of one storage between two writes: made by a recorded node, on a store, or kept."""

    __slots__ = ("__weakref__", "cache", "need", "node", "source", "stored")

    def __init__(self, node: Node | None, stored: Stored | None = None) -> None:
        self.node, self.stored = node, stored
        self.need = 0  # saved tensors not yet asked for, and armed nodes that read it
        self.cache: torch.Tensor | None = None  # a replayed result
        self.source: weakref.ref[Source] | None = None

    @property
    def is_away(self) -> bool:
        """Whether it is given up, and replayed or reloaded when it is needed."""
        return self.node is not None or self.stored is not None

    def bring_back(self) -> None:
        """Reload or replay the content, if it is not cached."""
        if self.cache is None:
            if self.stored is not None:
                self.cache = self.stored.reload()
            else:
                _replay(self)

    def shown(self, geometry: View | Dropped) -> torch.Tensor:
        """The cached content, with the given geometry."""
        base = self.cache
        assert base is not None
        # What is reloaded begins at a page, what is replayed where it began before.
        start = int(base.storage_offset()) * base.element_size() if self.stored is not None else 0
        return _over(base, geometry, start)

    def wanted(self) -> None:
        """Count one more need. Arms the node that makes it, and so on towards the sources."""
        stack = [self]
        while stack:
            value = stack.pop()
            value.need += 1
            node = value.node
            if value.need == 1 and node is not None and not node.is_armed and value.cache is None:
                node.is_armed = True
                stack.extend(node.parents)

    def released(self) -> None:
        """Count one need less. What nobody needs is forgotten, and its makers hear of it."""
        stack = [self]
        while stack:
            value = stack.pop()
            value.need -= 1
            if value.need == 0:
                value.cache = None
                if value.node is not None:
                    stack.extend(value.node.disarmed())


class Source:
    """A kept tensor that nodes read: see [Note: Sources]."""

    __slots__ = ("__weakref__", "item", "parameters", "sample", "tensor", "version")

    def __init__(
        self, x: torch.Tensor, parameters: OffloadedParameters | None = None, item: Offloaded | None = None
    ) -> None:
        # Of an offloaded parameter the object itself is held: an alias would hold its memory.
        self.parameters, self.item = parameters, item
        self.tensor, self.version = _alias(x) if item is None else item.tensor, x._version
        # A write through `p.data` moves no version counter. Where a look costs no synchronisation, a few elements of
        # each parameter tell whether somebody scaled, averaged or swapped it.
        self.sample = _sampled(self.tensor.detach()).clone() if x.is_leaf and x.requires_grad and x.is_cpu else None

    def check(self, op: OpOverload) -> None:
        """Raise ReplayError if the content is not what the forward read."""
        t = self.tensor
        if self.item is not None and self.parameters is not None:
            self.parameters.reload(self.item)
        if t._version != self.version:
            raise ReplayError(str(op), t.shape, f"it is at version {t._version}, expected version {self.version}")
        if self.item is not None:
            t = self.item.content
        if t.untyped_storage().nbytes() == 0 and t.numel() > 0:
            raise ReplayError(str(op), t.shape, "its storage is empty")
        if self.sample is not None and not _equal_bits(_sampled(t.detach()), self.sample):
            raise ReplayError(str(op), t.shape, "its values changed behind the version counter (by `.data`?)")

    def copy_before_write(self) -> None:
        t, self.item = self.tensor.detach(), None
        own = t.untyped_storage().clone()
        self.tensor = torch.empty(0, dtype=t.dtype, device=t.device).set_(own, t.storage_offset(), t.size(), t.stride())
        self.version, self.sample = self.tensor._version, None


@functools.lru_cache(maxsize=64)
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _sampled(t: torch.Tensor) -> torch.Tensor:
    """At most 64 elements spread over the storage part that a dense tensor covers."""
    num = t.numel()
    step = max(1, num // 64)
    return t.as_strided((min(num, 64),), (step,), t.storage_offset())


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


class View:
    """An input of a node: geometry over a dropped value, or over a source."""

    __slots__ = ("dtype", "is_relative", "offset", "owner", "size", "stride")

    def __init__(self, owner: Value | Source, t: torch.Tensor) -> None:
        self.owner = owner
        self.dtype, self.size, self.stride, self.offset = t.dtype, t.size(), t.stride(), t.storage_offset()
        self.is_relative = isinstance(owner, Source) and owner.item is not None
        if self.is_relative:
            assert isinstance(owner, Source)
            self.offset -= owner.tensor.storage_offset()

    def tensor(self, op: OpOverload) -> torch.Tensor:
        owner = self.owner
        if isinstance(owner, Value):
            assert owner.cache is not None, "a replay runs in forward order"
            return owner.shown(self)
        owner.check(op)
        if self.is_relative:
            return _over_parameter(owner.tensor if owner.item is None else owner.item.content, self)
        return _over(owner.tensor, self)


def _over(base: torch.Tensor, geometry: View | Dropped, start: int = 0) -> torch.Tensor:
    """A tensor of the given geometry over the storage of `base`, whose content begins `start` bytes into it."""
    g = geometry
    offset = g.offset + start // g.dtype.itemsize
    if base.dtype is g.dtype:
        if base.storage_offset() == offset and base.size() == g.size and base.stride() == g.stride:
            return base
        return base.as_strided(g.size, g.stride, offset)
    return torch.empty(0, dtype=g.dtype, device=base.device).set_(base.untyped_storage(), offset, g.size, g.stride)


def _over_parameter(p: torch.Tensor, geometry: View | OfParameter) -> torch.Tensor:
    """A tensor of the given geometry, whose offset counts from where `p` begins now, over the memory of `p`."""
    g = geometry
    return p.detach().as_strided(g.size, g.stride, p.storage_offset() + g.offset)


class Node:
    """One recorded op: what to run, on which inputs, and which values it makes (by flat output position)."""

    __slots__ = ("args", "facts", "flags", "func", "is_armed", "kwargs", "outputs", "parents", "sequence")

    def __init__(self, func: OpOverload, facts: OpFacts, sequence: int, flags: Flags) -> None:
        self.func, self.facts, self.sequence, self.flags = func, facts, sequence, flags
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.parents: tuple[Value, ...] = ()  # dropped values that it reads
        self.outputs: list[tuple[int, weakref.ref[Value]]] = []
        self.is_armed = False

    def disarmed(self) -> tuple[Value, ...]:
        """Disarm if no output is both needed and missing; returns the values that lost a need by it."""
        if not self.is_armed:
            return ()
        for _, ref in self.outputs:
            value = ref()
            if value is not None and value.need > 0 and value.cache is None:
                return ()
        self.is_armed = False
        return self.parents

    def run(self) -> list[torch.Tensor]:
        func = self.func
        args = tuple(_given(a, func) for a in self.args)
        kwargs = {k: _given(a, func) for k, a in self.kwargs.items()}
        return flat_tensors((func(*without_hidden_writes(self.facts, args), **kwargs),))


def _given(x: Any, op: OpOverload) -> Any:
    if type(x) is View:
        return x.tensor(op)
    if type(x) is list or type(x) is tuple:
        return type(x)(_given(y, op) for y in x)
    return x


class Dropped:
    """What autograd holds in place of a dropped saved tensor."""

    __slots__ = (
        "__weakref__",
        "counter",
        "dtype",
        "is_asked",
        "kept",
        "offset",
        "original",
        "recording",
        "size",
        "storage",
        "stride",
        "value",
        "version",
    )

    def __init__(self, recording: Recording, value: Value, t: torch.Tensor) -> None:
        self.recording, self.value = recording, value
        self.dtype, self.size, self.stride, self.offset = t.dtype, t.size(), t.stride(), t.storage_offset()
        self.is_asked = False
        # An alias, emptied: it holds no memory, but goes on to share the version counter of the original.
        self.kept: torch.Tensor | None = None
        self.original, self.storage = weakref.ref(t), t.untyped_storage()._cdata
        self.version, self.counter = t._version, t.detach()
        self.counter.data = _nothing(t.dtype, t.device)

    def tensor(self) -> torch.Tensor:
        """The saved tensor, replayed if it is not cached. Raises as autograd does if it was written since."""
        if self.counter._version != self.version:
            raise _written_since(self.dtype, self.size, self.counter._version, self.version)
        original = self.kept if self.kept is not None else self.original()
        if original is not None and original.untyped_storage()._cdata != self.storage:
            return original.detach()  # `t.data = other`: plain torch would have kept the tensor itself
        was_replaying = getattr(_thread, "replaying", False)
        _thread.replaying = True  # backward may run inside a recorded forward
        try:
            with self.recording.lock, torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
                if self.is_asked:
                    self.recording.rearm()
                value = self.value
                value.bring_back()
                t = value.shown(self)
                self.is_asked = True
                value.released()
                return t
        finally:
            _thread.replaying = was_replaying


def _replay(target: Value) -> None:
    """Run the nodes that `target` needs, in the order in which the forward ran them."""
    assert target.node is not None
    found, stack = {target.node}, [target.node]
    while stack:
        for value in stack.pop().parents:
            if value.stored is not None:
                value.bring_back()
            elif value.cache is None and value.node not in found:
                assert value.node is not None
                found.add(value.node)
                stack.append(value.node)
    here = backend_flags()
    for node in sorted(found, key=lambda n: n.sequence):
        if node.flags == here:
            results = node.run()
        else:
            with under_flags(node.flags):
                results = node.run()
        for position, ref in node.outputs:
            output = ref()
            if output is not None and output.need > 0:
                output.cache = results[position]
        del results
        for value in node.disarmed():
            value.released()


class OfParameter:
    """What autograd holds in place of a saved tensor over an offloaded parameter: its geometry alone."""

    __slots__ = ("dtype", "is_itself", "item", "offset", "parameters", "size", "stride", "version")

    def __init__(self, parameters: OffloadedParameters, item: Offloaded, t: torch.Tensor) -> None:
        self.parameters, self.item, self.version = parameters, item, t._version
        self.is_itself = t is item.tensor  # autograd would hold it, and see `p.data = other`; a view would not
        self.dtype, self.size, self.stride = t.dtype, t.size(), t.stride()
        self.offset = t.storage_offset() - item.tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        """The saved tensor, over the reloaded parameter. Raises as autograd does if it was written since."""
        p = self.item.tensor
        if p._version != self.version:
            raise _written_since(self.dtype, self.size, p._version, self.version)
        self.parameters.during_backward()
        was_replaying = getattr(_thread, "replaying", False)
        _thread.replaying = True  # backward may run inside a recorded forward
        try:
            self.parameters.reload(self.item)
            with torch._C._AutoDispatchBelowAutograd():
                return p.detach() if self.is_itself else _over_parameter(self.item.content, self)
        finally:
            _thread.replaying = was_replaying


class Recording(TorchDispatchMode):
    """One forward under a plan: context in which ops are recorded and saved tensors dropped.

    Args:
        decisions: what to drop; None drops whatever can be replayed.
        paths: dotted name of each module, by identity.
        boundaries: modules, by identity, whose outputs are kept whatever the decisions are: replays end there.
        inputs: the caller's tensors. What is made from them directly is kept: loaders fill them again, unseen.
        parameters: those that are offloaded; they are reloaded before an op reads them.
        activations: takes the values that the decisions send to a store; without it they are kept.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        decisions: Decisions | None,
        paths: dict[int, str],
        boundaries: Set[int] = frozenset(),
        inputs: Iterable[torch.Tensor] = (),
        parameters: OffloadedParameters | None = None,
        activations: OffloadedActivations | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drops_all = decisions is None
        self.frames = ModuleFrames(paths, dict(decisions or {}))
        self.hooks: torch.autograd.graph.saved_tensors_hooks | None = None  # there while the forward runs
        self.parameters, self.activations = parameters, activations
        self.boundaries = boundaries
        if boundaries:
            self.frames.on_exit = self._keep_output
        self.outside = {t.untyped_storage()._cdata for t in inputs if _is_plain(t)}  # the caller keeps them alive
        self.made: set[int] = set()  # without a plan: storages whose making was seen
        self.flags = backend_flags()
        self.values: dict[int, Value] = {}
        # Offloaded parameters take turns in the same memory: theirs are not known by storage.
        self.parameter_sources: dict[int, weakref.ref[Source]] = {}
        self.weak_storages: list[Any] = []  # a storage's address is not used again while a weak reference holds it
        self.handles: list[weakref.ref[Dropped]] = []
        self.lock = threading.RLock()
        self.num_nodes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # spares 6 us per op

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # the user's compiled regions stay compiled: their numbers are not eager's

    def __enter__(self) -> Recording:
        self.frames.__enter__()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)
        self.hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        _thread.recording = self
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        _thread.recording = None
        super().__exit__(kind, e, tb)  # type: ignore[no-untyped-call]
        assert self.hooks is not None
        self.hooks.__exit__(None, None, None)
        self.hooks = None
        self.frames.__exit__(kind, e, tb)
        self.frames.on_exit = None
        # From here on only what backward will ask for stays alive: handles hold values, values nodes, nodes sources.
        self.values.clear()
        self.parameter_sources.clear()
        self.made.clear()
        for weak in self.weak_storages:
            torch.UntypedStorage._free_weak_ref(weak)
        self.weak_storages.clear()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(_thread, "replaying", False):
            return func(*args, **kwargs)
        facts = facts_of(func)
        if self.parameters is not None:
            self._reload(facts, args, kwargs)
        if facts.is_mutable or facts.hidden:
            return self._write(func, facts, args, kwargs)
        out = func(*args, **kwargs)
        if func is _DETACH:  # [Note: Escapes]
            if _is_plain(out):
                self._escape(out.untyped_storage()._cdata)
            return out
        self._follow(func, facts, args, kwargs, out)
        if self.drops_all:
            self._note_made(flat_tensors(args), flat_tensors((out,)))
        return out

    def _reload(self, facts: OpFacts, args: Any, kwargs: Any) -> None:
        assert self.parameters is not None
        for t in flat_tensors(args) + flat_tensors(kwargs.values()):
            if type(t) is nn.Parameter:
                self.parameters.use(t)
        if facts.is_mutable or facts.hidden:
            for t in written_tensors(facts, args, kwargs):
                if _is_plain(t):
                    self.parameters.changed(t.untyped_storage()._cdata)

    def _escape(self, key: int) -> None:
        """Keep a value from here on, and what of it was saved before if somebody else still holds it."""
        value = self.values.pop(key, None)
        if value is not None and value.is_away:
            for ref in self.handles:
                handle = ref()
                if handle is not None and handle.value is value:
                    handle.kept = handle.original()

    def _note_made(self, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        taken = {t.untyped_storage()._cdata for t in inputs if _is_plain(t)}
        if torch.is_grad_enabled():
            for t in inputs:  # `t.data` of a value that has a gradient
                if not t.requires_grad and t.is_floating_point() and _is_plain(t):
                    self._escape(t.untyped_storage()._cdata)
        for t in results:
            if _is_plain(t) and (key := t.untyped_storage()._cdata) not in taken and key not in self.made:
                self.made.add(key)
                self.weak_storages.append(t.untyped_storage()._weak_ref())

    def _follow(self, func: OpOverload, facts: OpFacts, args: Any, kwargs: Any, out: Any) -> None:
        """Do with an op's outputs what was decided for them."""
        fate = self._fate(func, facts)
        if fate is not None:
            if fate.drops is not None:
                self._record(func, facts, args, kwargs, out, fate.drops)
            if fate.moves and self.activations is not None:
                self._move(args, kwargs, out, fate.moves)

    def _fate(self, func: OpOverload, facts: OpFacts) -> Fate | None:
        if self.drops_all:
            return _DROP_ALL if facts.is_pure else None
        frame = self.frames.current
        calls = frame.planned.get(func) if frame.planned is not None else None
        if calls is None:
            return None
        return calls.get(frame.next_call(func)) if facts.is_pure else None

    def _move(self, args: Any, kwargs: Any, out: Any, positions: tuple[int, ...]) -> None:
        """Send fresh outputs to the store. What can't go is kept."""
        assert self.activations is not None
        if not torch.is_grad_enabled():
            return
        taken = {t.untyped_storage()._cdata for t in flat_tensors((args, kwargs)) if _is_plain(t)}
        for position, t in enumerate(flat_tensors((out,))):
            if position in positions and _is_referable(t) and t.untyped_storage()._cdata not in taken:
                stored = self.activations.offload(t)
                if stored is not None:
                    self._bind(t.untyped_storage(), Value(None, stored))

    def _write(self, func: OpOverload, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Run an op that writes its arguments: sources are copied first, and the storages hold new values after."""
        written = [t for t in written_tensors(facts, args, kwargs) if _is_plain(t)]
        keys = [t.untyped_storage()._cdata for t in written]
        for t, key in zip(written, keys, strict=True):
            value = self.values.get(key)
            ref = value.source if value is not None else None
            if self.parameters is not None and (item := self.parameters.item_of(t)) is not None:
                ref = self.parameter_sources.pop(id(item), None)
            source = ref() if ref is not None else None
            if source is not None:
                source.copy_before_write()
        out = func(*args, **kwargs)
        for key in keys:
            self.values.pop(key, None)
        if facts.hidden:  # its proper outputs can be made again without the hidden ones
            self._follow(func, facts, args, kwargs, out)
        return out

    def _record(
        self, func: OpOverload, facts: OpFacts, args: Any, kwargs: Any, out: Any, positions: tuple[int, ...]
    ) -> None:
        # Without gradient (inside a custom Function's forward, or of integers) tensors are open to writes that nobody
        # sees.
        if draws_random(facts, args, kwargs) or not torch.is_grad_enabled():
            return
        inputs = flat_tensors(args) + flat_tensors(kwargs.values()) if kwargs else flat_tensors(args)
        results = flat_tensors((out,))
        if not any(t.requires_grad for t in inputs) or not all(map(_is_referable, inputs)):
            return
        if not all(map(_is_plain, results)):
            return
        taken = {t.untyped_storage()._cdata for t in inputs}
        if not self.outside.isdisjoint(taken) or (self.drops_all and not self._are_known(inputs)):
            return
        fresh = []
        for position, t in enumerate(results):
            storage = t.untyped_storage()
            if storage._cdata in taken:
                continue
            taken.add(storage._cdata)
            if not positions or position in positions:
                fresh.append((position, storage))
        if not fresh:
            return
        flags = backend_flags()
        if flags != self.flags:
            self.flags = flags
        node = Node(func, facts, self.num_nodes, self.flags)
        self.num_nodes += 1
        parents: dict[int, Value] = {}
        node.args = tuple(self._reference(a, parents) for a in args)
        node.kwargs = {k: self._reference(a, parents) for k, a in kwargs.items()}
        node.parents = tuple(parents.values())
        for position, storage in fresh:
            value = Value(node)
            self._bind(storage, value)
            node.outputs.append((position, weakref.ref(value)))

    def _are_known(self, inputs: list[torch.Tensor]) -> bool:
        """Whether the making of each input was seen, or it is a leaf that trains: not memory that numpy shares."""
        return all(
            t.untyped_storage()._cdata in self.made or t.untyped_storage()._cdata in self.values or _is_trained(t)
            for t in inputs
        )

    def _bind(self, storage: torch.UntypedStorage, value: Value) -> None:
        self.weak_storages.append(storage._weak_ref())
        self.values[storage._cdata] = value

    def _reference(self, x: Any, parents: dict[int, Value]) -> Any:
        """What a node keeps of an argument."""
        if isinstance(x, torch.Tensor):
            if self.parameters is not None and (item := self.parameters.item_of(x)) is not None:
                return View(self._parameter_source(x, item), x)
            storage = x.untyped_storage()
            value = self.values.get(storage._cdata)
            if value is None:
                value = Value(None)
                self._bind(storage, value)
            if value.is_away:
                parents[id(value)] = value
                return View(value, x)
            source = value.source() if value.source is not None else None
            if source is None:
                source = Source(x)
                value.source = weakref.ref(source)
            return View(source, x)
        if isinstance(x, list | tuple):
            return type(x)(self._reference(y, parents) for y in x)
        return x

    def _parameter_source(self, x: torch.Tensor, item: Offloaded) -> Source:
        ref = self.parameter_sources.get(id(item))
        source = ref() if ref is not None else None
        if source is None:
            source = Source(x, self.parameters, item)
            self.parameter_sources[id(item)] = weakref.ref(source)
        return source

    def _keep_output(self, module: nn.Module, output: Any) -> None:
        if id(module) in self.boundaries:
            for t in flat_tensors((output,)):
                if _is_plain(t):
                    self.values.pop(t.untyped_storage()._cdata, None)

    def pack(self, t: torch.Tensor) -> Any:
        """Saved-tensor hook: a dropped value's tensor becomes a handle, any other stays, with its version."""
        if _is_referable(t):
            if self.parameters is not None and (item := self.parameters.item_of(t)) is not None:
                return OfParameter(self.parameters, item, t)
            value = self.values.get(t.untyped_storage()._cdata)
            if (
                value is not None
                and value.is_away
                and not getattr(_thread, "replaying", False)
                and not saved_by_custom_function(sys._getframe(1))
            ):
                with torch._C._DisableTorchDispatch():
                    handle = Dropped(self, value, t)
                value.wanted()
                self.handles.append(weakref.ref(handle))
                return handle
            # The tensor itself, as plain torch keeps it (`t.data = other` is seen) - but an output that its own node
            # saves would hold the node that holds it.
            if t.grad_fn is not None and _saves_outputs(type(t.grad_fn)):
                with torch._C._DisableTorchDispatch():
                    return (t.detach(), t._version)
            return (t, t._version)
        return t

    def rearm(self) -> None:
        """Begin another backward over the same graph: all handles that are still held count as not asked for."""
        alive = [handle for ref in self.handles if (handle := ref()) is not None]
        self.handles = [weakref.ref(handle) for handle in alive]
        for handle in alive:
            if handle.is_asked:
                handle.is_asked = False
                handle.value.wanted()


def unpack(packed: Any) -> torch.Tensor:
    """Saved-tensor hook: give back what `Recording.pack` took. Raises as autograd does if it was written since."""
    if type(packed) is Dropped or type(packed) is OfParameter:
        return packed.tensor()
    if type(packed) is tuple:
        t, version = packed
        if t._version != version:
            raise _written_since(t.dtype, t.shape, t._version, version)
        return t  # type: ignore[no-any-return]
    return packed  # type: ignore[no-any-return]


def _written_since(dtype: torch.dtype, shape: torch.Size, found: int, expected: int) -> RuntimeError:
    """Autograd's own error: saved-tensor hooks switch its check off."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}] is at version {found}; expected version {expected} instead."
    )


def _hide_from_compiler() -> None:
    """Tell dynamo to run our hooks as they are: a region that the user compiles is not to trace into them."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    hooks = (Recording.__torch_dispatch__, Recording.pack, unpack, ModuleFrames._enter, ModuleFrames._exit)
    for hook in hooks:
        set_code_exec_strategy(hook.__code__, skip)


_hide_from_compiler()


@functools.cache
def _saves_outputs(node_type: type) -> bool:
    """Whether autograd nodes of this type save what their own op returned."""
    saved = [name for name in dir(node_type) if name.startswith("_saved_")]
    known = ("_saved_result", "_saved_out", "_saved_logsumexp", "_saved_log_sumexp")
    return any(name.startswith(known) for name in saved) or issubclass(
        node_type, torch.autograd.function.BackwardCFunction
    )


def is_recording() -> bool:
    """Whether a forward under a plan runs in this thread now."""
    return getattr(_thread, "recording", None) is not None


def _is_plain(t: torch.Tensor) -> bool:
    return type(t) in _PLAIN_TYPES and t.layout is torch.strided


def _is_referable(t: torch.Tensor) -> bool:
    """Whether storage, geometry and dtype say all of `t`, and it has a version."""
    return _is_plain(t) and not t.is_neg() and not (t.is_complex() and t.is_conj()) and not t.is_inference()


def _is_trained(t: torch.Tensor) -> bool:
    base = t._base if t._base is not None else t
    return base.is_leaf and base.requires_grad


def _alias(x: torch.Tensor) -> torch.Tensor:
    """A tensor over the same storage that shares `x`'s version counter, but holds neither `x` nor its graph.

    Not `x` itself: `p.data = other` gives the object another storage.
    """
    # Inside __torch_dispatch__ a plain detach() has a version counter of its own: this key gives the shared one.
    torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.ADInplaceOrView, False)
    try:
        return x.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.ADInplaceOrView, True)
