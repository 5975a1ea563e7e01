#!/usr/bin/env python3
"""What 14_vision_transformer does beside its plain run: images of a file, drop path, and runs that go on.

vision_transformer.py PROGRAM [DIGITS]

The file is written here: each class has a bright corner of its own, which a small model learns in some steps. A run
that is killed and started again ends with the numbers of one that was not. DIGITS, the script that makes a set of
handwritten digits, is tried where Python has scikit-learn: its file is read, and no digit of the test set is among
those that training images are made of.
"""
import importlib.util
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL = ["--layers", "2", "--width", "24", "--steps", "60", "--warmup", "6", "--every", "20", "--average-decay", "0.9",
         "--batch", "32"]
RESULT = re.compile(r"(weights ([\d.]+) % right, loss [\d.]+; average ([\d.]+) % right, loss [\d.]+); \d+ images/s")


def write_images(path, change=None):
    """64 training and 32 test images of 8 x 8 pixels in four classes; change(header, bytes) spoils them."""
    header, data = {}, bytearray()
    for name, count in (("train", 64), ("test", 32)):
        for field, shape, values in (
                ("images", [count, 8, 8], b"".join(image(i, i % 4) for i in range(count))),
                ("labels", [count], bytes(i % 4 for i in range(count)))):
            header[f"{name}.{field}"] = {"dtype": "U8", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
            data += values
    if change:
        change(header, data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def image(number, corner):
    """Gray that differs from image to image, and one bright corner of 4 x 4."""
    rows, columns = 4 * (corner // 2), 4 * (corner % 2)
    bright = lambda y, x: rows <= y < rows + 4 and columns <= x < columns + 4
    return bytes(200 if bright(y, x) else (number * 37 + y * 11 + x * 5) % 100 for y in range(8) for x in range(8))


def run(folder, *command):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def result(folder, *command):
    """The last line's match, of a run that ended well, and all that it printed."""
    done = run(folder, *command)
    found = RESULT.search(done.stdout)
    if done.returncode != 0 or not found:
        sys.exit(f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return found, done.stdout


def expect(condition, what):
    if not condition:
        sys.exit(what)


def refused(folder, words, *command):
    done = run(folder, *command)
    expect(done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr,
           f"{command}: exit code {done.returncode}, without '{words}'\n{done.stderr}")


def check_file(program, folder):
    path = folder / "corners.safetensors"
    write_images(path)
    found, _ = result(folder, program, "--data", path, *SMALL, "--learning-rate", "0.01")
    expect(float(found[2]) > 90 and float(found[3]) > 90, f"corners were not learned: {found[0]}")
    refused(folder, "--train 65", program, "--data", path, "--train", "65")
    refused(folder, "--patch 3 must divide the 8 pixels", program, "--data", path, *SMALL, "--patch", "3")

    def without_labels(header, _):
        header["train.other"] = header.pop("train.labels")

    def with_new_class(header, data):
        data[header["test.labels"]["data_offsets"][0]] = 9

    def of_signed_bytes(header, _):
        header["test.images"]["dtype"] = "I8"

    for change, words in ((without_labels, "no tensor train.labels"), (with_new_class, "class that the training set"),
                          (of_signed_bytes, "test.images must be of uint8")):
        write_images(path, change)
        refused(folder, words, program, "--data", path, *SMALL)


def check_drop_path(program, folder):
    whole, printed = result(folder, program, *SMALL)
    expect("passes 2.00 of 2 layers" in printed, f"nothing is dropped, but it says\n{printed}")
    dropped, printed = result(folder, program, *SMALL, "--drop-path", "0.5")
    expect("passes 1.50 of 2 layers" in printed, f"half of the second layer is dropped, but it says\n{printed}")
    expect(whole[1] != dropped[1], f"drop path changes nothing: {whole[1]}")
    command = [program, *SMALL, "--drop-path", "0.5", "--checkpoints", "run"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if any(folder.glob("run/step-*/manifest.json")):
                break
            time.sleep(0.01)
        process.kill()
    done = run(folder, *command)
    expect("resumed from" in done.stderr, f"it did not go on from its checkpoint\n{done.stderr}")
    if process.returncode == 0:  # it was faster than the kill, and there is nothing left to do
        return
    found = RESULT.search(done.stdout)
    expect(found and found[1] == dropped[1], f"killed and resumed: {done.stdout}\nnever killed: {dropped[1]}")


def check_digits(program, digits, folder):
    if any(importlib.util.find_spec(name) is None for name in ("sklearn", "scipy")):
        print("digits.py was not tried: Python has no scikit-learn")
        return
    done = run(folder, sys.executable, digits, "digits.safetensors", "--train", "200", "--test", "100")
    expect(done.returncode == 0, done.stderr)
    result(folder, program, "--data", "digits.safetensors", *SMALL)
    spec = importlib.util.spec_from_file_location("digits", digits)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = []
    made_of = module.made_of
    module.made_of = lambda images, *others: drawn.append({each.tobytes() for each in images}) or made_of(images, *others)
    sys.argv = [str(digits), str(folder / "again.safetensors"), "--train", "50", "--test", "20"]
    module.main()
    expect(len(drawn) == 2 and not drawn[0] & drawn[1], "training and test images are made of the same digits")


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        check_file(program, folder)
        check_drop_path(program, folder)
        if len(sys.argv) > 2:
            check_digits(program, Path(sys.argv[2]), folder)
    print("images of a file are learned, drop path acts, and a killed run goes on")


if __name__ == "__main__":
    main()
