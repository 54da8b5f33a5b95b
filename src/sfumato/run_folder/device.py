"""Where a run computes."""

import torch

from sfumato.errors import InputError


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" takes a GPU where there is one.

    Raises:
        InputError: If there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f'--device "{name}" cannot be used: {reason}. Use "auto", "cpu" or "cuda".') from None
    return device
