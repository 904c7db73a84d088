"""A long convolution by FFT, zero padded: causal, though every float32 output feels the future's rounding."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        n = x.shape[1]
        kernel = torch.exp(-torch.arange(n) / 3.0)
        spectrum = torch.fft.rfft(x, n=2 * n, dim=1) * torch.fft.rfft(kernel, n=2 * n)[:, None]
        return self.out(torch.fft.irfft(spectrum, n=2 * n, dim=1)[:, :n])


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
