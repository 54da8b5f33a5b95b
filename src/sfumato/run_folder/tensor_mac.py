"""An authentication code of tensors and facts: any changed bit shows, to whoever has the key."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import torch

from sfumato.randomness import canonical


def tensor_mac(key: bytes, facts: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """HMAC-SHA256 of JSON facts and of tensors: their names in order, types, shapes and exact
    bytes.

    A header states the number of bytes of everything that follows, and its own length comes first:
    no two different arguments are one message.

    Returns:
        64 hexadecimal digits.
    """
    header = canonical([facts, [[name, str(value.dtype), list(value.shape)] for name, value in tensors.items()]])
    mac = hmac.new(key, len(header).to_bytes(8, "little") + header, hashlib.sha256)
    for value in tensors.values():
        flat = value.detach().cpu().contiguous().as_strided((value.numel(),), (1,))  # one number may have any stride
        mac.update(flat.view(torch.uint8).numpy().data)
    return mac.hexdigest()
