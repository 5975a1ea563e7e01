"""Parameters and steps that several tests train with."""
import torch


def random_parameters(sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def train(optimizer, params, steps):
    """A step for each number of `steps`, which decides its gradients."""
    for step in steps:
        generator = torch.Generator().manual_seed(10 + step)
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
