"""The options of each optimizer for type checkers and editors, which then find a misspelled name or a value of another
type. The optimizers' own tables of defaults have the same names; a test compares them."""

from __future__ import annotations

from typing import Literal, Optional, Union

import torch
from typing_extensions import TypedDict

Number = Union[float, torch.Tensor]
MasterWeights = Literal["automatic", "fp32", "remainder", "none", "remainder_8"]


class _Common(TypedDict, total=False):
    betas: tuple[Number, Number]
    eps: float
    weight_decay: float
    bias_correction: bool
    master_weights: MasterWeights


class _Fused(_Common, total=False):
    finite_check: bool
    rounding: Literal["nearest", "stochastic"]
    seed: int
    state_bits: Literal[8, 32]


class FusedAdamOptions(_Fused, total=False):
    amsgrad: bool


class FusedLambOptions(_Fused, total=False):
    min_coeff: float
    max_coeff: float
    adapt: bool


class ScheduleFreeAdamWOptions(_Fused, total=False):
    warmup_steps: int
    r: float
    weight_lr_power: float


class _OfTorch(TypedDict, total=False):
    momentum: float
    weight_decay: float
    maximize: bool
    finite_check: bool
    master_weights: MasterWeights
    rounding: Literal["nearest", "stochastic"]
    seed: int


class FusedSgdOptions(_OfTorch, total=False):
    dampening: float
    nesterov: bool


class FusedRmspropOptions(_OfTorch, total=False):
    alpha: float
    eps: float
    centered: bool


class _Muon(_Fused, total=False):
    orthogonalize: bool
    momentum: float
    nesterov: bool
    adjust_lr_fn: Literal["match_rms_adamw", "original"]
    ns_steps: int
    ns_coefficients: Literal["quintic", "polar_express"]
    precision: Literal["automatic", "bf16", "fp32"]
    split: int
    normalize_rows: bool
    row_beta: float
    cautious_decay: bool


class MuonOptions(_Muon, total=False):
    pass


class OneBitMuonOptions(_Muon, total=False):
    scale: Literal["rms", "l1"]
    block_scales: bool
    compress_alone: bool
    hierarchical: bool


class _OneBit(_Common, total=False):
    compress: bool
    compress_vectors: bool
    freeze_step: Optional[int]
    freeze_automatically: Optional[int]
    variance_floor: float
    scale: Literal["rms", "l1"]
    block_scales: bool
    compress_alone: bool
    hierarchical: bool
    one_bit: bool
    bucket_bytes: Optional[int]
    # Of DeepSpeed's optimizers, without effect.
    amsgrad: bool
    deepspeed: object
    cuda_aware: bool
    comm_backend_name: Optional[str]
    eps_inside_sqrt: bool
    max_grad_norm: float


class OneBitAdamOptions(_OneBit, total=False):
    refresh_variance_every: int


class OneBitLambOptions(_OneBit, total=False):
    min_coeff: float
    max_coeff: float
    coeff_beta: float
    factor_min: float
    factor_max: float
    factor_threshold: float
    adapt: bool
