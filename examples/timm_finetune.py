"""A network of timm with its public weights: its last layer is trained privately.

    python examples/timm_finetune.py [NAME [OUTPUT [WEIGHTS]]]

timm downloads the weights unless WEIGHTS names a file of them. The network is small, so that this takes a minute on a
laptop; NAME is any other, such as vit_tiny_patch16_224.
"""

import sys
import tempfile
from pathlib import Path

import timm
from safetensors.torch import save_file
from sklearn.datasets import load_digits

import sfumato

name = sys.argv[1] if sys.argv[1:] else "test_vit"
output = Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp(prefix="timm-finetune-"))
overlay = {"file": sys.argv[3]} if sys.argv[3:] else None

# Yours: arrays of uint8, a dataset of (image, label), or `data_root=` a folder with a folder for each class.
digits = load_digits()
images, labels = (digits.images * 15).astype("uint8"), digits.target

# The public weights, as a file: runs read no weights from a network.
output.mkdir(parents=True, exist_ok=True)
public = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
save_file(public.state_dict(), output / "public.safetensors")

result = sfumato.train(
    "image-folder",
    output / "run",
    epsilon=3.0,
    data=(images[:1437], labels[:1437]),
    test=(images[1437:], labels[1437:]),
    settings={
        "data.classes": [str(digit) for digit in range(10)],
        "data.image_size": public.pretrained_cfg["input_size"][-1],
        "model.name": f"timm:{name}",
        "model.init_from": str(output / "public.safetensors"),
        "model.pretrained_on": "ImageNet-1k",  # the certificate says it: these images are not covered
        "model.trainable": "classifier",  # or "norms", "lora", "all"
    },
)
print(f"accuracy {result.accuracy:.3f} at epsilon {result.epsilon:.3f}, delta {result.delta:.0e}: {output / 'run'}")
