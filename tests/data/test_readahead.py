"""Rows of a mapped file are brought before they are read, and no others."""

import ctypes
import mmap
import os
import time

import numpy as np
import pytest
import torch

from sfumato.data.images import Digests, ImageSet, sha256_of_each
from sfumato.data.readahead import ask_for

ROWS, SIZE = 4096, 3 * 64 * 64  # a row is three pages


@pytest.fixture
def mapped(tmp_path):
    """A file of 50 MB that is not in memory."""
    path = tmp_path / "values.npy"
    new = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(ROWS, 3, 64, 64))
    new[:] = np.random.default_rng(0).integers(0, 256, new.shape, dtype=np.uint8)
    new.flush()
    del new
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    stored = torch.from_numpy(np.lib.format.open_memmap(path, mode="c"))
    if any(in_memory(stored, row) for row in (1000, 2000, 3000)):
        pytest.skip("the system keeps this file in memory")
    return stored


def in_memory(stored, row):
    """Whether the system holds all pages of a row, by its own word."""
    start = stored.data_ptr() + row * SIZE
    page = start - start % mmap.PAGESIZE
    pages = (start + SIZE - page + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * pages)()
    call = ctypes.CDLL(None).mincore
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert call(page, start + SIZE - page, flags) == 0
    return all(flag & 1 for flag in flags)


def test_rows_that_are_asked_for_come_and_others_stay_where_they_are(mapped):
    ask_for(mapped, torch.tensor([3000, 1000, 4095]))
    until = time.monotonic() + 10
    while not all(in_memory(mapped, row) for row in (1000, 3000, 4095)) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(in_memory(mapped, row) for row in (1000, 3000, 4095))
    assert not any(in_memory(mapped, row) for row in (500, 2000, 3500))


def test_a_batch_of_a_store_is_what_it_would_be_without(mapped, tmp_path):
    values = mapped.numpy().copy()
    facts = (torch.zeros(ROWS).long(), torch.ones(ROWS, dtype=torch.bool), (0.5,) * 3, (0.5,) * 3)
    on_disk = ImageSet(mapped, *facts, digests=Digests(sha256_of_each(values), tmp_path))
    in_store, beside = on_disk.subset([7, 4000, 9]), ImageSet(torch.from_numpy(values), *facts)
    chosen = torch.tensor([2, 1, 1])
    assert torch.equal(in_store.batch(chosen), beside.batch(torch.tensor([9, 4000, 4000])))


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_nothing_is_asked_for_where_there_is_nothing(shape):
    ask_for(torch.zeros(shape), torch.arange(shape[0]))
    ask_for(torch.zeros(4, 3), torch.arange(0))
