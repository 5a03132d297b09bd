"""What every store does, whichever it is."""

import contextlib
import errno
import gc
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.errors import StoreError
from memopt.offload.host import HostStore
from memopt.offload.nvme import DiskCalls, NVMeStore
from memopt.offload.sizes import PAGE_BYTES, file_bytes, pages_up
from memopt.offload.store import Extent, FreeSpace, Transfer, aligned_empty, joined

MIB = 2**20
KINDS = ["disk", "disk without O_DIRECT", "host"]


class BufferedCalls(DiskCalls):
    def set_direct(self, fd, is_direct):
        if is_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@contextlib.contextmanager
def opened(kind):
    if kind == "host":
        store = HostStore(64 * MIB)
        yield store
        store.close()
        return
    calls, root = DiskCalls(), None
    if kind == "disk without O_DIRECT":
        calls, root = BufferedCalls(), "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=root) as directory:
        store = NVMeStore(directory, request_bytes=MIB, calls=calls)
        yield store
        store.close()


@pytest.fixture(params=KINDS)
def store(request):
    with opened(request.param) as store:
        yield store


def random_bytes(num_bytes, seed=0):
    buffer = aligned_empty(num_bytes)
    buffer.view(torch.int64).random_(generator=torch.Generator().manual_seed(seed))
    return buffer


def put(store, extent, content):
    """Write the content's bytes; the rest of the last page is whatever it is."""
    buffer = aligned_empty(extent.num_bytes)
    buffer[: extent.num_bytes] = content[: extent.num_bytes]
    store.write(extent, buffer).wait()


def got(store, extent):
    buffer = aligned_empty(extent.num_bytes)
    store.read(extent, buffer).wait()
    return buffer[: extent.num_bytes]


# Content

TENSORS = {
    "float32": torch.randn(1000, 7),
    "bfloat16": torch.randn(333).bfloat16(),
    "float16": torch.randn(5000).half(),
    "float8": torch.randn(77).to(torch.float8_e4m3fn),
    "float64 with nan and signed zero": torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 5e-324]).double(),
    "complex64": torch.randn(129, dtype=torch.complex64),
    "bool": torch.randn(4097) > 0,
    "int64": torch.arange(-9, 600),
    "0-dim": torch.tensor(1.25),
    "no elements": torch.empty(0, 8),
    "one page": torch.randn(1024),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_dtype_comes_back_bit_for_bit(store, name):
    before = TENSORS[name].reshape(-1).view(torch.uint8)
    (extent,) = store.reserve([before.numel()])
    put(store, extent, before)
    assert torch.equal(got(store, extent), before)
    assert torch.equal(store.mapped(extent), before)


def test_extent_larger_than_any_request_comes_back(store):
    (extent,) = store.reserve([7 * MIB + 123])
    content = random_bytes(7 * MIB + 123)
    store.write(extent, content).wait()
    assert torch.equal(got(store, extent), content[: extent.num_bytes])


def test_reading_leaves_the_rest_of_the_memory_alone(store):
    (extent,) = store.reserve([10])
    put(store, extent, random_bytes(10))
    into = aligned_empty(3 * PAGE_BYTES).fill_(7)
    store.read(extent, into).wait()
    assert (into[PAGE_BYTES:] == 7).all()


@pytest.mark.parametrize("start", [0, 1, 64, 512])
@pytest.mark.parametrize("length", [5000, 2 * PAGE_BYTES])
def test_memory_that_is_not_whole_pages_works_too(store, start, length):
    first, extent, last = store.reserve([PAGE_BYTES, 5000, PAGE_BYTES])
    for neighbour in (first, last):
        put(store, neighbour, random_bytes(PAGE_BYTES, seed=2))
    source, into = random_bytes(20_000)[start : start + length], aligned_empty(20_000).zero_()
    store.write(extent, source).wait()
    store.read(extent, into[start : start + length]).wait()
    assert torch.equal(into[start : start + 5000], source[:5000])
    assert not into[:start].any()
    assert not into[start + length :].any()
    assert all(torch.equal(got(store, neighbour), random_bytes(PAGE_BYTES, seed=2)) for neighbour in (first, last))


@pytest.mark.parametrize(
    "memory",
    [torch.empty(4999, dtype=torch.uint8), torch.empty(8192), torch.empty(16384, dtype=torch.uint8)[::2]],
    ids=["too short", "floats", "with gaps"],
)
def test_memory_that_can_not_take_it_is_refused_before_anything_moves(store, memory):
    (extent,) = store.reserve([5000])
    for begin in (store.read, store.write):
        with pytest.raises(ValueError, match=r"5000 B .*aligned_empty"):
            begin(extent, memory)
    assert store.read_bytes == store.written_bytes == 0


def test_traffic_is_counted_in_pages(store):
    small, large = store.reserve([10, 3 * MIB])
    put(store, small, random_bytes(10))
    put(store, large, random_bytes(3 * MIB))
    got(store, small)
    assert (store.written_bytes, store.read_bytes) == (PAGE_BYTES + 3 * MIB, PAGE_BYTES)


# Space


def test_extents_are_neighbours_in_the_given_order(store):
    sizes = [5000, 0, 1, PAGE_BYTES, 3 * MIB, 7]
    extents = store.reserve(sizes)
    assert [e.num_bytes for e in extents] == sizes
    assert all(e.offset % PAGE_BYTES == 0 for e in extents)
    assert sum(e.reserved_bytes for e in extents) == file_bytes(sizes)
    whole = joined(extents)
    assert whole.reserved_bytes == file_bytes(sizes)


def test_neighbours_move_as_one(store):
    extents = store.reserve([5000, 1, 2 * MIB])
    whole = joined(extents)
    content = random_bytes(whole.num_bytes)
    store.write(whole, content).wait()
    for extent in extents:
        start = extent.offset - whole.offset
        assert torch.equal(got(store, extent), content[start : start + extent.num_bytes])
    put(store, extents[1], torch.zeros(1))
    content[2 * PAGE_BYTES] = 0
    assert torch.equal(got(store, whole)[:5000], content[:5000])
    assert got(store, whole)[2 * PAGE_BYTES] == 0


def test_what_are_no_neighbours_can_not_be_joined():
    a, b, c = Extent(0, 0, 5000), Extent(0, 8192, 10), Extent(0, 16384, 10)
    assert joined([a, b]) == Extent(0, 0, 8202)
    for extents in ([], [a, c], [b, a], [a, Extent(1, 8192, 10)]):
        with pytest.raises(ValueError, match=r"join|neighbours"):
            joined(extents)


def test_released_space_is_used_again(store):
    extents = store.reserve([MIB] * 8)
    kept = extents[3]
    put(store, kept, random_bytes(MIB))
    store.release(e for e in extents if e is not kept)
    again = store.reserve([2 * MIB, MIB]) + store.reserve([4 * MIB])
    assert max(e.offset + e.reserved_bytes for e in again) <= 8 * MIB
    for e in again:
        put(store, e, random_bytes(e.num_bytes, seed=1))
    assert torch.equal(got(store, kept), random_bytes(MIB))


def test_finalizer_may_release_while_its_thread_reserves(store):
    spare = store.reserve([MIB] * 8)

    class Sizes(list):
        def __iter__(self):  # as if the garbage collector ran wherever the sizes are looked at, also under the lock
            store.release([spare.pop()])
            return super().__iter__()

    (other,) = store.reserve(Sizes([MIB]))
    assert len(spare) < 7
    put(store, other, random_bytes(MIB))
    assert torch.equal(got(store, other), random_bytes(MIB))


def test_free_space_is_first_fit_with_merged_neighbours():
    free, page = FreeSpace(), PAGE_BYTES
    free.give(0, 10 * page)
    assert free.take([page] * 10) == [i * page for i in range(10)]
    assert free.take([1]) is None
    assert free.take([]) == []
    assert free.take([0, 0]) == [0, 0]
    for i in (1, 3, 2, 7, 9):
        free.give(i * page, page)
    assert free.bytes_before(10 * page) == page
    assert free.take([2 * page, page]) == [page, 3 * page]
    assert free.take_scattered([page, page, page]) is None
    assert free.take([2 * page]) is None
    assert free.take_scattered([page, 1]) == [7 * page, 9 * page]
    free.give(0, page)
    free.give(0, page)
    with pytest.raises(AssertionError, match="released twice"):
        free.take([page])


steps = st.one_of(
    st.tuples(st.just("reserve"), st.lists(st.integers(0, 3 * PAGE_BYTES), max_size=4)),
    st.tuples(st.sampled_from(["write", "write mapped", "read", "read mapped", "release"]), st.integers(0, 30)),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(st.lists(steps, max_size=30))
def test_any_use_agrees_with_a_dictionary(kind, script):
    seeds = itertools.count()
    with opened(kind) as store:
        held: dict[Extent, torch.Tensor] = {}
        live: list[Extent] = []
        for step, argument in script:
            if step == "reserve":
                live += store.reserve(argument)
            elif live:
                extent = live[argument % len(live)]
                content = random_bytes(extent.num_bytes, next(seeds))[: extent.num_bytes]
                if step == "write":
                    put(store, extent, content)
                    held[extent] = content
                elif step == "write mapped":
                    store.mapped(extent).copy_(content)
                    held[extent] = content
                elif step == "release":
                    live.remove(extent)
                    held.pop(extent, None)
                    store.release([extent])
                elif extent in held:
                    found = got(store, extent) if step == "read" else store.mapped(extent)
                    assert torch.equal(found, held[extent])
        ends = sorted((e.offset, e.offset + e.reserved_bytes) for e in live if e.num_bytes)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        for extent, content in held.items():
            assert torch.equal(got(store, extent), content)


# Mapped memory


def test_mapped_memory_and_transfers_show_the_same(store):
    extents = store.reserve([100, 3 * MIB + 5, PAGE_BYTES])
    for extent in extents:
        mapped = store.mapped(extent)
        assert mapped.dtype is torch.uint8
        assert mapped.shape == (extent.num_bytes,)
        for seed in range(3):
            content = random_bytes(extent.num_bytes, seed)[: extent.num_bytes]
            put(store, extent, content)
            assert torch.equal(mapped, content)
            mapped.copy_(content.flip(0))
            assert torch.equal(got(store, extent), content.flip(0))
            assert torch.equal(store.mapped(extent), content.flip(0))


def test_mapped_writes_and_transfers_of_neighbours_do_not_disturb_each_other(store):
    extents = store.reserve([PAGE_BYTES] * 64)
    put(store, joined(extents), torch.zeros(64 * PAGE_BYTES, dtype=torch.uint8))
    mapped = [store.mapped(e) for e in extents]
    lost = []

    def write_mapped():
        for value in range(1, 60):
            for t in mapped[1::2]:
                t.fill_(value)
            lost.extend(t for t in mapped[1::2] if not (t == value).all())

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(write_mapped)
        value = 0
        while not done.done():
            value = value % 250 + 1
            source = aligned_empty(PAGE_BYTES).fill_(value)
            for transfer in [store.write(e, source) for e in extents[::2]]:
                transfer.wait()
            lost.extend(t for t in mapped[::2] if not torch.equal(t, source))
        done.result()
    assert not lost
    assert all((got(store, e) == 59).all() for e in extents[1::2])


def test_mapped_memory_outlives_the_store():
    for kind in KINDS:
        with opened(kind) as store:
            extents = store.reserve([5000, 2 * MIB])
            for extent in extents:
                put(store, extent, random_bytes(extent.num_bytes))
            tensors = [store.mapped(extent) for extent in extents]
            store.close()
            del store
            gc.collect()
        for t in tensors:  # the directory is gone too
            assert torch.equal(t, random_bytes(t.numel())[: t.numel()])
            t.fill_(3)
            assert (t == 3).all()


def test_each_mapped_tensor_has_a_storage_of_its_own(store):
    extents = store.reserve([100, 100])
    mapped = [store.mapped(e) for e in (*extents, extents[0])]
    assert len({t.untyped_storage()._cdata for t in mapped}) == 3
    assert [t.untyped_storage().nbytes() for t in mapped] == [100, 100, 100]


# Transfers


def test_store_holds_no_reference_when_wait_has_returned(store):
    (extent,) = store.reserve([3 * MIB])
    memory = random_bytes(3 * MIB)
    before = torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
    for begin in (store.write, store.read):
        for _ in range(5):
            transfer = begin(extent, memory[:])  # a view that the caller forgets
            transfer.wait()
            assert torch._C._storage_Use_Count(memory.untyped_storage()._cdata) == before


def test_store_keeps_memory_that_the_caller_forgets(store):
    extents = store.reserve([2 * MIB] * 4)
    transfers = [store.write(e, random_bytes(2 * MIB, seed)) for seed, e in enumerate(extents)]
    gc.collect()
    for t in transfers:
        t.wait()
    assert all(torch.equal(got(store, e), random_bytes(2 * MIB, seed)) for seed, e in enumerate(extents))


def test_transfer_may_be_waited_for_again(store):
    (extent,) = store.reserve([MIB])
    transfer = store.write(extent, random_bytes(MIB))
    for _ in range(2):
        transfer.wait()
        assert transfer.is_done
    empty = store.read(Extent(0, 0, 0), aligned_empty(0))
    assert empty.is_done
    empty.wait()


def test_transfer_is_done_with_its_last_piece_and_tells_the_first_error():
    finished = []
    transfer = Transfer(3, lambda: finished.append(True))
    errors = [StoreError("a", errno.EIO, 1), None, StoreError("b", errno.EIO, 1)]
    for i, error in enumerate(errors):
        assert not transfer.is_done
        assert transfer.piece_is_done(error) == (i == 2)
    for _ in range(2):
        with pytest.raises(StoreError, match="a: "):
            transfer.wait()
    assert not finished


def test_threads_use_one_store(store):
    def work(seed):
        for i in range(3):
            sizes = [PAGE_BYTES * (1 + (seed + i) % 3), 5, MIB + 1]
            extents = store.reserve(sizes)
            contents = [random_bytes(n, seed + i)[:n] for n in sizes]
            for extent, content in zip(extents, contents, strict=True):
                put(store, extent, content)
            for extent, content in zip(extents, contents, strict=True):
                assert torch.equal(got(store, extent), content)
            store.release(extents)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    num_bytes = sum(file_bytes([PAGE_BYTES * (1 + (seed + i) % 3), 5, MIB + 1]) for seed in range(6) for i in range(3))
    assert store.written_bytes == store.read_bytes == num_bytes


def test_closed_store_refuses(store):
    (extent,) = store.reserve([MIB])
    store.write(extent, random_bytes(MIB))
    store.flush()
    for _ in range(2):
        store.close()
    store.flush()
    store.release([extent])
    memory = aligned_empty(MIB)
    for call in (
        lambda: store.read(extent, memory),
        lambda: store.write(extent, memory),
        lambda: store.mapped(extent),
        lambda: store.reserve([1]),
    ):
        with pytest.raises(StoreError) as failed:
            call()
        assert failed.value.errno == errno.EBADF


# Memory


def test_aligned_memory_begins_at_a_page_and_is_whole_pages():
    for num_bytes in (0, 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * MIB + 7):
        memory = aligned_empty(num_bytes)
        assert memory.dtype is torch.uint8
        assert memory.numel() == pages_up(num_bytes)
        assert memory.data_ptr() % PAGE_BYTES == 0
