"""The user's own optimizer, stepped in place bucket by bucket: read bucket i + 1 | step i | write i - 1.

A torch optimizer steps the parameters in its `param_groups`. Shown one bucket at a time, the states, gradients and
parameters of the other buckets can be on a store. Class, schedulers, hyper-parameters, hooks and `state_dict` stay what
they were. That the results are the same is not believed but tried: `is_per_parameter` steps a few small parameters of
its own both ways.
"""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memopt.errors import StoreError
from memopt.offload.gradients import OffloadedGradients
from memopt.offload.parameters import OffloadedParameters
from memopt.offload.residency import (
    Buffers,
    Offloaded,
    Retired,
    bytes_of,
    can_be_away,
    in_file_order,
    is_alone,
    runs_of,
)
from memopt.offload.sizes import buckets_of, stored_bytes
from memopt.offload.store import Store, Transfer, aligned_empty

ATTRIBUTE = "_memopt_step"


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters that are stepped together, and the part of their state that is away."""

    parameters: list[torch.Tensor]
    num_bytes: int  # that stepping it brings into memory
    items: list[Offloaded] = field(default_factory=list)
    gradients: set[int] = field(default_factory=set)  # which items (by identity) are gradients
    buffer: torch.Tensor | None = None
    transfers: list[Transfer] = field(default_factory=list)


class BucketedOptimizer:
    """An optimizer whose states live on a store, stepped in buckets. `install` and `remove` change the object itself.

    Args:
        optimizer: any torch optimizer that treats each parameter on its own: ask `why_not_bucketed` before.
        away: the parameters (by identity) whose states are kept on the store.
        store: where to.
        bucket_bytes: how much of parameters, gradients and states a bucket may bring into memory.
        num_buckets: how many may be in memory at a time: one to step, two to read the next meanwhile, three to write
            the last one meanwhile.
        parameters, gradients: those that are away too, if any.
        note: takes a line of text about what was not followed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        away: set[int],
        store: Store,
        bucket_bytes: int,
        num_buckets: int,
        parameters: OffloadedParameters | None,
        gradients: OffloadedGradients | None,
        note: Callable[[str], None],
    ) -> None:
        self.optimizer, self.away, self.store = optimizer, away, store
        self.bucket_bytes, self.num_buckets = bucket_bytes, num_buckets
        self.parameters, self.gradients, self.note = parameters, gradients, note
        self.items: dict[tuple[int, str], Offloaded] = {}  # states, by identity of the parameter and key
        self._retired = Retired(store)
        self._buffers = Buffers()
        self._buffer_bytes = 0
        self._full: str | None = None

    # On and off the object

    def install(self) -> None:
        """Let `optimizer.step` step in buckets. States that are there already go to the store."""
        optimizer = self.optimizer
        self._before = optimizer.__dict__.get("step")
        optimizer.__dict__[ATTRIBUTE] = self
        optimizer.__dict__["step"] = types.MethodType(_step, optimizer)
        self._load_hook = optimizer.register_load_state_dict_post_hook(_offload_loaded)
        self.offload_states()

    def remove(self) -> None:
        """Put the object back; its states get ordinary memory again."""
        optimizer = self.optimizer
        if optimizer.__dict__.get(ATTRIBUTE) is not self:
            return
        self._load_hook.remove()
        del optimizer.__dict__[ATTRIBUTE]
        step = optimizer.__dict__.get("step")
        if getattr(step, "__func__", None) is _step:
            if self._before is not None:
                optimizer.__dict__["step"] = self._before
            else:
                del optimizer.__dict__["step"]
        # else a scheduler has wrapped ours: `_step` goes on to the class's own step when it finds no attachment
        for item in self.items.values():
            item.take_back()
        self.store.release(item.extent for item in self.items.values())
        self.items.clear()
        self._retired.sweep()

    def offload_states(self) -> None:
        """Send all states that should be away and are in memory to the store."""
        for bucket in self._buckets(lambda p: True):
            self._adopt(bucket)
        self._buffers.drop()

    # The step

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """One optimizer step. Returns the closure's value, None without one."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        if self.parameters is not None:
            self.parameters.settle()
        if self.gradients is not None:
            self.gradients.settle()
        self._retired.sweep()
        buckets = self._buckets(lambda p: p.grad is not None)
        self._buffer_bytes = max((bucket.num_bytes for bucket in buckets), default=0)
        groups = _Groups(self.optimizer)
        leaving: list[_Bucket] = []
        coming = 0  # buckets whose reads have begun
        num_ahead, num_behind = min(self.num_buckets - 1, 1), max(self.num_buckets - 2, 0)
        if self._makes_states(buckets):  # they come beside the buffers: one bucket at a time
            num_ahead = num_behind = 0
            self._buffer_bytes = 0
        try:
            if not buckets:
                groups.step([], is_first=True, is_last=True)
            for i, bucket in enumerate(buckets):
                while coming < min(i + 1 + num_ahead, len(buckets)):
                    self._begin_reload(buckets[coming])
                    coming += 1
                self._end_reload(bucket)
                groups.step(bucket.parameters, is_first=i == 0, is_last=i + 1 == len(buckets))
                leaving.append(bucket)
                self._begin_offload(bucket)
                self._adopt(bucket)
                while len(leaving) > num_behind:
                    self._end_offload(leaving.pop(0))
        finally:
            groups.restore()
            for bucket in buckets[:coming]:
                if bucket.buffer is not None:
                    self._put_away(bucket, is_leaving=bucket in leaving)
            self._buffers.drop()
        return value

    def _put_away(self, bucket: _Bucket, is_leaving: bool) -> None:
        """At the end of a step, also one that raised: nothing of a bucket stays in its buffer but what can't leave."""
        if not is_leaving and bucket.items and bucket.items[0].buffer is not None:
            self._begin_offload(bucket)  # the step raised in it: it may be half stepped
        self._end_offload(bucket)

    def _makes_states(self, buckets: Sequence[_Bucket]) -> bool:
        """Whether the step will make states that are to be away."""
        return any(id(p) in self.away and not self.optimizer.state.get(p) for b in buckets for p in b.parameters)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Buffers are of one size, so that each can serve any bucket."""
        if num_bytes > self._buffer_bytes:
            self._buffers.drop()
            self._buffer_bytes = num_bytes
        return self._buffers.take(self._buffer_bytes)

    def _buckets(self, is_stepped: Callable[[torch.Tensor], bool]) -> list[_Bucket]:
        stepped = [p for group in self.optimizer.param_groups for p in group["params"] if is_stepped(p)]
        streamed = [self._streamed_bytes(p) for p in stepped]
        limits = [max(n, stored_bytes(p.numel() * p.element_size())) for n, p in zip(streamed, stepped, strict=True)]
        return [
            _Bucket([stepped[i] for i in indices], sum(streamed[i] for i in indices))
            for indices in buckets_of(limits, self.bucket_bytes)
        ]

    def _streamed_bytes(self, p: torch.Tensor) -> int:
        """What stepping `p` brings into memory; before the first step its states are taken to be two of its size."""
        own = stored_bytes(p.numel() * p.element_size())
        num = own if self.parameters is not None and id(p) in self.parameters.items else 0
        num += own if self.gradients is not None and id(p) in self.gradients.parameters else 0
        if id(p) in self.away:
            state = self.optimizer.state.get(p)
            tensors = [t for t in state.values() if isinstance(t, torch.Tensor)] if state else []
            num += sum(stored_bytes(t.numel() * t.element_size()) for t in tensors) if tensors else 2 * own
        return num

    def _away_items(self, bucket: _Bucket) -> list[Offloaded]:
        found: list[Offloaded] = []
        for p in bucket.parameters:
            if self.parameters is not None and (item := self.parameters.items.get(id(p))) is not None and item.is_away:
                found.append(item)
            if self.gradients is not None and (item := self.gradients.of(p)) is not None:
                found.append(item)
                bucket.gradients.add(id(item))
            for key, t in self._states_of(p):
                item = self.items.get((id(p), key))
                if item is not None and item.tensor is t and item.is_ours and item.is_away:
                    found.append(item)
        return in_file_order(found)

    def _states_of(self, p: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        state = self.optimizer.state.get(p)
        if isinstance(state, dict):
            for key, t in state.items():
                if isinstance(t, torch.Tensor):
                    yield key, t

    def _begin_reload(self, bucket: _Bucket) -> None:
        bucket.items = self._away_items(bucket)
        if not bucket.items:
            return
        bucket.buffer = self._buffer(sum(item.num_bytes for item in bucket.items))
        for run in runs_of([item.extent for item in bucket.items]):
            into = bucket.buffer[run.start : run.start + run.extent.reserved_bytes]
            bucket.transfers.append(self.store.read(run.extent, into))

    def _end_reload(self, bucket: _Bucket) -> None:
        if bucket.buffer is None:
            return
        _wait(bucket)
        start = 0
        for item in bucket.items:
            item.attach(bucket.buffer[start : start + item.num_bytes])
            start += item.num_bytes
        for item in bucket.items:
            item.count_holders()
            if id(item) in bucket.gradients and not self._is_torchs_own:
                item.seal()

    def _begin_offload(self, bucket: _Bucket) -> None:
        if bucket.buffer is None:
            return
        bucket.items = [item for item in bucket.items if item.is_ours and item.buffer is not None]
        written = [item for item in bucket.items if id(item) not in bucket.gradients or self._changes_gradient(item)]
        bucket.transfers = _writes(self.store, bucket.buffer, written)

    def _changes_gradient(self, item: Offloaded) -> bool:
        """Fused kernels move the version of a gradient that they only read: they write it when they unscale it."""
        if self._is_torchs_own and any(group.get("fused") for group in self.optimizer.param_groups):
            return getattr(self.optimizer, "grad_scale", None) is not None
        return item.is_dirty

    @property
    def _is_torchs_own(self) -> bool:
        """Torch's own optimizers write through no `.data`: the version counter tells all."""
        return type(self.optimizer).__module__.startswith("torch.optim")

    def _end_offload(self, bucket: _Bucket) -> None:
        if bucket.buffer is None:
            return
        buffer, bucket.buffer = bucket.buffer, None
        try:
            _wait(bucket)
        except StoreError as e:
            # Their content is in the buffer, whole and stepped: it stays there.
            self.note(f"a bucket of {buffer.numel()} B of optimizer states stays in memory: {e}")
            return
        attached = [item for item in bucket.items if item.buffer is not None]
        if any(item.is_held for item in attached[:1]):
            return  # somebody keeps a view of it: see residency.py, [Note: Holders]
        for item in attached:
            item.detach()
        self._buffers.give(buffer)

    # New states

    def _adopt(self, bucket: _Bucket) -> None:
        """Send states that the step has just made, or that somebody put there, to the store."""
        new: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        for p in bucket.parameters:
            if id(p) in self.away:
                for key, t in self._states_of(p):
                    item = self.items.get((id(p), key))
                    if item is not None and item.tensor is t and item.is_ours:
                        continue
                    if can_be_away(t) and is_alone(t):
                        new.append((p, key, t))
        if not new or self._full is not None:
            return
        try:
            self._send(new)
        except StoreError as e:
            self._full = str(e)
            self.note(f"optimizer states stay in memory: {e}")

    def _send(self, new: Sequence[tuple[torch.Tensor, str, torch.Tensor]]) -> None:
        for p, key, _ in new:
            if (old := self.items.pop((id(p), key), None)) is not None:
                self._retired.add(old)
        extents = self.store.reserve([t.numel() * t.element_size() for _, _, t in new])
        # One tensor at a time, in a buffer of its own: the states are in memory beside it.
        for (p, key, t), extent in zip(new, extents, strict=True):
            item = Offloaded(t, self.store, extent)
            buffer = aligned_empty(item.num_bytes)
            buffer[: item.geometry.num_bytes].copy_(bytes_of(t))
            self.store.write(extent, buffer).wait()
            item.detach()
            self.items[(id(p), key)] = item


def _writes(store: Store, buffer: torch.Tensor, items: Sequence[Offloaded]) -> list[Transfer]:
    """Begin the writes of items that lie in one buffer; neighbours there and on the store are one request."""
    transfers: list[Transfer] = []
    for run in _neighbours(items):
        (request,) = runs_of([item.extent for item in run])
        part = run[0].buffer
        assert part is not None
        start = part.data_ptr() - buffer.data_ptr()
        transfers.append(store.write(request.extent, buffer[start : start + request.extent.reserved_bytes]))
    return transfers


def _neighbours(items: Sequence[Offloaded]) -> Iterator[list[Offloaded]]:
    run: list[Offloaded] = []
    for item in items:
        if run and not _follows(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _follows(a: Offloaded, b: Offloaded) -> bool:
    assert a.buffer is not None
    assert b.buffer is not None
    on_store = (a.extent.file, a.extent.offset + a.num_bytes) == (b.extent.file, b.extent.offset)
    return on_store and a.buffer.data_ptr() + a.num_bytes == b.buffer.data_ptr()


def _wait(bucket: _Bucket) -> None:
    transfers, bucket.transfers = bucket.transfers, []
    failed: StoreError | None = None
    for transfer in transfers:  # all of them: a buffer is free only when nobody writes it
        try:
            transfer.wait()
        except StoreError as e:
            failed = e
    if failed is not None:
        raise failed


class _Groups:
    """An optimizer's param_groups, stepped in parts. What a step changes in a group's settings is changed once.

    [Note: Group counters] Some optimizers count steps in their groups. Each bucket sees what the first one saw, and the
    group keeps what the last one left, so the count moves by one. Parameters without a gradient, and groups of them
    only, come with the first bucket.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups
        self.all = [group["params"] for group in self.groups]
        self.before = [{k: v for k, v in group.items() if k != "params"} for group in self.groups]
        self.shown: set[int] = set()
        self._core = _core_step(optimizer)

    def step(self, parameters: Sequence[torch.Tensor], is_first: bool, is_last: bool) -> None:
        """Step these, as one of several parts."""
        self._show({id(p) for p in parameters}, is_first)
        with _hooks_in_part(self.optimizer, is_first, is_last):
            self._core(self.optimizer)

    def _show(self, stepped: set[int], is_first: bool) -> None:
        visible = []
        for i, group in enumerate(self.groups):
            params = [p for p in self.all[i] if id(p) in stepped or (is_first and p.grad is None)]
            if not params and not (is_first and not self.all[i]):
                continue
            if i in self.shown:
                group.clear()
                group.update(self.before[i])
            self.shown.add(i)
            group["params"] = params
            visible.append(group)
        self.optimizer.param_groups = visible

    def restore(self) -> None:
        self.optimizer.param_groups = self.groups
        for group, params in zip(self.groups, self.all, strict=True):
            group["params"] = params


@contextlib.contextmanager
def _hooks_in_part(optimizer: Optimizer, is_first: bool, is_last: bool) -> Iterator[None]:
    """A step that calls the step of its base runs torch's hooks in there as well: once, not in each part."""
    hidden = {"_optimizer_step_pre_hooks": not is_first, "_optimizer_step_post_hooks": not is_last}
    before = {name: optimizer.__dict__.get(name) for name, is_hidden in hidden.items() if is_hidden}
    optimizer.__dict__.update((name, OrderedDict()) for name in before)
    try:
        yield
    finally:
        optimizer.__dict__.update(before)


def _core_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's step without what torch wraps around it (hooks, profiling), which happens once per step."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def _bucketed(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    return self.__dict__[ATTRIBUTE].step(closure)


def _step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `optimizer.step`. With torch's hooks around the whole, and what a scheduler counts."""
    attachment = self.__dict__.get(ATTRIBUTE)
    if attachment is None:
        return type(self).step(self, *args, **kwargs)
    self._opt_called = True  # type: ignore[attr-defined]  # what a scheduler that was made before would note
    return Optimizer.profile_hook_step(_bucketed)(self, *args, **kwargs)


_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers ask for it


def _offload_loaded(optimizer: Optimizer) -> None:
    attachment = optimizer.__dict__.get(ATTRIBUTE)
    if attachment is not None:
        attachment.offload_states()


# Whether an optimizer can be stepped in parts


def why_not_bucketed(optimizer: Optimizer) -> str | None:
    """Why this optimizer can't be stepped in buckets; None if it can."""
    step = optimizer.__dict__.get("step")
    if step is not None and ATTRIBUTE not in optimizer.__dict__ and not hasattr(step, "_wrapped_by_lr_sched"):
        return "its `step` was replaced on the object, and stepping it in buckets would skip that"
    if not is_per_parameter(optimizer):
        return "stepped in parts it gives other numbers (it uses all parameters together, or keeps state of its own)"
    return None


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Whether stepping a few parameters one by one gives the same bits as stepping them together; tried on copies."""
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        together, parts = (_probe(optimizer, in_parts) for in_parts in (False, True))
    except Exception:
        return False
    finally:
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])
    return len(together) == len(parts) and all(torch.equal(a, b) for a, b in zip(together, parts, strict=True))


def _probe(optimizer: Optimizer, in_parts: bool) -> list[torch.Tensor]:
    """Parameters and states after three steps of a copy of `optimizer` on small parameters of its own."""
    own = _copy_of(optimizer)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    generator = torch.Generator().manual_seed(0)
    parameters: list[torch.Tensor] = []
    for group in own.param_groups:
        dtype = next((p.dtype for p in group["params"] if p.is_floating_point()), torch.float32)
        group["params"] = [
            torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((4, 3), (5,), (2, 2))
        ]
        parameters += group["params"]
    for scale in (1.0, 1e3, 1e-3):  # a bound on all gradients together may hold back large ones only
        for p in parameters:
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
        groups = _Groups(own)
        parts = [[p] for p in parameters] if in_parts else [parameters]
        try:
            for i, part in enumerate(parts):
                groups.step(part, is_first=i == 0, is_last=i + 1 == len(parts))
        finally:
            groups.restore()
    states = [t for p in parameters for t in own.state[p].values() if isinstance(t, torch.Tensor)]
    return [*parameters, *states]


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """A new object of the same class with the same settings, and no state.

    Raises ValueError if the object keeps tensors outside of `state`: they would be of the whole, not of a bucket.
    """
    own = object.__new__(type(optimizer))
    for name, x in optimizer.__dict__.items():
        if name in ("step", ATTRIBUTE, "grad_scale", "found_inf"):
            continue
        if name not in _OF_EVERY_OPTIMIZER:
            if any(isinstance(t, torch.Tensor) for t in tree_leaves(x)) or isinstance(x, dict | list | set):
                raise ValueError(f"{type(optimizer).__name__}.{name} keeps state of its own")
            x = copy.deepcopy(x)
        own.__dict__[name] = x
    own.__dict__.update(
        state=defaultdict(dict),
        param_groups=[
            {k: v if k == "params" else _own_setting(v) for k, v in group.items()} for group in optimizer.param_groups
        ],
    )
    return own


def _own_setting(x: Any) -> Any:
    """A setting may be a tensor or a list, which a step must not share with the original."""
    return x.detach().clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x)


_OF_EVERY_OPTIMIZER = frozenset(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).__dict__)
