"""Whether an image's answer depends on the images beside it or before it, in evaluation mode. `sfumato.clipping`
asks that of training.

A model may compute each image alone while it trains, and look along the batch when it is used: `x -
x.min()` of the batch at test time, a softmax over the wrong dimension. Accuracies and answers then
depend on how images are put together.
"""

import torch
from torch import nn

from sfumato.clipping.model_check import Finding
from sfumato.clipping.probe import first_line, made_up_images, random_state_kept, temporary_values
from sfumato.errors import InputError

# How far an answer may lie from that of the image alone, relative to the largest.
_TOLERANCE = 1e-2
_REMEDY = "Make it an operation on each image alone, in evaluation mode too (`self.training` is False there)."


def evaluation_finding(model: nn.Module, row: torch.Tensor) -> Finding | None:
    """Why an image's answer in evaluation mode is not its own; None if nothing shows on made-up
    images: three of them together, each alone, and two of them in another order.

    Models whose output is not one tensor of rows are not judged.

    Args:
        model: Takes one tensor of rows. Its mode, parameters and buffers are afterwards what they were.
        row: (1, ...): shape, type and device of an input; its values are not used.

    Raises:
        InputError: If the model fails on made-up images.
    """
    images = made_up_images(3, 1, row, 1, only_pixels=True)[:, 0]
    try:
        with random_state_kept(row), temporary_values(model, None, None), torch.no_grad():
            model.eval()
            together, alone = model(images), [model(image[None]) for image in images]
            if not isinstance(together, torch.Tensor) or not together.ndim or len(together) != 3:
                return None
            again = model(images[[2, 0]])
    except Exception as error:
        raise InputError(
            f"the model fails in evaluation mode on made-up images of shape {tuple(row.shape)}: {first_line(error)}. "
            "Correct it."
        ) from error
    answers = torch.cat(alone).double().nan_to_num()
    others = torch.cat([together, again]).double().nan_to_num()
    if (torch.cat([answers, answers[[2, 0]]]) - others).abs().max() <= _TOLERANCE * answers.abs().max():
        return None
    reason = "in evaluation mode gives an image beside or after other images another answer than the image alone"
    return Finding("", type(model).__name__, reason, _REMEDY)


def require_rows_apart(model: nn.Module, row: torch.Tensor) -> None:
    """Raises InputError with the `evaluation_finding`, if there is one."""
    found = evaluation_finding(model, row)
    if found is not None:
        raise InputError(str(found))
