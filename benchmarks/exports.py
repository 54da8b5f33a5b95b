"""Whether an export decides as the run that it was made of, on real pictures.

    python -m benchmarks.exports PICTURES RUN...

For each run and each picture of a folder: class and probabilities by `sfumato predict`, by predict.py of the export in
a process of its own (`--python`: of an environment without Sfumato), and by timm, with timm's own transform, where it
can read the export. Prints how many classes are equal, and by how much probabilities differ at most.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import sfumato
from sfumato.exporting.verify import verify


def by_predict_py(folder: Path, files: list[Path], python: str) -> tuple[list[str], np.ndarray, float]:
    started = time.monotonic()
    command = [python, str(folder / "predict.py"), *map(str, files)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, env={}).stdout.splitlines()
    rows = [line.split("\t")[1:] for line in lines]
    shares = [[float(cell.rpartition(" ")[2]) for cell in row[1:]] for row in rows]
    return [row[0] for row in rows], np.array(shares), time.monotonic() - started


def by_timm(folder: Path, files: list[Path]) -> tuple[list[str], np.ndarray] | None:
    if not (folder / "config.json").exists():
        return None
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    mode = "L" if model.pretrained_cfg["input_size"][0] == 1 else "RGB"
    images = torch.stack([transform(Image.open(path).convert(mode)) for path in files])
    with torch.no_grad():
        logits = torch.cat([model(part) for part in images.split(100)])
    names = model.pretrained_cfg["label_names"]
    return [names[number] for number in logits.argmax(1).tolist()], logits.numpy()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pictures", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    files = sorted(path for path in args.pictures.rglob("*") if path.is_file())
    for run in args.runs:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "export"
            sfumato.export(run, folder)
            found = sfumato.load(run).predict(list(files))
            from_export = sfumato.load(folder).predict(list(files))
            names, shares, seconds = by_predict_py(folder, files, args.python)
            told = {
                "run": run.name,
                "pictures": len(files),
                "classes named": len({one.class_name for one in found}),
                "load(export)": sum(a == b for a, b in zip(found, from_export, strict=True)),
                "predict.py": sum(one.class_name == name for one, name in zip(found, names, strict=True)),
                "predict.py seconds": round(seconds, 1),
            }
            if found[0].probabilities is not None:
                ours = np.array([list((one.probabilities or {}).values()) for one in found])
                told["largest difference of a probability"] = float(np.abs(ours - shares).max())
            if (theirs := by_timm(folder, files)) is not None:
                told["timm"] = sum(one.class_name == name for one, name in zip(found, theirs[0], strict=True))
            told["verify"] = verify(folder).findings
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
