"""The store on a disk: failing disks, full disks, few descriptors, forks, checksums."""

import errno
import gc
import json
import os
import pickle
import time

import pytest
import torch

import memopt.offload.data_file
import memopt.offload.nvme
from memopt.errors import StoreError
from memopt.offload.nvme import ChecksumError, DiskCalls, ForkedStoreError, NVMeStore, free_bytes
from memopt.offload.sizes import PAGE_BYTES, file_bytes
from memopt.offload.store import aligned_empty, joined

MIB = 2**20
CHUNK_BYTES = 4 * MIB


@pytest.fixture(autouse=True)
def _files_grow_in_small_chunks(monkeypatch):
    monkeypatch.setattr(memopt.offload.nvme, "CHUNK_BYTES", CHUNK_BYTES)


class FaultyCalls(DiskCalls):
    """Each call first takes what is planned for it: an error to raise, bytes to move at most, or None to go through."""

    def __init__(self):
        self.planned = {"set_direct": [], "fallocate": [], "preadv": [], "pwritev": []}

    def _limit(self, name):
        fault = self.planned[name].pop(0) if self.planned[name] else None
        if isinstance(fault, BaseException):
            raise fault
        return fault

    def set_direct(self, fd, is_direct):
        self._limit("set_direct")
        super().set_direct(fd, is_direct)

    def fallocate(self, fd, offset, num_bytes):
        limit = self._limit("fallocate")
        super().fallocate(fd, offset, num_bytes)
        if limit is not None:  # some file systems have taken a part when they fail
            raise OSError(errno.ENOSPC, "full")

    def preadv(self, fd, buffers, offset):
        limit = self._limit("preadv")
        # A direct request must be whole blocks: it moves more than it says.
        return super().preadv(fd, buffers, offset) if limit is None else min(limit, super().preadv(fd, buffers, offset))

    def pwritev(self, fd, buffers, offset):
        limit = self._limit("pwritev")
        return (
            super().pwritev(fd, buffers, offset) if limit is None else min(limit, super().pwritev(fd, buffers, offset))
        )


def error(code):
    return OSError(code, os.strerror(code))


@pytest.fixture
def calls():
    return FaultyCalls()


@pytest.fixture
def store(tmp_path, calls):
    store = NVMeStore(tmp_path, num_threads=1, request_bytes=MIB, calls=calls)
    yield store
    store.close()


def content_of(num_bytes, seed=0):
    content = aligned_empty(num_bytes)
    content.view(torch.int64).random_(generator=torch.Generator().manual_seed(seed))
    return content


def got(store, extent):
    into = aligned_empty(extent.num_bytes).zero_()
    store.read(extent, into).wait()
    return into


# A failing disk


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.ENOSPC, errno.ENODEV])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_failing_request_is_a_store_error_and_loses_nothing(store, calls, tmp_path, name, code):
    bad, good = store.reserve([3 * MIB, MIB])
    content, other = content_of(3 * MIB), content_of(MIB, seed=1)
    store.write(good, other).wait()
    store.write(bad, content).wait()
    calls.planned[name] = [None, error(code), error(code)]
    source = content.clone()
    transfer = store.read(bad, source) if name == "preadv" else store.write(bad, source)
    for _ in range(2):
        with pytest.raises(StoreError) as failed:
            transfer.wait()
        assert (failed.value.errno, failed.value.num_bytes) == (code, MIB)
        assert failed.value.path == str(tmp_path)
    calls.planned[name] = []
    assert torch.equal(got(store, good), other)
    store.write(bad, content).wait()
    assert torch.equal(got(store, bad), content)


def test_request_that_fails_once_is_tried_again(store, calls):
    (extent,) = store.reserve([2 * MIB])
    calls.planned["pwritev"] = [error(errno.EIO), None, error(errno.EIO)]
    store.write(extent, content_of(2 * MIB)).wait()
    calls.planned["preadv"] = [None, error(errno.EIO)]
    assert torch.equal(got(store, extent), content_of(2 * MIB))


def test_full_disk_is_not_tried_again(store, calls):
    (extent,) = store.reserve([MIB])
    calls.planned["pwritev"] = [error(errno.ENOSPC)]
    with pytest.raises(StoreError, match="ENOSPC"):
        store.write(extent, content_of(MIB)).wait()


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("shorts", [[PAGE_BYTES], [5000, 8191, 4096], [700_000, None, 4097]])
def test_short_requests_are_continued(tmp_path, calls, is_direct, shorts):
    calls.planned["set_direct"] = [] if is_direct else [error(errno.EINVAL)]
    store = NVMeStore(tmp_path, request_bytes=MIB, num_threads=1, calls=calls)
    (extent,) = store.reserve([2 * MIB + 5])
    calls.planned["pwritev"] = list(shorts)
    store.write(extent, content_of(2 * MIB + 5)).wait()
    calls.planned["preadv"] = list(shorts)
    assert torch.equal(got(store, extent), content_of(2 * MIB + 5))
    assert calls.planned["preadv"] == calls.planned["pwritev"] == []
    store.close()


def test_interrupted_requests_are_repeated_as_often_as_it_takes(store, calls):
    (extent,) = store.reserve([MIB])
    calls.planned["pwritev"] = [InterruptedError(errno.EINTR, "signal")] * 5
    calls.planned["preadv"] = [InterruptedError(errno.EINTR, "signal")] * 5
    store.write(extent, content_of(MIB)).wait()
    assert torch.equal(got(store, extent), content_of(MIB))


def test_disk_that_moves_nothing_is_an_error_and_no_endless_loop(store, calls):
    (extent,) = store.reserve([MIB])
    calls.planned["preadv"] = [0, 0]
    with pytest.raises(StoreError, match="EIO"):
        got(store, extent)


def test_error_of_any_kind_reaches_the_one_who_waits(store, calls):
    (extent,) = store.reserve([MIB])
    calls.planned["preadv"] = [MemoryError("no memory")]
    with pytest.raises(MemoryError, match="no memory"):
        got(store, extent)


def test_flush_waits_for_all_and_tells_the_error(store, calls):
    a, b = store.reserve([MIB, MIB])
    calls.planned["pwritev"] = [error(errno.EIO), error(errno.EIO)]
    calls.pwritev = lambda *args: time.sleep(0.05) or FaultyCalls.pwritev(calls, *args)
    transfers = [store.write(a, content_of(MIB)), store.write(b, content_of(MIB))]
    with pytest.raises(StoreError, match="EIO"):
        store.flush()
    transfers[1].wait()
    store.flush()


def test_close_waits_for_what_is_under_way(tmp_path, calls):
    store = NVMeStore(tmp_path, num_threads=1, request_bytes=PAGE_BYTES, calls=calls)
    calls.pwritev = lambda *args: time.sleep(0.02) or DiskCalls.pwritev(calls, *args)
    (extent,) = store.reserve([8 * PAGE_BYTES])
    mapped = store.mapped(extent)
    store.write(extent, content_of(extent.num_bytes))
    store.close()
    assert torch.equal(mapped, content_of(extent.num_bytes))


# Space


def test_file_has_no_name_and_the_space_that_the_formula_says(store, tmp_path):
    sizes = [CHUNK_BYTES, 1, 0, PAGE_BYTES + 1]
    store.reserve(sizes)
    assert os.listdir(tmp_path) == []
    assert store.file_bytes == file_bytes(sizes)
    assert os.fstat(store._file.fd).st_blocks * 512 >= file_bytes(sizes)
    store.reserve([PAGE_BYTES])
    assert store.file_bytes == file_bytes(sizes) + CHUNK_BYTES


def test_full_disk_refuses_a_reservation_and_keeps_what_is_there(store, calls, tmp_path):
    (held,) = store.reserve([CHUNK_BYTES])
    store.write(held, content_of(CHUNK_BYTES)).wait()
    mapped = store.mapped(held)
    for faults in ([error(errno.ENOSPC)] * 2, [0, 0]):  # 0: after having taken the space
        calls.planned["fallocate"] = list(faults)
        with pytest.raises(StoreError) as failed:
            store.reserve([MIB, 5])
        assert (failed.value.errno, failed.value.num_bytes) == (errno.ENOSPC, MIB + PAGE_BYTES)
        assert failed.value.path == str(tmp_path)
        assert os.fstat(store._file.fd).st_size == store.file_bytes == CHUNK_BYTES
    assert torch.equal(got(store, held), content_of(CHUNK_BYTES))
    assert torch.equal(mapped, content_of(CHUNK_BYTES))
    calls.planned["fallocate"] = []
    assert len(store.reserve([MIB, 5])) == 2


def test_nearly_full_disk_gives_exactly_what_is_asked_for(store, calls):
    calls.planned["fallocate"] = [error(errno.ENOSPC)]
    store.reserve([MIB, 5])
    assert store.file_bytes == MIB + PAGE_BYTES


def test_full_disk_gives_scattered_room_where_there_is_any(store, calls):
    extents = store.reserve([CHUNK_BYTES // 4] * 4)
    store.release(extents[::2])
    calls.planned["fallocate"] = [error(errno.ENOSPC)] * 4
    assert {e.offset for e in store.reserve([CHUNK_BYTES // 4] * 2)} == {e.offset for e in extents[::2]}
    with pytest.raises(StoreError, match="ENOSPC"):
        store.reserve([1])


def test_capacity_is_taken_by_the_first_reservation(tmp_path, calls):
    capacity_bytes = CHUNK_BYTES + 12345
    store = NVMeStore(tmp_path, capacity_bytes=capacity_bytes, calls=calls)
    calls.planned["fallocate"] = [error(errno.ENOSPC)]
    with pytest.raises(StoreError) as failed:
        store.reserve([5])
    assert failed.value.num_bytes == file_bytes([capacity_bytes])
    store.reserve([5])
    assert store.file_bytes == file_bytes([capacity_bytes])
    store.reserve([CHUNK_BYTES])
    assert store.file_bytes == file_bytes([capacity_bytes])
    store.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_without_fallocate_zeros_are_written(store, calls, code):
    calls.planned["fallocate"] = [error(code)]
    (extent,) = store.reserve([20 * MIB + 1])
    assert os.fstat(store._file.fd).st_blocks * 512 >= store.file_bytes == file_bytes([20 * MIB + 1])
    assert not got(store, extent).any()


def test_without_fallocate_a_disk_is_not_filled_up(store, calls, monkeypatch):
    calls.planned["fallocate"] = [error(errno.EOPNOTSUPP)] * 2
    calls.planned["pwritev"] = [AssertionError("nothing is to be written")]
    monkeypatch.setattr(memopt.offload.data_file, "free_bytes", lambda path: MIB)
    with pytest.raises(StoreError, match="ENOSPC"):
        store.reserve([2 * MIB])
    assert store.file_bytes == 0


def test_directory_that_can_not_be_written_is_told_at_once(tmp_path):
    with pytest.raises(StoreError) as failed:
        NVMeStore(tmp_path / "missing")
    assert failed.value.errno == errno.ENOENT
    assert failed.value.path == str(tmp_path / "missing")


def test_free_bytes_is_what_others_see_and_names_a_missing_path(tmp_path):
    found = os.statvfs(tmp_path)
    assert 0 < free_bytes(tmp_path) <= found.f_blocks * found.f_frsize
    with pytest.raises(StoreError, match="ENOENT"):
        free_bytes(tmp_path / "missing")


@pytest.mark.parametrize("arguments", [{"num_threads": 0}, {"request_bytes": 0}])
def test_store_without_threads_or_bytes_is_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match="threads and bytes"):
        NVMeStore(tmp_path, **arguments)


# File systems without O_DIRECT


@pytest.mark.parametrize("name", ["set_direct", "preadv"])
def test_without_o_direct_the_page_cache_serves_and_is_told_once(tmp_path, calls, caplog, name):
    calls.planned[name] = [error(errno.EINVAL)]
    store = NVMeStore(tmp_path, request_bytes=MIB, calls=calls)
    for _ in range(2):
        (extent,) = store.reserve([2 * MIB])
        store.write(extent, content_of(2 * MIB)).wait()
        assert torch.equal(got(store, extent), content_of(2 * MIB))
    assert not store.is_direct
    assert len(caplog.records) == 1
    assert str(tmp_path) in caplog.text
    store.close()


def test_other_errors_of_the_first_request_are_errors(tmp_path, calls):
    calls.planned["preadv"] = [error(errno.EIO)]
    with pytest.raises(StoreError, match="EIO"):
        NVMeStore(tmp_path, calls=calls)


# Descriptors

MANY_TENSORS = """
import atexit, json, os, resource
import torch
import memopt.offload.nvme
from memopt.offload.nvme import NVMeStore
from memopt.offload.store import aligned_empty

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
memopt.offload.nvme.CHUNK_BYTES = 32 * 4096  # the file grows many times
fds = lambda: len(os.listdir("/proc/self/fd"))
start = fds()
store = NVMeStore(sys.argv[1], request_bytes=2**20)
extents, mapped = [], []
for i in range(1500):
    extents += store.reserve([28])
    mapped.append(store.mapped(extents[-1]))
large = store.reserve([20 * 2**20])[0]
for i, extent in enumerate(extents):
    store.write(extent, torch.full((7,), i, dtype=torch.int32).view(torch.uint8))
content = aligned_empty(large.num_bytes).random_(256)
store.write(large, content)
store.flush()
into = aligned_empty(large.num_bytes)
store.read(large, into).wait()
is_exact = torch.equal(into, content)
for i, (extent, memory) in enumerate(zip(extents, mapped)):
    store.read(extent, into).wait()
    is_exact = is_exact and all((t.view(torch.int32) == i).all() for t in (memory, into[:28]))
live = fds()

@atexit.register
def use_at_exit():  # threads take no more work then
    content.random_(256)
    store.write(large, content).wait()
    store.read(large, into).wait()
    store.close()
    at_exit = torch.equal(into, content)
    print(json.dumps({"exact": is_exact, "live": live - start, "exact at exit": at_exit, "end": fds() - start}))
"""


def test_number_of_tensors_is_not_bounded_by_descriptors_and_exit_handlers_may_transfer(start, tmp_path):
    process = start(MANY_TENSORS, tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out) == {"exact": True, "live": 1, "exact at exit": True, "end": 0}


def test_forgotten_store_gives_its_descriptor_and_space_back(tmp_path):
    gc.collect()
    num_before = len(os.listdir("/proc/self/fd"))
    store = NVMeStore(tmp_path)
    (extent,) = store.reserve([MIB])
    store.write(extent, content_of(MIB)).wait()
    assert len(os.listdir("/proc/self/fd")) == num_before + 1
    del store
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > num_before:  # its threads let go of it a moment after `wait` returns
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Forks


def in_forked_child(check):
    """Whether `check()` holds in a forked child; it must not hang there."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_may_read_and_changes_nothing(store):
    (extent,) = store.reserve([3 * MIB])
    mapped = store.mapped(extent)
    store.write(extent, content_of(3 * MIB)).wait()

    def is_refused(call):
        try:
            call()
        except ForkedStoreError as e:
            return "parent" in str(e)
        return False

    def child():
        torch.set_num_threads(1)  # torch's own threads are not here
        is_read = torch.equal(got(store, extent), mapped)
        refuses = is_refused(lambda: store.write(extent, mapped)) and is_refused(lambda: store.reserve([1]))
        store.release([extent])
        store.close()
        return is_read and refuses

    with store._lock:  # as if another thread had held it
        assert in_forked_child(child)
    assert torch.equal(got(store, extent), content_of(3 * MIB))
    assert store.reserve([MIB])[0].offset >= 3 * MIB


# Checksums


@pytest.fixture
def checked_store(tmp_path):
    store = NVMeStore(tmp_path, request_bytes=MIB, has_checksums=True)
    yield store
    store.close()


def damage(store, extent):
    """Change one byte behind the store's back."""
    page = aligned_empty(PAGE_BYTES)
    os.preadv(store._file.fd, [page.numpy()], extent.offset)
    page[3] ^= 1
    os.pwritev(store._file.fd, [page.numpy()], extent.offset)


def test_damaged_extent_is_told_alone_and_among_neighbours(checked_store):
    store = checked_store
    extents = store.reserve([5000, 0, 2 * MIB + 1, 100])
    whole = joined(extents)
    store.write(whole, content_of(whole.num_bytes)).wait()
    assert torch.equal(got(store, whole), content_of(whole.num_bytes))
    damage(store, extents[2])
    got(store, extents[0])
    for extent in (extents[2], whole):
        with pytest.raises(ChecksumError, match="checksum") as failed:
            got(store, extent)
        assert (failed.value.errno, failed.value.num_bytes) == (errno.EIO, 2 * MIB + 1)
    store.write(extents[2], content_of(2 * MIB + 1, seed=1)).wait()
    got(store, whole)
    copied = pickle.loads(pickle.dumps(failed.value))
    assert type(copied) is ChecksumError
    assert str(copied) == str(failed.value)


def test_what_was_never_written_or_was_mapped_is_not_compared(checked_store):
    store = checked_store
    extents = store.reserve([5000, 5000])
    got(store, extents[0])
    store.write(joined(extents), content_of(joined(extents).num_bytes)).wait()
    store.mapped(extents[0])[7] ^= 1
    got(store, extents[0])
    got(store, joined(extents))
    damage(store, extents[1])
    with pytest.raises(ChecksumError):
        got(store, joined(extents))


def test_reserved_again_it_is_compared_again(checked_store):
    store = checked_store
    (extent,) = store.reserve([5000])
    store.mapped(extent)
    store.write(extent, content_of(5000)).wait()
    store.release([extent])
    smaller = store.reserve([100, 100])
    got(store, smaller[0])
    store.write(smaller[1], content_of(100)).wait()
    damage(store, smaller[1])
    with pytest.raises(ChecksumError):
        got(store, smaller[1])
