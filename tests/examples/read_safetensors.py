#!/usr/bin/env python3
"""Reads the newest checkpoint of the example 04_resume with Python's own `safetensors`.

read_safetensors.py FOLDER

Exits with 77 where the package is not installed.
"""
import json
import sys
from pathlib import Path

try:
    import numpy
    from safetensors import safe_open
    from safetensors.numpy import load_file
except ImportError as error:
    print(f"PACER_SKIPPED: {error}")
    sys.exit(77)


def expect(condition, text):
    if not condition:
        sys.exit(text)


newest = sorted(Path(sys.argv[1]).glob("step-*"))[-1]
manifest = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))
expect(manifest["step"] == 120 and manifest["world_size"] == 1, f"unexpected manifest {manifest}")
names = {entry["name"] for entry in manifest["files"]}
expect(names == {path.name for path in newest.iterdir()} - {"manifest.json"}, f"the folder does not hold {names}")
for entry in manifest["files"]:
    expect((newest / entry["name"]).stat().st_size == entry["size"], f"{entry['name']} has another size")

model = load_file(newest / "model.safetensors")
optimizer = load_file(newest / "optimizer-rank-00000-of-00001.safetensors")
session = load_file(newest / "session-rank-00000-of-00001.safetensors")
expect(model["bytes.weight"].shape == (256, 32) and model["bytes.weight"].dtype == numpy.float32, "bytes.weight")
for name, value in model.items():
    expect(numpy.isfinite(value).all(), f"{name} is not finite")
    expect(optimizer[f"{name}/exp_avg"].shape == value.shape, f"{name} and its exp_avg differ in shape")
    expect((optimizer[f"{name}/exp_avg_sq"] >= 0).all(), f"exp_avg_sq of {name} is negative")
    expect(optimizer[f"{name}/step"].shape == () and 0 < optimizer[f"{name}/step"] <= 120, f"the step count of {name}")
expect(session["progress/step"] == 120, "progress/step")
with safe_open(newest / "model.safetensors", framework="np") as file:
    expect(set(file.keys()) == set(model), "safe_open sees other names")
print(f"{newest.name}: {len(model)} + {len(optimizer)} + {len(session)} tensors read by safetensors")
