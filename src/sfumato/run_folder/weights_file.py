"""Files of weights whose bytes follow from what they hold: the library writes metadata in an order that changes."""

import json
from collections.abc import Mapping
from typing import Any


def with_metadata(weights: bytes, metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with this metadata, the same bytes each time."""
    header, tensors = parts(weights)
    header["__metadata__"] = dict(metadata)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text + tensors


def parts(weights: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a safetensors file: eight bytes with the header's length, the header as
    JSON, the tensors.
    """
    end = 8 + int.from_bytes(weights[:8], "little")
    return json.loads(weights[8:end]), weights[end:]
