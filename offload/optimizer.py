"""The user's own optimizer, stepped in place bucket by bucket: read bucket i + 1 | step i | write i - 1.

While one bucket is stepped (stepping.py), the states, gradients and parameters of the others can be on a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

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
from memopt.stepping import Attached, Core, Groups, is_torchs_own, value_of


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
        optimizer: any torch optimizer that treats each parameter on its own: ask `why_not_in_parts` before.
        away: the parameters (by identity) whose states are kept on the store.
        store: where to.
        bucket_bytes: how much of parameters, gradients and states a bucket may bring into memory.
        num_buckets: how many may be in memory at a time: one to step, two to read the next meanwhile, three to write
            the last one meanwhile.
        parameters, gradients: those that are away too, if any.
        note: takes a line of text about what was not followed.
        core: steps what a bucket shows; by default the optimizer's class does.
        admits: whether the step may be taken, asked when all gradients are there.
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
        core: Core | None = None,
        admits: Callable[[], bool] | None = None,
    ) -> None:
        self.core, self.admits = core, admits
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
        self._attached = Attached(self.optimizer, self)
        self.loaded()

    def remove(self) -> None:
        """Put the object back; its states get ordinary memory again."""
        if not self._attached.remove():
            return
        for item in self.items.values():
            item.take_back()
        self.store.release(item.extent for item in self.items.values())
        self.items.clear()
        self._retired.sweep()

    def loaded(self) -> None:
        """Send all states that should be away and are in memory to the store."""
        for bucket in self._buckets(lambda p: True):
            self._adopt(bucket)
        self._buffers.drop()

    # The step

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """One optimizer step. Returns the closure's value, None without one."""
        value = value_of(closure)
        if self.parameters is not None:
            self.parameters.settle()
        if self.gradients is not None:
            self.gradients.settle()
        if self.admits is not None and not self.admits():
            return value
        self._retired.sweep()
        buckets = self._buckets(lambda p: p.grad is not None)
        self._buffer_bytes = max((bucket.num_bytes for bucket in buckets), default=0)
        groups = Groups(self.optimizer, self.core)
        leaving: list[_Bucket] = []
        coming = 0  # buckets whose reads have begun
        num_ahead, num_behind = min(self.num_buckets - 1, 1), max(self.num_buckets - 2, 0)
        if self._makes_states(buckets):  # they come beside the buffers: one bucket at a time
            num_ahead = num_behind = 0
            self._buffer_bytes = 0
        try:
            if not buckets:
                groups.step([], is_last=True)
            for i, bucket in enumerate(buckets):
                while coming < min(i + 1 + num_ahead, len(buckets)):
                    self._begin_reload(buckets[coming])
                    coming += 1
                self._end_reload(bucket)
                groups.step(bucket.parameters, is_last=i + 1 == len(buckets))
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
            if id(item) in bucket.gradients and not is_torchs_own(self.optimizer):
                item.seal()  # else the version counter tells all

    def _begin_offload(self, bucket: _Bucket) -> None:
        if bucket.buffer is None:
            return
        bucket.items = [item for item in bucket.items if item.is_ours and item.buffer is not None]
        written = [item for item in bucket.items if id(item) not in bucket.gradients or self._changes_gradient(item)]
        bucket.transfers = _writes(self.store, bucket.buffer, written)

    def _changes_gradient(self, item: Offloaded) -> bool:
        """Fused kernels move the version of a gradient that they only read: they write it when they unscale it."""
        if is_torchs_own(self.optimizer) and any(group.get("fused") for group in self.optimizer.param_groups):
            return getattr(self.optimizer, "grad_scale", None) is not None
        return item.is_dirty

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
