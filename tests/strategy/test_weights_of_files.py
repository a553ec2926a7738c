"""Weights come from files: each rank reads its own tensors, whatever wrote the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.errors import ConfigError
from lightning_pipe.strategy.checkpoints.files import give, open_weights
from lightning_pipe.strategy.parameters import initial_values
from lightning_pipe.strategy.parameters.building import building
from lightning_pipe.strategy.start.unread import Unread
from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

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


def fine_tune(path: str, options: dict[str, Any] | None) -> Any:
    """Fit from the weights of a file, and say how many bytes were read; a worker function."""
    read, of = [], Unread.of

    def counting(size: Any, dtype: torch.dtype, function: Any) -> Unread:
        unread = of(size, dtype, function)
        unread.read = lambda: read.append(unread.nbytes) or function()
        return unread

    losses = Losses()
    strategy = "auto" if options is None else dapple(weights=path, **options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[losses])
    with trainer.init_module(empty_init=options is not None):
        module = make_module("gpt_tied", seed=9, **F64).train()
    if options is None:
        module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unread, "of", counting)
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
