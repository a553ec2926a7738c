"""Weights come from files: each rank reads its own tensors, whatever wrote the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.errors import ConfigError
from lightning_pipe.strategy.checkpoints.files import give, open_weights
from lightning_pipe.strategy.parameters import initial_values
from lightning_pipe.strategy.parameters.building import building
from lightning_pipe.strategy.start.unread import Unread
from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import Losses, dapple, drawn_on_host, make_trainer

F64 = {"dtype": torch.float64}


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def write_safetensors(path: Path, state: dict[str, torch.Tensor]) -> Path:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_file(state, path)
    return path


def write_directory(path: Path, state: dict[str, torch.Tensor]) -> Path:
    """Write several files with an index, as transformers does."""
    path.mkdir()
    names = list(state)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, its in parts.items():
        write_safetensors(path / file, {name: state[name] for name in its})
    index = {"metadata": {}, "weight_map": {name: file for file, its in parts.items() for name in its}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def write_ckpt(path: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save({"state_dict": state, "epoch": 3}, path)
    return path


def write_dcp(path: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.distributed.checkpoint.save(state, checkpoint_id=path, no_dist=True)
    return path


WRITERS = {
    "model.safetensors": write_safetensors,
    "directory": write_directory,
    "model.ckpt": write_ckpt,
    "dcp": write_dcp,
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", WRITERS)
def test_all_kinds_of_files_give_their_values(kind: str, tmp_path: Path) -> None:
    source = plain()
    path = WRITERS[kind](tmp_path / kind, source.state_dict())
    with building():
        late = nn.ModuleDict({"model": plain()})
    give(late, path, reads=True)
    initial_values.make(late.parameters(), device=torch.device("cpu"))
    torch.testing.assert_close(late["model"].state_dict(), source.state_dict(), rtol=0, atol=0)


def test_adapters_around_layers_keep_their_own_values(tmp_path: Path) -> None:
    class Adapted(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.down = layer, nn.Linear(4, 1)

    path = write_ckpt(tmp_path / "model.ckpt", plain().state_dict())
    with building():
        late = plain()
        late[2] = Adapted(late[2])
    with pytest.warns(UserWarning, match=r"2 parameters are not in .*2\.down\.weight, 2\.down\.bias"):
        give(late, path, reads=True)
    initial_values.make(late.parameters(), device=torch.device("cpu"))
    assert torch.equal(late[2].base_layer.weight, plain()[2].weight)


def test_other_shapes_and_names_are_refused(tmp_path: Path) -> None:
    path = write_ckpt(tmp_path / "model.ckpt", plain().state_dict())
    with pytest.raises(ConfigError, match=r"0\.weight of .* has the shape \(4, 3\), and 0\.weight has \(5, 3\)"):
        give(nn.Sequential(nn.Linear(3, 5)), path, reads=True)
    with pytest.raises(ConfigError, match=r"no tensor of .* fits a parameter"):
        give(nn.ModuleDict({"other": nn.Embedding(3, 2)}), path, reads=True)
    for wrong in (tmp_path / "none", tmp_path, write_ckpt(tmp_path / "model.txt", {})):
        with pytest.raises(ConfigError, match=r"expected a \.safetensors file"):
            open_weights(wrong)


@contextmanager
def reads_counted() -> Iterator[list[int]]:
    """Note the bytes of every tensor that is read from a file inside."""
    read: list[int] = []
    of = Unread.of

    def counting(size: Any, dtype: torch.dtype, function: Any) -> Unread:
        unread = of(size, dtype, function)
        unread.read = lambda: read.append(unread.nbytes) or function()
        return unread

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unread, "of", counting)
        yield read


def fine_tune(path: str, options: dict[str, Any] | None) -> Any:
    """Fit from the weights of a file, and say how many bytes were read; a worker function."""
    losses = Losses()
    strategy = "auto" if options is None else dapple(weights=path, **options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[losses])
    with trainer.init_module(empty_init=options is not None):
        module = make_module("gpt_tied", seed=9, **F64).train()
    if options is None:
        module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    with reads_counted() as read:
        trainer.fit(module, make_loader("gpt_tied", **F64))
    return sum(read), losses.losses


def test_each_rank_reads_its_share_and_trains_as_one_device(tmp_path: Path) -> None:
    source = make_module("gpt_tied", **F64)
    path = write_ckpt(tmp_path / "model.ckpt", source.state_dict())
    whole = sum(parameter.nbytes for parameter in source.parameters())
    _, expected = fine_tune(str(path), None)
    found = World(2).run(fine_tune, str(path), {"layout": "1-1", "microbatches": 2, "check": False})
    tied = source.embed.weight.nbytes  # in the first and in the last stage
    assert sum(read for read, _ in found) == whole + tied
    for read, losses in found:
        assert read < whole
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)


class Adapted(pl.LightningModule):
    """A small LLaMA with LoRA, whose base comes from a directory."""

    def __init__(self, base: str | None = None) -> None:
        super().__init__()
        self.base, self.model = base, None

    def configure_model(self) -> None:
        if self.model is None:
            peft, llama = pytest.importorskip("peft"), llama_of_4_layers()
            if self.base is not None:
                llama.load_state_dict(type(llama).from_pretrained(self.base).state_dict())
            lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
            self.model = peft.get_peft_model(llama.double(), lora)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.model(input_ids=batch).logits[:, :-1]  # whose own loss is computed in float32
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def llama_of_4_layers() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=16, **sizes)
    return transformers.LlamaForCausalLM(config)


def adapt(directory: str, out: str, options: dict[str, Any] | None) -> Any:
    """Fine-tune by LoRA, save what is merged, and say what was read, and the losses; a worker function."""
    losses = Losses()
    strategy = "auto" if options is None else dapple(weights=directory, **options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[losses])
    torch.manual_seed(5)
    module = Adapted(base=directory if options is None else None)
    batches = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
    with reads_counted() as read:
        trainer.fit(module, DataLoader(batches, batch_size=4))
    with contextlib.nullcontext() if options is None else trainer.strategy.whole_module():
        if trainer.is_global_zero:
            module.model.merge_and_unload().save_pretrained(out)
    return sum(read), losses.losses


@drawn_on_host
def test_lora_on_a_sharded_directory_reads_shares_and_saves_what_is_merged(tmp_path: Path) -> None:
    """The directory, of several files, is larger than what a rank reads; merged weights are those of one device."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(3)
    source = llama_of_4_layers()
    source.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    _, expected = adapt(str(tmp_path / "base"), str(tmp_path / "plain"), None)
    options = {"layout": "1-1", "microbatches": 2, "restore": "none", "check": False}  # which reads all on rank 0
    found = World(2).run(adapt, str(tmp_path / "base"), str(tmp_path / "merged"), options)
    whole = sum(parameter.nbytes for parameter in source.parameters())
    assert sum(read for read, _ in found) == whole
    for read, losses in found:
        assert read < 0.7 * whole
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    merged, expected_state = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64).state_dict()
        for name in ("merged", "plain")
    )
    torch.testing.assert_close(merged, expected_state, rtol=1e-9, atol=1e-9)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[name], source.state_dict()[name].double())
