#!/usr/bin/env python3
"""Adapters and weights in 4 bits between pacer and Python's PEFT and bitsandbytes, both ways.

peft_files.py PEFT_ACTOR

Each package checks its half; exits with 77 where one of them is not installed.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ACTOR = sys.argv[1]
missing = []
try:
    import torch
    from safetensors.torch import load_file, save_file
except ImportError as error:
    print(f"PACER_SKIPPED: {error}")
    sys.exit(77)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import peft
except ImportError as error:
    peft = None
    missing.append(str(error))
try:
    import bitsandbytes
    from bitsandbytes.functional import QuantState, dequantize_4bit
    from bitsandbytes.nn import Params4bit
except ImportError as error:
    bitsandbytes = None
    missing.append(str(error))
if peft is None and bitsandbytes is None:
    print(f"PACER_SKIPPED: {'; '.join(missing)}")
    sys.exit(77)


def expect(condition, text):
    if not condition:
        sys.exit(text)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64, bias=False)


class Net(torch.nn.Module):
    """The model of peft_actor.cpp."""

    def __init__(self):
        super().__init__()
        self.block, self.down, self.head, self.extra = Block(), torch.nn.Linear(64, 10), torch.nn.Linear(10, 8), torch.nn.Linear(96, 66, bias=False)

    def forward(self, x):
        return self.head(self.down(x + self.block.down(torch.tanh(self.block.up(x)))))


class Wide(torch.nn.Module):
    """The model of peft_actor.cpp with every kind of layer that takes an adapter."""

    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.colours, self.line, self.plane = nn.Embedding(9, 4), nn.Conv1d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.space, self.down, self.head = nn.Conv3d(3, 4, 2, bias=False), nn.Linear(24, 10), nn.Linear(10, 8)

    def forward(self, ids):
        x = torch.tanh(self.line(self.colours(ids).transpose(1, 2)))
        x = torch.tanh(self.plane(x.view(-1, 6, 3, 4)))
        x = torch.tanh(self.space(x.view(-1, 3, 2, 3, 4)))
        return self.head(torch.tanh(self.down(x.flatten(1))))


EVERY_LAYER = ["colours", "line", "plane", "space", "down", "head"]


def actor(mode, folder, *kinds):
    subprocess.run([ACTOR, mode, str(folder), *kinds], check=True)


def base_model(folder):
    model = Net()
    model.load_state_dict(load_file(folder / "base.safetensors"))
    return model.eval()


def close(found, wanted, text):
    error = ((found - wanted).norm() / wanted.norm()).item()
    expect(error < 2e-6, f"{text}: logits differ by {error}")
    return error


def formula(weight, state):
    """What the layout means, element by element."""
    scales = state.absmax
    if state.nested:
        nested = state.state2
        scales = nested.code[state.absmax.long()] * nested.absmax.repeat_interleave(nested.blocksize)[: state.absmax.numel()] + state.offset
    codes = torch.stack([weight.flatten() >> 4, weight.flatten() & 15], 1).flatten().long()
    values = state.code[codes] * scales.repeat_interleave(state.blocksize)[: codes.numel()]
    return values.view(state.shape).to(state.dtype)


def check_decoded(weights, decoded, text):
    """`weights`: (data, QuantState) by layer."""
    expect(set(weights) == set(decoded), f"{text}: layers {sorted(weights)} and {sorted(decoded)}")
    for name, (data, state) in weights.items():
        other = decoded[name]
        expect(other.dtype == state.dtype and torch.equal(other, formula(data, state)), f"{text}: {name} differs from the layout's formula")
        # On the CPU bitsandbytes 0.49.2 decodes rows that are no whole blocks in another way than on a GPU.
        if state.shape[-1] % state.blocksize == 0:
            expect(torch.equal(other, dequantize_4bit(data, state)), f"{text}: {name} differs from bitsandbytes")


def quantized_layers(file):
    tensors = load_file(file)
    layers = {}
    for name in tensors:
        if not name.endswith(".weight.quant_state.bitsandbytes__nf4"):
            continue
        layer = name.split(".weight.quant_state")[0]
        stats = {key: value for key, value in tensors.items() if key.startswith(layer + ".weight.")}
        data = tensors[layer + ".weight"]
        parameter = Params4bit.from_prequantized(data, dict(stats), device="cpu")
        expect(parameter.quant_state.quant_type == "nf4", f"{layer} is {parameter.quant_state.quant_type}")
        layers[layer] = (data, QuantState.from_dict(dict(stats), device="cpu"))
    return layers


def write_bitsandbytes(folder, nested):
    """The base model with its block and `extra` in 4 bits, as bitsandbytes saves it."""
    model = base_model(folder)
    kinds = {"block.up": torch.float32, "block.down": torch.bfloat16, "extra": torch.float16}
    for name, dtype in kinds.items():
        parent, _, child = name.rpartition(".")
        old = model.get_submodule(name)
        layer = bitsandbytes.nn.Linear4bit(old.in_features, old.out_features, bias=old.bias is not None, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=nested)
        layer.weight = Params4bit(old.weight.data.to(dtype), requires_grad=False, quant_type="nf4", compress_statistics=nested, module=layer)
        if old.bias is not None:
            layer.bias = old.bias
        setattr(model.get_submodule(parent), child, layer.to("cpu"))
    kind = "nested" if nested else "plain"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / f"bitsandbytes-{kind}.safetensors", metadata={"format": "pt"})
    return model


def check_ours_in_peft(folder):
    x = load_file(folder / "input.safetensors")["x"]
    model = peft.PeftModel.from_pretrained(base_model(folder), folder / "adapter").eval()
    adapted = {name.removeprefix("base_model.model.").split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    expect(adapted == {"block.up", "down"}, f"PEFT adapted {sorted(adapted)}")
    config = model.peft_config["default"]
    expect(config.r == 4 and config.lora_alpha == 6 and config.use_rslora and config.lora_dropout == 0.1, f"PEFT read {config}")
    with torch.no_grad():
        wanted, without = load_file(folder / "logits.safetensors")["logits"], base_model(folder)(x)
        expect((wanted - without).norm() > 0.1 * without.norm(), "the adapter does nothing")
        error = close(model(x), wanted, "PEFT with pacer's adapter")
        # With a trained head, ranks and alphas by layer.
        beside = peft.PeftModel.from_pretrained(base_model(folder), folder / "adapter_beside").eval()
        close(beside(x), load_file(folder / "logits_beside.safetensors")["logits"], "PEFT with pacer's adapter and head")
        return error


def wide_model(folder):
    model = Wide()
    model.load_state_dict(load_file(folder / "wide.safetensors"))
    return model.eval()


def wide_logits(folder, model):
    with torch.no_grad():
        return model.eval()(load_file(folder / "ids.safetensors")["ids"])


def check_ours_of_every_layer(folder):
    """Adapters of convolutions and an embedding, two of them at once, and DoRA, which pacer wrote."""
    model = peft.PeftModel.from_pretrained(wide_model(folder), folder / "wide_first")
    adapted = {name.removeprefix("base_model.model.").split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    expect(adapted == set(EVERY_LAYER), f"PEFT adapted {sorted(adapted)}")
    wanted = {kind: load_file(folder / f"logits_{kind}.safetensors")["logits"] for kind in ("wide", "two", "dora")}
    base = wide_logits(folder, wide_model(folder))
    known = [base, *wanted.values()]
    for i, a in enumerate(known):
        expect(all((a - b).norm() > 0.1 * b.norm() for b in known[:i]), "two of the models compute the same")
    errors = [close(wide_logits(folder, model), wanted["wide"], "PEFT with pacer's adapter of every layer")]
    model.load_adapter(folder / "wide_second", "second")
    model.base_model.set_adapter(["default", "second"])
    errors.append(close(wide_logits(folder, model), wanted["two"], "PEFT with two adapters of pacer"))
    directed = peft.PeftModel.from_pretrained(wide_model(folder), folder / "wide_dora")
    expect(directed.peft_config["default"].use_dora, "PEFT read no DoRA")
    errors.append(close(wide_logits(folder, directed), wanted["dora"], "PEFT with pacer's DoRA"))
    return max(errors)


def write_every_layer(folder):
    """The same by PEFT: what the models with its adapters compute, by kind."""

    def randomize(model):
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, 0, 0.4)

    torch.manual_seed(9)
    wanted = {}
    model = peft.get_peft_model(wide_model(folder), peft.LoraConfig(r=4, lora_alpha=6, target_modules=EVERY_LAYER))
    randomize(model)
    model.save_pretrained(folder / "peft_wide")
    wanted["wide"] = wide_logits(folder, model)
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules=["colours", "plane", "down"]))
    model.set_adapter("second")
    randomize(model)
    model.save_pretrained(folder / "second_of_two", selected_adapters=["second"])
    (folder / "second_of_two" / "second").rename(folder / "peft_second")
    model.base_model.set_adapter(["default", "second"])
    wanted["two"] = wide_logits(folder, model)
    directed = peft.get_peft_model(wide_model(folder), peft.LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=["down", "head"]))
    randomize(directed)
    directed.save_pretrained(folder / "peft_dora")
    wanted["dora"] = wide_logits(folder, directed)
    return wanted


def check_theirs_of_every_layer(folder, wanted):
    errors = [close(load_file(folder / f"read-logits_{kind}.safetensors")["logits"], logits, f"pacer with PEFT's files, {kind}") for kind, logits in wanted.items()]
    return max(errors)


def write_peft(folder, name="peft_adapter", **options):
    torch.manual_seed(5)
    config = peft.LoraConfig(r=3, lora_alpha=5, lora_dropout=0.2, target_modules=["up", "block.down"], **options)
    model = peft.get_peft_model(base_model(folder), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(folder / name)
    with torch.no_grad():
        return model.eval()(load_file(folder / "input.safetensors")["x"])


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    actor("write", folder)
    if bitsandbytes is not None:
        for kind in ("plain", "nested"):
            check_decoded(quantized_layers(folder / f"{kind}.safetensors"), load_file(folder / f"{kind}-decoded.safetensors"), f"pacer's {kind} file")
    if peft is not None:
        print(f"PEFT with pacer's adapter: logits differ by {check_ours_in_peft(folder):.1e}")
        print(f"PEFT with pacer's adapters of every layer: logits differ by {check_ours_of_every_layer(folder):.1e}")
    if peft is None:
        print(f"PACER_SKIPPED: {'; '.join(missing)}")
        sys.exit(77)

    wanted = write_peft(folder)
    beside = write_peft(folder, "peft_beside", modules_to_save=["head"], rank_pattern={"up": 70}, alpha_pattern={"block.down": 2})
    of_every_layer = write_every_layer(folder)
    kinds = ("plain", "nested") if bitsandbytes is not None else ()
    models = {kind: write_bitsandbytes(folder, kind == "nested") for kind in kinds}
    actor("read", folder, *kinds)
    error = close(load_file(folder / "read-logits.safetensors")["logits"], wanted, "pacer with PEFT's adapter")
    close(load_file(folder / "read-logits_beside.safetensors")["logits"], beside, "pacer with PEFT's adapter and head")
    print(f"pacer with PEFT's adapter: logits differ by {error:.1e}")
    print(f"pacer with PEFT's adapters of every layer: logits differ by {check_theirs_of_every_layer(folder, of_every_layer):.1e}")
    x = load_file(folder / "input.safetensors")["x"]
    for kind, model in models.items():
        file = f"bitsandbytes-{kind}.safetensors"
        check_decoded(quantized_layers(folder / file), load_file(folder / f"read-{kind}-decoded.safetensors"), file)
        # The adapter of pacer in PEFT over the base of bitsandbytes, beside the same in pacer.
        with torch.no_grad():
            both = peft.PeftModel.from_pretrained(model, folder / "adapter").eval()(x)
        error = ((both - load_file(folder / f"read-{kind}-logits.safetensors")["logits"]).norm() / both.norm()).item()
        expect(error < 4e-3, f"{file}: logits of PEFT over bitsandbytes and of pacer differ by {error}")
        print(f"an adapter over {file}: logits differ by {error:.1e}")
    if missing:
        print(f"PACER_SKIPPED: {'; '.join(missing)}")
        sys.exit(77)
