"""Prints the known answers of schedule_free.cpp; needs torch and schedulefree 1.4.1."""
import schedulefree
import torch


def braced(numbers):
    return "{" + ", ".join(repr(number) for number in numbers) + "}"


# warmup_steps, r, weight_lr_power, weight_decay, beta1, and whether the learning rate moves
RUNS = ((0, 0.0, 2.0, 0.0, 0.9, False), (10, 1.5, 2.0, 0.125, 0.9, True), (7, 0.25, 0.5, 0.25, 0.75, True))
for warmup, r, power, decay, beta1, moves in RUNS:
    y = torch.tensor([0.5, -1.25, 2.0, -0.125], dtype=torch.float64, requires_grad=True)
    optimizer = schedulefree.AdamWScheduleFree(
        [y], lr=2**-6, betas=(beta1, 0.96875), eps=2**-20, weight_decay=decay, warmup_steps=warmup, r=r,
        weight_lr_power=power, foreach=False)
    optimizer.train()
    group = optimizer.param_groups[0]
    for t in range(200):
        if moves:
            group["lr"] = 2**-6 * (1 + (t % 3) / 4)
        y.grad = torch.tensor([((t * 7 + i * 3) % 11 - 5) / 8 for i in range(4)], dtype=torch.float64)
        optimizer.step()
    at_y, z = y.tolist(), optimizer.state[y]["z"].tolist()
    optimizer.eval()
    print(f"{{{{{warmup}, {r}, {power}}}, {decay}, {beta1}, {str(moves).lower()}, {braced(at_y)}, {braced(z)}, "
          f"{braced(y.tolist())}, {group['weight_sum']!r}, {group['lr_max']!r}}},")
