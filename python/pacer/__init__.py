"""pacer for PyTorch: the optimizers and schedules of C++, the former behind torch.optim's interface.

    import pacer
    optimizer = pacer.FusedAdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
"""

from .checkpoints import load_checkpoint, save_checkpoint
from .communicator import Communicator, CompressedAllReduce
from .onebit import OneBitAdam, OneBitLamb, OneBitMuon
from .optimizers import FusedAdam, FusedAdamW, FusedLamb, FusedRmsprop, FusedSgd, Muon, ScheduleFreeAdamW
from .schedules import LayerDrop, SequenceLength

__version__ = "0.1.0"
__all__ = [
    "Communicator", "CompressedAllReduce", "FusedAdam", "FusedAdamW", "FusedLamb", "FusedRmsprop", "FusedSgd", "LayerDrop", "Muon",
    "OneBitAdam", "OneBitLamb", "OneBitMuon", "ScheduleFreeAdamW", "SequenceLength", "load_checkpoint", "save_checkpoint",
]  # fmt: skip
