"""What a call is given: its shapes, its random numbers, and settings of PyTorch that would void it."""

import torch

from sfumato.clipping.numerics import are_exact
from sfumato.errors import InputError
from sfumato.torch_internals import weights_are_cached

_NO_KEY = (
    "the model draws random numbers: give key, 32 bytes of this step alone, and example_ids, the "
    "number of each image. A place in the batch is no such number, since one image more would "
    "change all others' masks."
)


def as_views(
    inputs: torch.Tensor,
    targets: tuple[torch.Tensor, ...],
    augmult: int,
    is_padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """(B, K, ...), K = 1 for inputs as they are.

    Raises:
        InputError: If shapes do not go together, or PyTorch is set to something that would round or
            end a call.
    """
    refuse_modes()
    if not all(isinstance(given, torch.Tensor) and given.layout == torch.strided for given in (inputs, *targets)):
        raise InputError("inputs and targets must be dense tensors. Convert them, by torch.as_tensor for example.")
    if not all(given.ndim for given in (inputs, *targets)):
        raise InputError("inputs and targets must have a dimension that counts examples. Give them as (B, ...).")
    if augmult and (inputs.ndim < 3 or inputs.shape[1] != augmult):
        raise InputError(
            f"inputs of shape {tuple(inputs.shape)} do not hold augmult = {augmult} "
            "views per example. Give them as (B, K, C, H, W)."
        )
    for target in targets:
        if len(target) != len(inputs):
            raise InputError(
                f"targets for {len(target)} examples do not match inputs of {len(inputs)}. "
                "Give one target for each example."
            )
    if is_padding is not None and not _is_one_each(is_padding, torch.bool, len(inputs)):
        raise InputError(f"is_padding must be a tensor of one boolean for each of the {len(inputs)} examples.")
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise InputError(
            "torch.autograd.detect_anomaly ends a call where one image's gradient is not a number, which "
            "tells that it was there. Leave it: such an image counts for nothing."
        )
    if torch.is_autocast_enabled(inputs.device.type):
        raise InputError(
            "torch.autocast would round norms and sums, on which privacy rests. Leave it, "
            "and give "
            'precision="bf16" instead.'
        )
    if not are_exact("matmul", inputs.device):
        raise InputError(
            "float32 products are set to fewer digits (TF32 or bfloat16), which would round "
            "norms and sums, on which privacy rests."
            ' Call torch.set_float32_matmul_precision("highest"), and give precision="bf16" for speed.'
        )
    return inputs if augmult else inputs.unsqueeze(1)


def seeding_of(key: bytes | None, example_ids: torch.Tensor | None) -> tuple[bytes, torch.Tensor]:
    if not isinstance(key, bytes) or len(key) != 32 or example_ids is None:
        raise InputError(_NO_KEY)
    return key, example_ids


def example_numbers(example_ids: torch.Tensor | None, views: torch.Tensor) -> torch.Tensor:
    if example_ids is None:
        raise InputError(_NO_KEY)
    if not _is_one_each(example_ids, torch.int64, len(views)):
        raise InputError(f"example_ids must be a tensor of one int64 for each of the {len(views)} examples.")
    return example_ids


def _is_one_each(given: object, dtype: torch.dtype, count: int) -> bool:
    return isinstance(given, torch.Tensor) and given.dtype == dtype and given.shape == (count,)


def refuse_modes() -> None:
    """Raises InputError where PyTorch records no gradients, or keeps weights that used theirs up."""
    if torch.is_inference_mode_enabled():
        raise InputError("there are no gradients within torch.inference_mode. Leave it around this call.")
    if weights_are_cached():
        raise InputError(
            "torch.nn.utils.parametrize.cached() keeps weights from call to call, with a record "
            "that autograd has used up, and gradients would be wrong. Leave it: `with "
            "grad_fn.parameters_fixed():` computes weights once."
        )
