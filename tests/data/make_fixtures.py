#!/usr/bin/env python3
"""Writes the fixtures beside this script anew: what bitsandbytes 0.49.2 and PEFT 0.21.2 write of small layers.

make_fixtures.py

Prints the CRC-32C of the weights as bitsandbytes decodes them, which tests/unit/checkpoints/load_weights_folders.cpp and
tests/unit/checkpoints/adapter_files.cpp have as constants.
"""
import json
from pathlib import Path

import bitsandbytes as bnb
import peft
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF


class Model(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.plain = linear(64, 6, torch.float32, False)
        self.nested = linear(128, 132, torch.bfloat16, True)  # 264 blocks: two blocks of scales
        self.small = linear(64, 2, torch.float16, True)


def four_bits(columns, rows, dtype, nested):
    layer = bnb.nn.Linear4bit(columns, rows, bias=rows == 6, compute_dtype=dtype, quant_type="nf4", compress_statistics=nested)
    weight = torch.randn(rows, columns, dtype=torch.float32).to(dtype)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=nested, module=layer)
    return layer.to("cpu")


torch.manual_seed(7)
model = Model(four_bits)
save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, HERE / "bitsandbytes.safetensors", metadata={"format": "pt"})
for name in ("plain", "nested", "small"):
    weight = getattr(model, name).weight
    decoded = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    print(name, decoded.dtype, hex(crc32c(decoded.view(torch.uint8).numpy().tobytes())))


base = Model(lambda columns, rows, dtype, nested: torch.nn.Linear(columns, rows, bias=rows == 6))
config = peft.LoraConfig(r=2, lora_alpha=6, lora_dropout=0.25, target_modules=["plain", "small"])
adapted = peft.get_peft_model(base, config)
for name, parameter in adapted.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter)
adapted.save_pretrained(HERE / "peft_adapter")
(HERE / "peft_adapter" / "README.md").unlink(missing_ok=True)
for name, parameter in adapted.named_parameters():
    if "lora_" in name:
        print(name, tuple(parameter.shape), hex(crc32c(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())))
print(json.dumps({"torch": torch.__version__, "bitsandbytes": bnb.__version__, "peft": peft.__version__}))
