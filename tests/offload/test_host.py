"""The store in host memory: what it takes, and what this process may take."""

import errno

import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from memopt.errors import StoreError
from memopt.offload.host import HostStore, cgroup_bytes_left, host_bytes_available
from memopt.offload.sizes import PAGE_BYTES, slab_bytes

MIB = 2**20


def test_slab_takes_what_the_formula_says():
    sizes = [MIB + 1, 5, 0, 3 * MIB]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        store = HostStore(sum(-(-n // PAGE_BYTES) * PAGE_BYTES for n in sizes))
    events = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events == [slab_bytes(sizes)]
    assert len(store.reserve(sizes)) == len(sizes)


def test_beyond_the_capacity_nothing_is_reserved():
    store = HostStore(4 * MIB)
    a, b = store.reserve([MIB, 2 * MIB])
    with pytest.raises(StoreError) as failed:
        store.reserve([MIB, 1])
    assert (failed.value.errno, failed.value.num_bytes) == (errno.ENOMEM, MIB + PAGE_BYTES)
    (c,) = store.reserve([MIB])
    store.release([a, c])
    assert {e.offset for e in store.reserve([MIB, MIB])} == {a.offset, c.offset}  # scattered: there is no other room
    assert b.offset == MIB


def test_store_of_nothing_works():
    store = HostStore(0)
    assert [e.num_bytes for e in store.reserve([0, 0])] == [0, 0]
    with pytest.raises(StoreError, match="ENOMEM"):
        store.reserve([1])


def test_more_than_the_host_has_is_refused_with_the_number():
    num_bytes = psutil.virtual_memory().total * 2
    with pytest.raises(StoreError, match="ENOMEM") as failed:
        HostStore(num_bytes)
    assert failed.value.num_bytes == slab_bytes([num_bytes])


def test_available_is_what_the_machine_has_unless_a_group_has_less_left(monkeypatch):
    assert 0 < host_bytes_available() <= psutil.virtual_memory().total
    monkeypatch.setattr("memopt.offload.host.cgroup_bytes_left", lambda: iter([2**60, 123, 2**50]))
    assert host_bytes_available() == 123
    with pytest.raises(StoreError, match="ENOMEM"):
        HostStore(MIB)


@pytest.mark.parametrize("version", [1, 2])
def test_container_limit_counts_less_what_is_used_and_not_only_cached(tmp_path, version):
    if version == 1:
        group, names = "memory/docker/abc", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        (tmp_path / "cgroup").write_text("7:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/ignored\n")
    else:
        group, names = "docker/abc", ("memory.max", "memory.current", "inactive_file")
        (tmp_path / "cgroup").write_text("0::/docker/abc\n")
    for folder, limit, used, cached in ((group, "max", 5, 1), (f"{group}/..", str(1000 * MIB), 300 * MIB, 50 * MIB)):
        (tmp_path / folder).resolve().mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / names[0]).write_text(f"{limit}\n")
        (tmp_path / folder / names[1]).write_text(f"{used}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")
    assert list(cgroup_bytes_left(tmp_path / "cgroup", tmp_path)) == [750 * MIB]


def test_group_beyond_its_limit_has_nothing_left(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("10\n")
    (tmp_path / "memory.current").write_text("30\n")
    assert list(cgroup_bytes_left(tmp_path / "cgroup", tmp_path)) == [0]
    assert list(cgroup_bytes_left(tmp_path / "missing", tmp_path)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory for CUDA")
def test_slab_is_pinned_until_the_store_is_closed():
    store = HostStore(8 * MIB)
    (extent,) = store.reserve([5000])
    mapped = store.mapped(extent)
    assert store.is_pinned
    assert mapped.is_pinned()
    mapped.copy_(torch.full((5000,), 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert (mapped == 7).all()
    store.close()
    assert not store.is_pinned
    assert not mapped.is_pinned()
