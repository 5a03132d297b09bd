"""Parameters that are in memory only around their use: a window of a given number of bytes slides over the model.

`use` is called before an op reads a parameter (by the tape, in forward and backward) and brings it in; what comes next
is read ahead. The order of uses is learned from the step before; the victim is what is used last (Belady). Capacity is
exceeded only by what can't be let go (see residency.py, [Note: Holders]) and by a single parameter larger than it.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from memopt.errors import StoreError
from memopt.offload.residency import Buffers, Offloaded, OwnThread, bytes_of, can_be_away, is_alone
from memopt.offload.store import Store, Transfer

NUM_AHEAD = 4  # parameters that are read ahead at most


class OffloadedParameters:
    """The parameters of one model that live on a store.

    Args:
        parameters: which ones, in the order of the forward. Those that can't be away (small, shared memory) stay.
        store: where to.
        capacity_bytes: memory for those that are resident during forward and backward.
        note: takes a line of text about what was not followed.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], store: Store, capacity_bytes: int, note: Callable[[str], None]
    ) -> None:
        self.store, self.capacity_bytes, self.note = store, capacity_bytes, note
        self.items: dict[int, Offloaded] = {}  # by identity of the parameter
        self._by_storage: dict[int, Offloaded] = {}  # by each storage that an item's tensor has had
        self._resident: dict[int, Offloaded] = {}
        self._loading: dict[int, tuple[Transfer, torch.Tensor]] = {}
        self._used_bytes = 0
        self._is_settling_asked = False
        self._threads, self._may_offload = OwnThread(note), True
        self._buffers = Buffers()
        self._learned: list[int] = []
        self._uses: dict[int, list[int]] = {}
        self._sequence: list[int] = []
        self._position = 0
        self._offload_all(list(parameters))

    def _offload_all(self, parameters: Sequence[nn.Parameter]) -> None:
        chosen = [p for p in parameters if can_be_away(p) and is_alone(p)]
        if len(chosen) < len(parameters):
            self.note(
                f"{len(parameters) - len(chosen)} parameters stay in memory: something else shows their memory too"
            )
        extents = self.store.reserve([p.numel() * p.element_size() for p in chosen])
        for p, extent in zip(chosen, extents, strict=True):
            item = Offloaded(p, self.store, extent)
            buffer = self._buffers.take(item.num_bytes)
            buffer[: item.geometry.num_bytes].copy_(bytes_of(p))
            try:
                self.store.write(extent, buffer).wait()
            except StoreError as e:
                self.note(f"a parameter of {item.num_bytes} B stays in memory: {e}")
                continue
            finally:
                self._buffers.give(buffer)
            item.detach()
            self.items[id(p)] = item
            self._by_storage[item.mapped.untyped_storage()._cdata] = item
        self._buffers.drop()
        order = [id(p) for p in chosen if id(p) in self.items]
        self._follow([*order, *reversed(order)])

    # Use

    def use(self, t: torch.Tensor) -> None:
        """Make a parameter resident before an op reads it; others are not touched."""
        item = self.items.get(id(t))
        if item is not None:
            self.reload(item)

    def item_of(self, t: torch.Tensor) -> Offloaded | None:
        """The parameter whose memory `t` shows in the parameter's own dtype, if it is one of these."""
        item = self._by_storage.get(t.untyped_storage()._cdata)
        return item if item is not None and item.is_ours and t.dtype is item.geometry.dtype else None

    def reload(self, item: Offloaded) -> None:
        """Make `item` resident, and begin to read what is used next."""
        with self._threads.lock:
            self._may_offload = not self._threads.is_shared()
            key = id(item.tensor)
            self._learned.append(key)
            self._advance(key)
            if not item.is_ours:  # the user gave it other memory: its own from here on
                return
            if item.is_away:
                if key not in self._loading:
                    self._begin(item)
                self._end(item)
            self._read_ahead()

    def end_forward(self) -> None:
        """The forward is over: what is in memory stays for backward, but the user's code may write it."""
        with self._threads.lock:
            for item in self._loading_items():
                self._end(item)
            for item in self._resident.values():
                if item.is_ours:
                    item.seal()

    def during_backward(self) -> None:
        """Backward asks for a parameter: when it is over, all of them are to be away."""
        if not self._is_settling_asked:
            self._is_settling_asked = True
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
            except RuntimeError:  # somebody looks at a graph's saved tensors, outside of any backward
                self._is_settling_asked = False

    def _after_backward(self) -> None:
        self._is_settling_asked = False
        self.settle()

    def _begin(self, item: Offloaded) -> None:
        key = id(item.tensor)
        item.version = item.tensor._version
        self._make_room(item.num_bytes, later_than=-1, keep=key)
        buffer = self._buffers.take(item.num_bytes)
        self._used_bytes += item.num_bytes
        self._loading[key] = (self.store.read(item.extent, buffer), buffer)

    def _end(self, item: Offloaded) -> None:
        key = id(item.tensor)
        transfer, buffer = self._loading.pop(key)
        try:
            transfer.wait()
        except StoreError:
            self._used_bytes -= item.num_bytes
            raise
        if item.tensor._version != item.version:  # written on the store while it was read
            item.version = item.tensor._version
            self.store.read(item.extent, buffer).wait()
        item.attach(buffer)
        self._resident[key] = item
        self._by_storage[buffer.untyped_storage()._cdata] = item

    def _make_room(self, num_bytes: int, later_than: int, keep: int) -> bool:
        """Offload what is used last, but only what is used later than in `later_than` uses, until `num_bytes` fit."""
        self._buffers.fit(num_bytes, self.capacity_bytes - self._used_bytes)
        if self._used_bytes + num_bytes <= self.capacity_bytes:
            return True
        for item in sorted(self._resident.values(), key=self._next_use, reverse=True):
            if self._next_use(item) <= later_than:
                return False
            if id(item.tensor) != keep and self._offload(item):
                self._buffers.fit(num_bytes, self.capacity_bytes - self._used_bytes)
            if self._used_bytes + num_bytes <= self.capacity_bytes:
                return True
        return False

    def _offload(self, item: Offloaded) -> bool:
        """Let a resident parameter go, after writing it if it was changed. False if it must stay."""
        key = id(item.tensor)
        if not item.is_ours:
            self._forget(item)
            return True
        if item.is_held or not self._may_offload:
            return False
        assert item.buffer is not None
        if item.is_dirty or _is_hooked(item.tensor):
            self.store.write(item.extent, item.buffer).wait()
        del self._by_storage[item.buffer.untyped_storage()._cdata], self._resident[key]
        buffer = item.detach()
        assert buffer is not None
        self._used_bytes -= item.num_bytes
        self._buffers.give(buffer)
        return True

    def _forget(self, item: Offloaded) -> None:
        """The user gave the parameter other memory. Graphs may go on to need what it was: that stays on the store."""
        self._resident.pop(id(item.tensor), None)
        if item.buffer is not None:
            self.store.write(item.extent, item.buffer).wait()
            self._by_storage.pop(item.buffer.untyped_storage()._cdata, None)
            self._used_bytes -= item.num_bytes
            item.buffer = None

    def _read_ahead(self) -> None:
        num = len(self._sequence)
        for ahead in range(1, min(NUM_AHEAD, num) + 1):
            key = self._sequence[(self._position + ahead) % num]
            item = self.items[key]
            if key in self._loading or not item.is_ours or not item.is_away or _is_hooked(item.tensor):
                continue
            if not self._make_room(item.num_bytes, later_than=self._next_use(item), keep=key):
                return
            self._begin(item)

    # The order of uses

    def begin_step(self) -> None:
        """A training forward begins: what was learned in the last step is expected again."""
        self._is_settling_asked = False
        if self._learned:
            self._follow(self._learned)
        self._learned = []

    def _follow(self, sequence: list[int]) -> None:
        self._sequence = [key for i, key in enumerate(sequence) if i == 0 or sequence[i - 1] != key]
        self._uses = {}
        for i, key in enumerate(self._sequence):
            self._uses.setdefault(key, []).append(i)
        self._position = -1 if not self._sequence else len(self._sequence) - 1

    def _advance(self, key: int) -> None:
        uses = self._uses.get(key)
        if uses:
            at = bisect.bisect_left(uses, self._position + 1 if self._position + 1 < len(self._sequence) else 0)
            if self._sequence[self._position] != key:
                self._position = uses[at % len(uses)]

    def _next_use(self, item: Offloaded) -> int:
        """How many uses away the next one is, in the cycle of steps."""
        uses = self._uses.get(id(item.tensor))
        if not uses:
            return len(self._sequence) + 1
        at = bisect.bisect_right(uses, self._position)
        return uses[at] - self._position if at < len(uses) else uses[0] + len(self._sequence) - self._position

    # The rest of the step

    def settle(self) -> None:
        """Offload all that can be: the optimizer reloads them bucket by bucket, and the user's code finds them away."""
        with self._threads.lock:
            self._forget_what_is_ahead()
            for item in [*self._resident.values()]:
                self._offload(item)
            self._buffers.drop()

    def _forget_what_is_ahead(self) -> None:
        """Give up what is read ahead."""
        for key, (transfer, buffer) in list(self._loading.items()):
            with contextlib.suppress(StoreError):
                transfer.wait()
            del self._loading[key]
            self._used_bytes -= self.items[key].num_bytes
            self._buffers.give(buffer)

    def _loading_items(self) -> list[Offloaded]:
        return [self.items[key] for key in self._loading]

    def changed(self, storage: int) -> None:
        """Note that the memory of a parameter (a storage's _cdata) is about to be written."""
        item = self._by_storage.get(storage)
        if item is not None:
            if id(item.tensor) in self._loading:
                self._end(item)
            item.is_changed = True

    def take_back(self) -> None:
        """Give all parameters ordinary memory again."""
        self.settle()
        for item in self.items.values():
            item.take_back()
        self.store.release(item.extent for item in self.items.values())
        self.items.clear()
        self._by_storage.clear()
        self._resident.clear()


def _is_hooked(p: torch.Tensor) -> bool:
    """Whether hooks of the user's run on the parameter's gradient: they may write it through `.data`, unseen."""
    hooks = getattr(p, "_post_accumulate_grad_hooks", None)
    ours = sum(1 for hook in (hooks or {}).values() if getattr(hook, "is_memopt", False))
    return bool(p._backward_hooks) or len(hooks or {}) > ours
