"""Sound: spectra, augmentation, alignment."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from zoo.entry import Entry, Trained


def sounds(samples):
    return torch.randn(samples, 64), torch.randint(4, (samples,))


class WaveNet(Trained):
    """Dilated causal convolutions with gates, residuals and skips."""

    def __init__(self, width=8):
        super().__init__()
        self.inside = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(3))
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.inside(x[:, None])
        skips = 0
        for i, (layer, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
            signal, gate = layer(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            out = torch.tanh(signal) * torch.sigmoid(gate)
            skips = skips + out
            x = x + mix(out)
        return F.cross_entropy(self.head(F.relu(skips).mean(-1)), y)


class Spectrogram(Trained):
    """A short-time Fourier transform inside the step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(16), persistent=False)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(4, 4)

    def spectrum(self, x):
        return torch.stft(x, 16, 8, window=self.window, return_complex=True).abs().clamp(min=1e-5).log()

    def augment(self, spectrum):
        return spectrum

    def training_step(self, batch, batch_idx):
        x, y = batch
        features = self.net(self.augment(self.spectrum(x))[:, None]).flatten(1)
        return F.cross_entropy(self.head(features), y)


class SpecAugment(Spectrogram):
    """Bands hidden at places that NumPy draws."""

    def augment(self, spectrum):
        start = np.random.randint(0, spectrum.shape[1] - 2)
        spectrum = spectrum.clone()
        spectrum[:, start : start + 2] = 0
        return spectrum


class CTC(Trained):
    """An alignment loss with a length per sample, as Python numbers."""

    def __init__(self, width=12):
        super().__init__()
        self.rnn = nn.GRU(6, width, batch_first=True)
        self.head = nn.Linear(width, 5)

    def training_step(self, batch, batch_idx):
        x, lengths, y = batch
        log_probabilities = self.head(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)
        targets = torch.full((x.size(0),), y.size(1), dtype=torch.long)
        loss = F.ctc_loss(log_probabilities, y, lengths, targets, zero_infinity=True)
        self.log("ctc", loss)
        return loss


def speech(samples):
    return torch.randn(samples, 10, 6), torch.randint(7, 11, (samples,)), torch.randint(1, 5, (samples, 3))


ENTRIES = {
    "wavenet": Entry(WaveNet, sounds),
    "stft": Entry(Spectrogram, sounds),
    "specaugment_numpy": Entry(SpecAugment, sounds, expected="NumPy random numbers"),
    "ctc": Entry(CTC, speech, expected="data-dependent"),
}
