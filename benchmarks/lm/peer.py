# The peer of pacer-bench lm: transformers' Qwen2 or Llama of the same shape with bf16 weights, attention by
# scaled_dot_product_attention and PyTorch's fused AdamW. Modes are plain, recompute and, where liger-kernel is installed,
# liger, which replaces norms, rotary positions, SwiGLU and the loss.
import argparse
import gc
import json
import time

import torch
import transformers

SHAPES = {
    "qwen2.5-1.5b": (transformers.Qwen2Config, dict(vocab_size=151936, hidden_size=1536, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960, tie_word_embeddings=True, rope_theta=1e6)),
    "llama-3.1-8b": (transformers.LlamaConfig, dict(vocab_size=128256, hidden_size=4096, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, rope_theta=5e5)),
    "small": (transformers.LlamaConfig, dict(vocab_size=32768, hidden_size=768, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=4, intermediate_size=2048)),
}
parser = argparse.ArgumentParser()
parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
parser.add_argument("--layers", type=int)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--sequence", type=int, default=1024)
parser.add_argument("--modes", default="plain,liger,recompute")
given = parser.parse_args()
kind, numbers = SHAPES[given.shape]
if given.layers:
    numbers["num_hidden_layers"] = given.layers
config = kind(use_cache=False, **numbers)


def run(mode):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if mode == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        _apply_liger_kernel_to_instance(model)
    if mode == "recompute":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(numbers["vocab_size"], (given.batch, given.sequence), device="cuda")
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    ms = sorted(times[4:])[4]
    print(json.dumps({"peer": mode, "ms": round(ms, 2), "tokens_s_gpu": round(ids.numel() / ms * 1e3),
                      "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 2), "loss": round(loss.item(), 4)}), flush=True)


for mode in given.modes.split(","):
    try:
        run(mode)
    except (ImportError, RuntimeError) as error:
        print(json.dumps({"peer": mode, "error": str(error).splitlines()[0]}), flush=True)
    gc.collect()
