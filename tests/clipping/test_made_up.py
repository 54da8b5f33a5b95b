"""Made-up images and targets are what the checks take them for: of every scale, and of the shapes and kinds that were
asked for.
"""

import pytest
import torch

from sfumato.clipping.made_up import made_up_images, made_up_targets


def of(shape, dtype=torch.float32, examples=8, views=3, seed=5):
    return made_up_images(examples, views, torch.zeros(1, *shape, dtype=dtype), seed)


def test_images_have_the_shape_and_type_of_a_row_and_depend_on_nothing_but_the_seed():
    for dtype in (torch.float32, torch.float64, torch.int64):
        images = of((3, 4, 5), dtype)
        assert images.shape == (8, 3, 3, 4, 5) and images.dtype == dtype
        assert torch.equal(images, of((3, 4, 5), dtype)) and not torch.equal(images, of((3, 4, 5), dtype, seed=6))
    assert torch.equal(of((4,), examples=3), of((4,), examples=8)[:3])  # more of them change none


def test_entries_are_alike_where_those_of_real_images_are_and_nowhere_else():
    """Alike, they would hide what mixes them up; never alike, what looks for equal values."""
    images = of((3, 4, 5), torch.float64, examples=4)
    for kind, values in enumerate(images):
        assert (values.unique().numel() == values.numel()) == (kind != 1)
    shades = 255 * images[1]
    assert torch.allclose(shades, shades.round(), atol=1e-4) and 0.3 < (shades == 0).double().mean() < 0.7


def test_models_that_take_pixels_alone_are_shown_nothing_else():
    images = made_up_images(4, 2, torch.zeros(1, 3, 20, 20), 5, only_pixels=True)
    assert images.min() >= 0 and images.max() <= 1.1 and images.std(dim=(1, 2, 3, 4)).min() > 0.1


def test_of_four_images_one_is_ordinary_one_dark_to_bright_one_far_beyond_and_one_large():
    ordinary, pixels, far, large = of((3, 40, 40), torch.float64, views=1)[4:, 0]
    for values, mean, spread in (
        (ordinary, 0, 1),
        (pixels, 0.25, (1 / 6 - 1 / 16) ** 0.5),
        (far, 0, 300 / 3**0.5),
        (large, 0, 16),
    ):
        assert values.std().item() == pytest.approx(spread, rel=0.05) and values.mean().item() == pytest.approx(
            mean, abs=0.1 * spread
        )
    assert pixels.min() == 0 and pixels.max() == 1
    assert -300 <= far.min() < -295 and 295 < far.max() <= 300


def test_images_of_whole_numbers_are_of_zeros_and_ones():
    assert of((4, 4), torch.int64).unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("outputs", "classes"),
    [
        (torch.zeros(1, 7), 7),
        (torch.zeros(1, 7, 5), 7),
        ({"logits": torch.zeros(1, 7)}, 7),
        ((torch.zeros(1, 7), torch.zeros(1, 9)), 2),  # which of them counts classes is not known
        (torch.zeros(1), 2),
        (torch.zeros(1, 0), 1),
    ],
)
def test_targets_name_every_class_of_the_outputs_and_no_other(outputs, classes):
    (targets,) = made_up_targets(500, (torch.zeros(0, dtype=torch.int64),), outputs, 5)
    assert targets.dtype == torch.int64 and targets.unique().tolist() == list(range(classes))


def test_targets_of_shares_sum_to_one_and_others_have_the_kind_that_was_asked_for():
    like = torch.zeros(0, 7), torch.zeros(0), torch.zeros(0, 2, dtype=torch.bool)
    shares, numbers, flags = made_up_targets(500, like, torch.zeros(1, 7), 5)
    assert shares.shape == (500, 7) and (shares > 0).all() and torch.allclose(shares.sum(1), torch.ones(500))
    assert numbers.shape == (500,) and 0 <= numbers.min() < 0.1 and 0.9 < numbers.max() < 1
    assert flags.shape == (500, 2) and flags.dtype == torch.bool and 0.4 < flags.float().mean() < 0.6
