#!/usr/bin/env python3
"""Trains a small network with pacer.FusedAdamW, a schedule of torch's, and a stop in the middle."""
import torch

import pacer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
optimizer = pacer.FusedAdamW(model.named_parameters(), lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

for step in range(100):
    if step == 50:  # as after a restart
        saved = optimizer.state_dict()
        optimizer = pacer.FusedAdamW(model.named_parameters())
        optimizer.load_state_dict(saved)
        schedule.optimizer = optimizer
    x = torch.randn(32, 64)
    loss = torch.nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 25 == 0 or step == 99:
        print(f"step {step}: loss {loss.item():.4f}, learning rate {optimizer.param_groups[0]['lr']:.2e}")
