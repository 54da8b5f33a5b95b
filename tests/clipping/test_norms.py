import pytest
import torch

from sfumato.clipping.norms import global_norms, row_norms


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 2_400_007])
def test_float32_norms_of_long_rows_are_right_to_a_few_parts_in_ten_million(length):
    rows = 1e-3 * torch.randn(3, length, generator=torch.Generator().manual_seed(0))
    truth = rows.double().square().sum(dim=1).sqrt()
    error = (row_norms(rows) - truth).abs() / truth.clamp(min=1e-30)
    assert error.max() < 3e-7


def test_the_norm_of_a_whole_gradient_is_that_of_its_parts_together():
    parts = [torch.randn(4, length, dtype=torch.float64) for length in (1, 7, 3000)]
    torch.testing.assert_close(global_norms(parts), torch.cat(parts, dim=1).square().sum(dim=1).sqrt())


def test_a_value_that_is_not_finite_makes_the_norm_so():
    rows = torch.ones(3, 2000)
    rows[0, 1999], rows[1, 5] = torch.nan, torch.inf
    assert row_norms(rows).isfinite().tolist() == [False, False, True]
