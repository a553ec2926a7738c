"""Text: language models, translation, mixtures of experts, adapters, recurrent networks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo.entry import Entry, Trained, tokens
from zoo.vision import Attention

VOCABULARY, LENGTH = 29, 6


class Block(nn.Module):
    def __init__(self, width, dropout=0.1):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).contiguous().view(b, t, c)))
        return x + self.drop(self.mlp(self.ln2(x)))


class NanoGPT(Trained):
    """Tied embeddings, `view(-1)` before the loss, a count of tokens in the log."""

    def __init__(self, width=16, depth=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.wte.weight = self.head.weight

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.wte(x) + self.wpe(torch.arange(x.size(1), device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/tokens", float(x.numel()))
        return loss


class BertMLM(Trained):
    """Padding mask, masked positions only in the loss: micro-batches hold unequal numbers of them."""

    def __init__(self, width=16):
        super().__init__()
        self.word, self.position = nn.Embedding(VOCABULARY, width, padding_idx=0), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, VOCABULARY)
        self.register_buffer("position_ids", torch.arange(LENGTH)[None], persistent=False)

    def training_step(self, batch, batch_idx):
        x = self.word(batch["input_ids"]) + self.position(self.position_ids)
        x = self.encoder(x, src_key_padding_mask=batch["attention_mask"] == 0)
        loss = F.cross_entropy(self.decoder(x).transpose(1, 2), batch["labels"], ignore_index=-100)
        self.log("mlm", loss, on_epoch=True)
        return loss


def masked(samples):
    ids = torch.randint(3, VOCABULARY, (samples, LENGTH))
    attended = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (samples, 1))).long()
    chosen = torch.rand(samples, LENGTH) < 0.3
    chosen[:, 0] = True
    return {
        "input_ids": (ids * attended).masked_fill(chosen, 1),
        "attention_mask": attended,
        "labels": ids.masked_fill(~chosen, -100),
    }


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LlamaLayer(nn.Module):
    def __init__(self, width=16, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((width, 32), (width, 32), (32, width)))

    def rotate(self, x, cos, sin):
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + self.o(y)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(Trained):
    """Rotary positions computed once and read by all layers, grouped queries."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LlamaLayer(width) for _ in range(2))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4), persistent=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        cos, sin = (f(torch.cat((angles, angles), dim=-1)) for f in (torch.cos, torch.sin))
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, cos, sin)
        loss = F.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), y.flatten())
        self.log("perplexity", loss.detach().exp(), on_step=True)
        return loss


class Seq2Seq(Trained):
    """Encoder output read by every layer of the decoder; masks as `nn.Transformer` wants them."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, 2, 1, 2, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def training_step(self, batch, batch_idx):
        source, target = batch["source"], batch["target"]
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1) - 1, device=target.device)
        hidden = self.transformer(
            self.embed(source) * math.sqrt(16),
            self.embed(target[:, :-1]) * math.sqrt(16),
            tgt_mask=mask,
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        return F.cross_entropy(self.out(hidden).transpose(1, 2), target[:, 1:], ignore_index=0, label_smoothing=0.1)


def translation(samples):
    source = torch.randint(1, VOCABULARY, (samples, LENGTH))
    source[:, -2:] *= torch.randint(2, (samples, 2))
    return {"source": source, "target": torch.randint(1, VOCABULARY, (samples, LENGTH))}


class DenseMoE(Trained):
    """Experts run on everything, weighted by the gate; a loss that balances them over the batch."""

    def __init__(self, width=16, experts=4):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, width, 32) * 0.1)
        self.w2 = nn.Parameter(torch.randn(experts, 32, width) * 0.1)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.embed(x)
        scores = self.gate(h).softmax(-1)
        top, chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        experts = torch.einsum("btef,efd->bted", F.gelu(torch.einsum("btd,edf->btef", h, self.w1)), self.w2)
        h = h + torch.einsum("bted,bte->btd", experts, weights)
        balance = (scores.mean((0, 1)) * (weights > 0).float().mean((0, 1))).sum() * scores.shape[-1]
        self.log("balance", balance)
        return F.cross_entropy(self.head(h).transpose(1, 2), y) + 0.01 * balance


class SparseMoE(Trained):
    """Each expert gathers its own tokens: shapes depend on the data."""

    def __init__(self, width=16, experts=3):
        super().__init__()
        self.embed, self.gate = nn.Embedding(VOCABULARY, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.embed(x).flatten(0, 1)
        weight, chosen = self.gate(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == e).squeeze(-1)
            out = out.index_add(0, rows, expert(h[rows]) * weight[rows, None])
        return F.cross_entropy(self.head(h + out), y.flatten())


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.dropout = nn.Dropout(0.05)

    def forward(self, x):
        return self.base(x) + self.dropout(x) @ self.a.t() @ self.b.t() * 2.0


class LoRA(Trained):
    """A frozen model with small trained parts; only those go to the optimizer."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width).requires_grad_(False)
        self.block = Block(width).requires_grad_(False)
        self.block.qkv, self.block.out = LoRALinear(self.block.qkv), LoRALinear(self.block.out)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(self.block(self.embed(x))).transpose(1, 2), y)
        self.log("trainable", sum(p.numel() for p in self.parameters() if p.requires_grad), on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class LSTMLanguageModel(Trained):
    """Dropout between the layers of a recurrent network."""

    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden, _ = self.rnn(self.embed(x))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class GRUClassifier(Trained):
    """Both directions, time first, the last state of each."""

    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, bidirectional=True)
        self.head = nn.Linear(2 * width, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        _, last = self.rnn(self.embed(x).transpose(0, 1))
        return F.cross_entropy(self.head(torch.cat([last[0], last[1]], dim=-1)), y)


def labelled(samples):
    return torch.randint(VOCABULARY, (samples, LENGTH)), torch.randint(3, (samples,))


class PackedLSTM(Trained):
    """Sequences packed by their lengths: shapes depend on the data."""

    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 3)

    def training_step(self, batch, batch_idx):
        x, lengths, y = batch
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return F.cross_entropy(self.head(padded.sum(1) / lengths[:, None]), y)


def ragged(samples):
    x, y = labelled(samples)
    return x, torch.randint(2, LENGTH + 1, (samples,)), y


class TruncatedBPTT(Trained):
    """A hidden state kept on the module from batch to batch."""

    def __init__(self, width=12):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCABULARY, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)
        self.hidden = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        state = self.hidden if self.hidden is not None else torch.zeros(1, x.size(0), 12, device=x.device)
        out, hidden = self.rnn(self.embed(x), state)
        self.hidden = hidden.detach()
        return F.cross_entropy(self.head(out).transpose(1, 2), y)


class RewardModel(Trained):
    """Pairs of texts: one encoder called twice, a loss of their difference."""

    def __init__(self, width=16):
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCABULARY, width), Attention(width, 2)
        self.score = nn.Linear(width, 1)

    def reward(self, ids):
        return self.score(self.attention(self.embed(ids)).mean(1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        chosen, rejected = self.reward(batch["chosen"]), self.reward(batch["rejected"])
        self.log_dict({"accuracy": (chosen > rejected).float().mean(), "margin": (chosen - rejected).mean()})
        return -F.logsigmoid(chosen - rejected).mean()


def preferences(samples):
    return {name: torch.randint(VOCABULARY, (samples, LENGTH)) for name in ("chosen", "rejected")}


ENTRIES = {
    "nanogpt_tied": Entry(NanoGPT, tokens),
    "bert_mlm": Entry(BertMLM, masked),
    "llama": Entry(Llama, tokens),
    "seq2seq_transformer": Entry(Seq2Seq, translation),
    "moe_dense": Entry(DenseMoE, tokens),
    "moe_nonzero": Entry(SparseMoE, tokens, expected="data-dependent"),
    "lora_frozen_base": Entry(LoRA, tokens),
    "lstm_dropout": Entry(LSTMLanguageModel, tokens),
    "gru_bidirectional": Entry(GRUClassifier, labelled),
    "packed_sequences": Entry(PackedLSTM, ragged, expected="data-dependent"),
    "tbptt_hidden_state": Entry(TruncatedBPTT, tokens, expected="state"),
    "reward_pairs": Entry(RewardModel, preferences),
}
