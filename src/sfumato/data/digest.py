"""One number for all that a run trains on and is judged by: other data have another."""

import hashlib
import json

from sfumato.data.examples import Dataset


def dataset_digest(dataset: Dataset) -> str:
    """SHA-256 of the data as training and evaluation see them, in 64 hexadecimal digits.

    Covers decoded images, labels, readable flags, people, order, class names and normalisation constants of both
    parts: an image added, removed, altered, relabelled or reordered changes it. It is for the owner alone: whoever
    holds candidates could confirm by it that they were used.
    """
    hashed = hashlib.sha256()

    def update(content: bytes) -> None:  # length first: no two sequences of parts give one stream of bytes
        hashed.update(len(content).to_bytes(8, "little") + content)

    update(json.dumps(["sfumato data 1", dataset.name, dataset.classes, dataset.held_out_name]).encode())
    for examples in (dataset.train, dataset.held_out_files):
        update(b"part")
        for content in examples.content():
            update(content)
    return hashed.hexdigest()
