"""What is borrowed from PyTorch gives what PyTorch gives."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sfumato.torch_internals import quick_group_norm


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_quick_shape_of_a_group_norm_is_the_slow_one(dtype, memory_format):
    def shapes():
        with FakeTensorMode():
            images = torch.empty(3, 8, 5, 6, dtype=dtype).to(memory_format=memory_format)
            results = torch.ops.aten.native_group_norm(images, None, None, 3, 8, 30, 4, 1e-5)
            return [(result.shape, result.stride(), result.dtype) for result in results]

    slow = shapes()
    with quick_group_norm():
        assert shapes() == slow
    assert shapes() == slow


def test_a_trace_that_fails_leaves_the_formula():
    with pytest.raises(ZeroDivisionError), quick_group_norm():
        1 / 0  # noqa: B018
    formula = torch._decomp.decomposition_table[torch.ops.aten.native_group_norm.default]
    normalized = formula(torch.randn(2, 4, 3, 3), None, None, 2, 4, 9, 2, 0.0)[0]
    assert normalized.unflatten(1, (2, 2)).var((2, 3, 4), correction=0).allclose(torch.ones(2, 2))
