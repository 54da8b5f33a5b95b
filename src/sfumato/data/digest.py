"""The fingerprint of the data, without which neighbouring data could meet the same noise."""

import hashlib
import hmac
import json

from sfumato.data.examples import Dataset


def fingerprint(dataset: Dataset, key: bytes) -> str:
    """HMAC-SHA256 under the run's key of the data as training and evaluation see them.

    Covers decoded images, labels, readable flags, groups, order, class names and
    normalisation constants of both parts: an image added, removed, altered, relabelled
    or reordered changes it. It is keyed because a plain hash of private images would
    let anyone who holds candidates confirm that they were used.

    Args:
        dataset: The data.
        key: The run's secret key.

    Returns:
        64 hexadecimal digits.
    """
    mac = hmac.new(key, digestmod=hashlib.sha256)
    _update(mac, json.dumps(["sfumato data 1", dataset.name, dataset.classes, dataset.held_out_name]).encode())
    for examples in (dataset.train, dataset.held_out_files):
        _update(mac, b"part")
        for content in examples.content():
            _update(mac, content)
    return mac.hexdigest()


def _update(mac: hmac.HMAC, content: bytes) -> None:
    """Length first, so that no two different sequences of parts give one stream of bytes."""
    mac.update(len(content).to_bytes(8, "little"))
    mac.update(content)
