"""A small convolutional network for handwritten digits, trained on images that are moved about.

People draw digits smaller, larger and more slanted than those of MNIST. So each image is turned, scaled, sheared and
shifted anew in every epoch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from experiments.datasets import Pair

EPOCHS, BATCH, RATE, DECAY = 12, 128, 3e-3, 1e-4
TURN, GROW, SHEAR, SHIFT = 0.25, 0.15, 0.2, 2 / 14  # radians, share, slope, share of half the width


def network() -> nn.Sequential:
    """28×28 pixels in [0, 1] -> ten logits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def moved(x: Tensor) -> Tensor:
    """Images `[N, 1, 28, 28]`, each under a random affine map."""
    amounts = 2 * torch.rand(6, len(x)) - 1
    angle, shear = TURN * amounts[0], SHEAR * amounts[1]
    wide, high = (1 + GROW * a for a in amounts[2:4])
    right, down = SHIFT * amounts[4], SHIFT * amounts[5]
    cosine, sine = angle.cos(), angle.sin()
    rows = [
        torch.stack([wide * cosine, wide * (shear * cosine - sine), right], -1),
        torch.stack([high * sine, high * (shear * sine + cosine), down], -1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def train(images: Pair, epochs: int = EPOCHS) -> nn.Sequential:
    """The network after `epochs`, in evaluation mode."""
    x, y = images
    model = network()
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    steps = epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in tqdm(range(epochs), desc="training", disable=None):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(model(moved(x[rows])), y[rows]).backward()
            optimiser.step()
            schedule.step()
    return model.eval()
