import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from sfumato.training.process import keep_freed_memory

keep_freed_memory()

def page_faults(mebibytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(mebibytes * 2**18).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for microbatch in range(8):  # the first ones find the room
    faults = [page_faults(size) for size in (8, 31, 40, 64, 96)]
print(max(faults))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_memory_that_was_freed_is_used_again_however_large_the_block():
    faults = int(subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True).stdout)
    assert faults < 200  # pages of 4 KiB: 8 MiB asked for anew would be 2,048
