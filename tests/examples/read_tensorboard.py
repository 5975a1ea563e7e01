#!/usr/bin/env python3
"""Prints what TensorBoard's own reader finds in a folder of event files, one line per point: tag, step, value.

read_tensorboard.py FOLDER [TAG ...]   exits with 1 where the folder has no curve, or none of one of the tags;
                                       with 77, as skipped, where TensorBoard is not installed
"""
import sys

SKIPPED = 77


def curves(folder):
    """The points of each tag, as (step, value); exits where TensorBoard is not installed."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError:
        print("tensorboard is not installed")
        sys.exit(SKIPPED)
    log = EventAccumulator(folder, size_guidance={SCALARS: 0})  # 0: every point, no sample of them
    log.Reload()
    return {tag: [(event.step, event.value) for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def main(folder, wanted):
    found = curves(folder)
    for tag, points in found.items():
        for step, value in points:
            print(tag, step, repr(value))
    missing = sorted(set(wanted) - set(found))
    if missing or not found:
        print(f"{folder} has no curve {', '.join(missing)}".rstrip(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
