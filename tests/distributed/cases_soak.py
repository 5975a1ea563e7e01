"""What a rank holds stays flat; soak.py is the long form."""
from run_ranks import case
from soak import soak


@case
def flat(worker):
    soak(worker, steps=64, looks=8, patience=120)
