#!/usr/bin/env python3
"""CausalLm beside transformers' Llama, Qwen2 and Qwen3, and their folders both ways.

causal_lm_files.py CAUSAL_LM_ACTOR

Small models with random weights: logits, loss and the gradients of all parameters, and the logits of models that pacer
saved; the same with low-rank adapters, added to weights by hand and, where it is installed, by PEFT. Exits with 77 where
transformers is not installed.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ACTOR = sys.argv[1]
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging
except ImportError as error:
    print(f"PACER_SKIPPED: {error}")
    sys.exit(77)
logging.disable_progress_bar()
try:
    import peft
except ImportError:
    peft = None

# Sums of some hundred products in fp32, whose order differs, round to a few 1e-7 of their norm, which some layers make more
# of; a wrong theta, order of rows or norm is some 1e-2 and more.
BOUND = 1e-5
BF16_BOUND = 0.03  # roundings to 8 bits, in other places

COMMON = dict(vocab_size=56, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.02, attn_implementation="eager")


def theta(value):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


# Of four pairs one turns as before, one goes slower by less than the factor, and two by all of it.
LLAMA3 = dict(rope_type="llama3", rope_theta=20.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=2.2, original_max_position_embeddings=16)
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**COMMON, num_key_value_heads=2, rms_norm_eps=1e-3, **theta(500.0))),
    "llama3": (LlamaForCausalLM, LlamaConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**COMMON, num_key_value_heads=1, tie_word_embeddings=True, **theta(100.0))),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=16, **theta(100.0))),
}


def expect(condition, text):
    if not condition:
        sys.exit(text)


def close(found, wanted, what, bound=BOUND):
    expect(found.shape == wanted.shape, f"{what}: {tuple(found.shape)} instead of {tuple(wanted.shape)}")
    error = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    expect(error < bound, f"{what}: differs by {error:.1e}")
    return error


def actor(*arguments, fails=False):
    done = subprocess.run([ACTOR, *map(str, arguments)], capture_output=True, text=True)
    expect((done.returncode == 1) == fails and done.returncode in (0, 1), f"causal_lm_actor {arguments[0]} ended with {done.returncode}: {done.stderr}")
    return done.stderr


def random_model(kind):
    make, config = KINDS[kind]
    torch.manual_seed(3)
    model = make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() == 2 else parameter.normal_(0.7, 0.4)
    return model


def packed_gradients(model):
    """Gradients by pacer's names: rows of queries, keys and values under one name, and of gates and what they let through."""
    found = {"embedding.weight": model.model.embed_tokens.weight, "norm.weight": model.model.norm.weight}
    if not model.config.tie_word_embeddings:
        found["head.weight"] = model.lm_head.weight
    found = {name: parameter.grad for name, parameter in found.items()}
    for number, layer in enumerate(model.model.layers):
        attention, mlp, name = layer.self_attn, layer.mlp, f"layers.{number}."
        found[name + "qkv.norm.weight"] = layer.input_layernorm.weight.grad
        rows = [attention.q_proj, attention.k_proj, attention.v_proj]
        found[name + "qkv.linear.weight"] = torch.cat([linear.weight.grad for linear in rows])
        if attention.q_proj.bias is not None:
            found[name + "qkv.linear.bias"] = torch.cat([linear.bias.grad for linear in rows])
        if hasattr(attention, "q_norm"):
            found[name + "q_norm.weight"], found[name + "k_norm.weight"] = attention.q_norm.weight.grad, attention.k_norm.weight.grad
        found[name + "projection.weight"] = attention.o_proj.weight.grad
        found[name + "mlp.norm.weight"] = layer.post_attention_layernorm.weight.grad
        found[name + "mlp.fc1.weight"] = torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad])
        found[name + "mlp.fc2.weight"] = mlp.down_proj.weight.grad
    return found


def check_read(folder, model, batch, what):
    """A folder of transformers in pacer, against its model."""
    out = folder / "found.safetensors"
    actor("read", folder, batch, out)
    ids, targets = (load_file(batch)[name] for name in ("ids", "targets"))
    model.zero_grad()
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    found = load_file(out)
    out.unlink()
    errors = [close(found["logits"], logits, f"{what}: logits"), close(found["loss"], loss, f"{what}: loss")]
    wanted = packed_gradients(model)
    expect(set(found) == {"logits", "loss", *("gradient." + name for name in wanted)}, f"{what}: pacer has {sorted(found)}")
    errors += [close(found["gradient." + name], gradient, f"{what}: the gradient of {name}") for name, gradient in wanted.items()]
    print(f"{what} in pacer: logits, loss and gradients differ by up to {max(errors):.1e}")


PREFIX = "base_model.model."


def adapted_logits(folder, adapter, ids, what):
    """Of the model in the folder with an adapter: with what its two matrices make added to each weight."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        for name in {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in tensors}:
            a, b = (tensors[f"{PREFIX}{name}.lora_{matrix}.weight"] for matrix in "AB")
            model.get_submodule(name).weight += scale * b @ a
        logits = model(ids).logits
        if peft:
            base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
            close(peft.PeftModel.from_pretrained(base, adapter).eval()(ids).logits, logits, f"PEFT with {what}")
    return logits


def check_adapter_of_peft(folder, model, batch, what):
    """An adapter of some layers, each with matrices of its own, as PEFT writes it."""
    adapter = folder / "adapter"
    adapter.mkdir()
    tensors = {}
    for name, layer in model.named_modules():
        if name.rsplit(".", 1)[-1] in ("q_proj", "v_proj", "up_proj", "o_proj"):
            tensors[f"{PREFIX}{name}.lora_A.weight"] = 0.2 * torch.randn(2, layer.in_features)
            tensors[f"{PREFIX}{name}.lora_B.weight"] = 0.2 * torch.randn(layer.out_features, 2)
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    actor("adapted", folder, adapter, batch, adapter / "found")
    logits = adapted_logits(folder, adapter, load_file(batch)["ids"], what)
    expect((logits - model(load_file(batch)["ids"]).logits).norm() > 0.1 * logits.norm(), f"{what}: the adapter does next to nothing")
    error = close(load_file(adapter / "found")["logits"], logits, f"{what} with an adapter in pacer")
    print(f"{what} with an adapter of PEFT's in pacer: logits differ by {error:.1e}")


def edited(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    (folder / "config.json").write_text(json.dumps(config))


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    torch.manual_seed(4)
    text = torch.randint(56, (3, 21))
    text[1, 15:] = -100  # targets that do not count
    ids, targets = text[:, :-1].clamp(min=0).contiguous(), text[:, 1:].contiguous()
    batch = folder / "batch.safetensors"
    save_file({"ids": ids, "targets": targets}, batch)
    for kind in KINDS:
        model = random_model(kind)
        model.save_pretrained(folder / kind)
        check_read(folder / kind, model, batch, kind)
        check_adapter_of_peft(folder / kind, model, batch, kind)
        # In several files with an index, in 16 bits, and with the words of transformers 4.
        sharded = folder / (kind + "_sharded")
        model.to(torch.bfloat16).save_pretrained(sharded, max_shard_size="10KB")
        expect((sharded / "model.safetensors.index.json").exists(), "the folder has one file")
        config = json.loads((sharded / "config.json").read_text())
        scaling = {name: value for name, value in config["rope_parameters"].items() if name != "rope_theta"}
        edited(sharded, rope_theta=config["rope_parameters"]["rope_theta"], rope_parameters=None, torch_dtype="bfloat16",
               rope_scaling=None if scaling["rope_type"] == "default" else scaling)
        again = AutoModelForCausalLM.from_pretrained(sharded, dtype=torch.float32, attn_implementation="eager").eval()
        check_read(sharded, again, batch, f"{kind} in several files of 16 bits")

    # What transformers would do with such fields, CausalLm does not: no silence.
    for fields in ({"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}, {"attention_bias": True}, {"model_type": "mistral"}):
        model = random_model("qwen3")
        model.save_pretrained(folder / "refused")
        edited(folder / "refused", **fields)
        said = actor("read", folder / "refused", batch, folder / "none", fails=True)
        expect("config.json" in said and next(iter(fields)) in said, f"{fields}: {said}")

    written = folder / "written"
    actor("write", written)
    for path in sorted(written.iterdir()):
        is_bf16 = path.name.endswith("_bf16")
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        expect(model.config.model_type == path.name.split("_")[0], f"{path.name} became a {model.config.model_type}")
        expect(model.dtype == (torch.bfloat16 if is_bf16 else torch.float32), f"{path.name} became {model.dtype}")
        expect(model.config.max_position_embeddings == (2048 if is_bf16 else 64), f"{path.name} has {model.config.max_position_embeddings} positions")
        there = load_file(path / "logits")
        with torch.no_grad():
            logits = model(there["ids"]).logits
        error = close(logits.float(), there["logits"], f"transformers with {path.name}", BF16_BOUND if is_bf16 else BOUND)
        print(f"{path.name} of pacer in transformers: logits differ by {error:.1e}")
        if is_bf16:
            continue
        wanted = adapted_logits(path, path / "adapter", there["ids"], path.name)
        error = close(load_file(path / "adapter" / "logits")["logits"], wanted, f"transformers with the adapter of {path.name}")
        print(f"the adapter of {path.name} in transformers: logits differ by {error:.1e}")
