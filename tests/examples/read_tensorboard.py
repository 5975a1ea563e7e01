#!/usr/bin/env python3
"""Prints what TensorBoard's own reader finds in a folder of event files, one line per point: tag, step, value.

read_tensorboard.py FOLDER [TAG ...]   exits with 1 where the folder has no curve, or none of one of the tags;
                                       with 77, as skipped, where TensorBoard is not installed
"""
import sys

SKIPPED = 77


def main(folder, wanted):
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError:
        print("tensorboard is not installed")
        return SKIPPED
    log = EventAccumulator(folder, size_guidance={SCALARS: 0})  # 0: every point, no sample of them
    log.Reload()
    tags = log.Tags()["scalars"]
    for tag in tags:
        for event in log.Scalars(tag):
            print(tag, event.step, repr(event.value))
    missing = sorted(set(wanted) - set(tags))
    if missing or not tags:
        print(f"{folder} has no curve {', '.join(missing)}".rstrip(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
