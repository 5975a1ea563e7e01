#!/usr/bin/env python3
"""Makes a set of handwritten digits for 14_vision_transformer from the 1,797 that scikit-learn ships.

digits.py FILE    writes train.images, train.labels, test.images and test.labels, uint8, as one safetensors file

The digits are split first: no image of the test set is made of a digit of the training set. Each image is a digit of
8 x 8 pixels, magnified, turned, scaled, shifted and distorted as if it were elastic: by a random field of
displacements that is smooth (Simard, Steinkraus & Platt, "Best Practices for Convolutional Neural Networks", 2003).
Test images are distorted half as much. It needs `pip install scikit-learn`, which brings numpy and scipy.
"""
import argparse
import json
import struct
from pathlib import Path

import numpy as np
from scipy import ndimage
from sklearn.datasets import load_digits

SMOOTH = 4.0  # pixels: the deviation of the filter that makes a field of displacements smooth


def magnified(digit, side):
    """The digit, its values from 0 to 16, as an image from 0 to 1 with a margin of a tenth."""
    inner = round(side * 0.8)
    image = np.zeros((side, side))
    at = (side - inner) // 2
    image[at:at + inner, at:at + inner] = np.clip(ndimage.zoom(digit / 16, inner / digit.shape[0], order=3), 0, 1)
    return image


def distorted(image, strength, random):
    """The image with every pixel taken from somewhere else."""
    side = image.shape[0]
    centre = (side - 1) / 2
    rows, columns = np.mgrid[:side, :side] - centre
    angle = np.deg2rad(15 * strength) * random.uniform(-1, 1)
    scale = 1 + 0.15 * strength * random.uniform(-1, 1, 2)
    shift = 0.08 * side * strength * random.uniform(-1, 1, 2)
    fields = ndimage.gaussian_filter(random.uniform(-1, 1, (2, side, side)), (0, SMOOTH, SMOOTH))
    fields *= 0.07 * side * strength / max(np.abs(fields).max(), 1e-12)
    sine, cosine = np.sin(angle), np.cos(angle)
    places = [scale[0] * (cosine * rows - sine * columns) + shift[0] + fields[0] + centre,
              scale[1] * (sine * rows + cosine * columns) + shift[1] + fields[1] + centre]
    return ndimage.map_coordinates(image, places, order=1)


def made_of(digits, labels, count, side, strength, noise, random):
    """`count` images: each digit as often as any other, give or take one, in a random order."""
    chosen = random.permutation(np.resize(random.permutation(len(digits)), count))
    large = [magnified(digit, side) for digit in digits]
    images = np.stack([distorted(large[i], strength, random) for i in chosen])
    images += noise * random.standard_normal(images.shape)
    return np.round(255 * np.clip(images, 0, 1)).astype(np.uint8), labels[chosen].astype(np.uint8)


def write_safetensors(path, tensors):
    """The format is 8 bytes of length, a header in JSON and the elements; that takes no package."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "U8", "shape": list(values.shape), "data_offsets": [at, at + values.size]}
        at += values.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for values in tensors.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--side", type=int, default=28, help="pixels (28)")
    parser.add_argument("--train", type=int, default=20_000, help="training images (20000)")
    parser.add_argument("--test", type=int, default=5_000, help="test images (5000)")
    parser.add_argument("--originals", type=int, default=1_297, help="digits that training images are made of (1297)")
    parser.add_argument("--strength", type=float, default=1.0, help="how much training images are distorted (1)")
    parser.add_argument("--test-strength", type=float, help="how much test images are (half of --strength)")
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of a pixel's noise, of 1 for white (0)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    digits = load_digits()
    random = np.random.default_rng(given.seed)
    order = random.permutation(len(digits.images))
    held_out, rest = order[:500], order[500:]
    if not 10 <= given.originals <= len(rest):
        parser.error(f"--originals must be from 10 to {len(rest)}, because 500 digits are for the test")
    test_strength = given.strength / 2 if given.test_strength is None else given.test_strength
    tensors = {}
    for name, rows, count, strength in [("train", rest[:given.originals], given.train, given.strength),
                                        ("test", held_out, given.test, test_strength)]:
        images, labels = made_of(digits.images[rows], digits.target[rows], count, given.side, strength, given.noise,
                                 random)
        tensors[f"{name}.images"], tensors[f"{name}.labels"] = images, labels
    write_safetensors(given.file, tensors)


if __name__ == "__main__":
    main()
