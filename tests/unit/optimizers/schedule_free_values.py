"""Prints the known answers of schedule_free.cpp; needs torch and schedulefree 1.4.1."""
import schedulefree
import torch


def braced(numbers):
    return "{" + ", ".join(repr(number) for number in numbers) + "}"


def leaf(shift):
    return torch.tensor([0.5 + shift, -1.25, 2.0, -0.125], dtype=torch.float64, requires_grad=True)


weights = [leaf(0), leaf(1), leaf(2)]
optimizer = schedulefree.AdamWScheduleFree(
    [{"params": [weights[0]], "weight_decay": 0.125}, {"params": [weights[1]], "lr": 2**-7, "r": 1.5}], lr=2**-6,
    betas=(0.875, 0.96875), eps=2**-20, warmup_steps=20, foreach=False)
optimizer.train()
for t in range(150):
    if t == 50:
        optimizer.add_param_group({"params": [weights[2]]})
        optimizer.param_groups[-1]["train_mode"] = True
    optimizer.param_groups[0]["lr"] = 2**-6 * (1 + (t % 3) / 4)
    for n, y in enumerate(weights):
        y.grad = torch.tensor([((t * 7 + i * 3 + n) % 11 - 5) / 8 for i in range(4)], dtype=torch.float64)
    optimizer.step()
at_y = [y.tolist() for y in weights]
optimizer.eval()
for y, before, group in zip(weights, at_y, optimizer.param_groups):
    print(f"{{{braced(before)}, {braced(optimizer.state[y]['z'].tolist())}, {braced(y.tolist())}, {group['weight_sum']!r}, "
          f"{group['lr_max']!r}}},")
