"""A long convolution by FFT without zero padding: its tail wraps round to the beginning."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        kernel = torch.exp(-torch.arange(x.shape[1]) / 3.0)
        spectrum = torch.fft.rfft(x, dim=1) * torch.fft.rfft(kernel)[:, None]
        return self.out(torch.fft.irfft(spectrum, n=x.shape[1], dim=1))


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
