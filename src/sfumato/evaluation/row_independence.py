"""Whether an image's answer depends on the images beside it, in evaluation mode. `sfumato.clipping`
asks that of training.

A model may compute each image alone while it trains, and look along the batch when it is used: `x -
x.min()` of the batch at test time, a softmax over the wrong dimension. Accuracies and answers then
depend on how images are put together.
"""

import torch
from torch import nn

from sfumato.clipping.agreement import difference
from sfumato.clipping.checks import Finding, random_state_kept
from sfumato.clipping.draws import DrawShapes, KeyedDraws, draw_seeds, row_dims
from sfumato.clipping.made_up import made_up_images
from sfumato.clipping.protocol import is_out_of_memory
from sfumato.clipping.stand_in import Snapshot, has_accumulator_hooks, stand_in
from sfumato.errors import InputError

_EXAMPLES = 4
# Made-up images that are judged together, by number: all, and some in another order.
_BATCHES = ((0, 1, 2, 3), (3, 1, 2), (2, 0))
# A law is broken if it breaks on each of several sets of images: rounding may flip a decision
# inside a model on some.
_SEEDS = (1, 2, 3)
# How far an answer may lie from that of the image alone, relative to the largest: in double
# precision, and in single where the model does not run there.
_TOLERANCE = {True: 1e-7, False: 1e-2}
_REMEDY = "Make it an operation on each image alone, in evaluation mode too (`self.training` is False there)."


def evaluation_finding(model: nn.Module, row: torch.Tensor) -> Finding | None:
    """Why an image's answer in evaluation mode is not its own; None if nothing shows on made-up
    images.

    The model is what it was afterwards, its mode included. Models whose output is not one tensor of
    rows are not judged.

    Args:
        model: Takes one tensor of rows.
        row: (1, ...): shape, type and device of an input; its values are not used.

    Raises:
        InputError: If the model fails on made-up images, or draws random numbers that are no
            image's own.
    """
    found = None
    for seed in _SEEDS:
        found = _on_some_images(model, row, seed)
        if found is None:
            return None
    return found


def require_rows_apart(model: nn.Module, row: torch.Tensor) -> None:
    """Raises InputError with the `evaluation_finding`, if there is one."""
    found = evaluation_finding(model, row)
    if found is not None:
        raise InputError(str(found))


def _on_some_images(model: nn.Module, row: torch.Tensor, seed: int) -> Finding | None:
    doubles = (False,) if has_accumulator_hooks(model) else (True, False)
    failure: Exception | None = None
    for only_pixels in (False, True):
        for double in doubles:
            try:
                return _compare(model, row, seed, double, only_pixels)
            except InputError:
                raise
            except Exception as error:  # the model has constants of another type, or asks for pixels
                if is_out_of_memory(error):
                    raise
                failure = failure or error
    reason = next((line for line in str(failure).splitlines() if line.strip()), type(failure).__name__).strip()
    raise InputError(
        f"the model fails in evaluation mode on made-up images of shape {tuple(row.shape)}: {reason}. Correct it."
    ) from failure


@torch.no_grad()
def _compare(model: nn.Module, row: torch.Tensor, seed: int, double: bool, only_pixels: bool) -> Finding | None:
    dtype = torch.float64 if double else None
    like = row.to(dtype) if row.is_floating_point() else row
    images = made_up_images(_EXAMPLES, 1, like, seed, only_pixels=only_pixels).flatten(0, 1)
    seeds = draw_seeds(b"evaluation", torch.arange(_EXAMPLES, device=row.device), 1)
    with random_state_kept(row), stand_in(model, dtype, seed):
        model.eval()
        before = Snapshot.of(model)
        alone, shapes = [], []
        for number in range(_EXAMPLES):
            with KeyedDraws(seeds[number : number + 1]) as draws:
                alone.append(model(images[number : number + 1]))
            shapes.append(draws.shapes)
        if not all(isinstance(answer, torch.Tensor) and answer.ndim and len(answer) == 1 for answer in alone):
            return None
        alone = [answer.clone() for answer in alone]
        if any(own != shapes[0] for own in shapes):
            row_dims([()], [], 1)  # says that the number of draws depends on the image
        together = [_together(model, images, seeds, shapes[0], batch) for batch in _BATCHES]
        place = before.changed(model)
        with KeyedDraws(seeds[:1]):
            again = model(images[:1])
    kind = type(model).__name__
    for batch, answers in zip(_BATCHES, together, strict=True):
        if difference(torch.cat([alone[number] for number in batch]), answers) > _TOLERANCE[double]:
            return Finding(
                "",
                kind,
                "in evaluation mode gives an image beside other images another answer than the image alone",
                _REMEDY,
            )
    if place is not None or difference(alone[0], again) > _TOLERANCE[double]:
        what = f"its '{'.'.join(filter(None, place))}'" if place is not None else "something"
        return Finding(
            "",
            kind,
            f"in evaluation mode keeps {what} of the images that it judged, on which later answers depend",
            _REMEDY,
        )
    return None


def _together(
    model: nn.Module, images: torch.Tensor, seeds: torch.Tensor, shapes: list[tuple[int, ...]], batch: tuple[int, ...]
) -> torch.Tensor:
    chosen = torch.tensor(batch, device=images.device)
    dims: tuple[int, ...] = ()
    if shapes:
        with DrawShapes() as draws:
            model(images[chosen])
        dims = row_dims(shapes, draws.shapes, len(batch))
    with KeyedDraws(seeds[chosen], dims):
        return model(images[chosen]).clone()
