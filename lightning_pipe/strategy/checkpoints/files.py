"""Files and directories of weights, whose tensors are read one by one, by the rank that needs them.

    model.safetensors                      one file
    DIR/model.safetensors.index.json       several, with an index, as transformers writes them; or DIR/model.safetensors
    *.ckpt, *.pt, *.pth, *.bin             of torch.save: of Lightning (its `state_dict`), or a dict of tensors
    DIR/.metadata                          of torch.distributed.checkpoint

Files are mapped into memory, so that reading a tensor reads its bytes and no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_pipe.errors import ConfigError, PipeError
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.strategy.checkpoints.checksums import StorageSums, check_entries
from lightning_pipe.strategy.checkpoints.sharded import MODEL, Directory, is_sharded, unreadable
from lightning_pipe.strategy.parameters.pending import Pending
from lightning_pipe.strategy.start.unread import Unread

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_OF_TORCH = (".ckpt", ".pt", ".pth", ".bin")
_EXPECTED = (
    "expected a .safetensors file, a directory with model.safetensors or its index.json, a file of torch.save "
    f"({', '.join(_OF_TORCH)}), or a directory of torch.distributed.checkpoint"
)


def open_weights(path: Path) -> Mapping[str, Unread]:
    """Return the tensors in a file or directory, by name; none is read yet.

    Raises:
        ConfigError: if there are none, or they cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"found no file or directory weights={str(path)!r}; {_EXPECTED}.")
    try:
        if is_sharded(path):
            return _of_model(Directory(path))
        if path.is_dir():
            return _safetensors(_files_of(path))
        if path.suffix == ".safetensors":
            return _safetensors([path])
        if path.suffix in _OF_TORCH:
            return _of_torch(path)
    except PipeError:
        raise
    except Exception as error:  # whatever a damaged file makes torch, safetensors and others raise
        raise ConfigError(f"weights={str(path)!r} cannot be read: {type(error).__name__}: {error}") from error
    raise ConfigError(f"found weights={str(path)!r}; {_EXPECTED}.")


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a directory of transformers."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
        if elsewhere := [name for name in names if Path(name).name != name]:
            raise ConfigError(f"found {elsewhere[0]!r} in {folder / INDEX}; expected names of files beside it.")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ConfigError(f"found neither {INDEX} nor {SINGLE} in weights={str(folder)!r}; {_EXPECTED}.")


def _safetensors(files: list[Path]) -> dict[str, Unread]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ConfigError(
            "found weights in .safetensors, which need `pip install 'lightning-pipe[weights]'`."
        ) from None
    found: dict[str, Unread] = {}
    for file in files:
        opened: Any = safe_open(str(file), framework="pt", device="cpu")
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            piece = opened.get_slice(name)
            dtype = DTYPES[piece.get_dtype()]
            found[name] = Unread.of(piece.get_shape(), dtype, _reader(opened, name))
    return found


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def _reader(opened: Any, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    return read


def _of_torch(path: Path) -> dict[str, Unread]:
    """Return what torch.save has written: the state dict of a checkpoint, or tensors by name."""
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    check_entries(path, with_tensors=False)
    state = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ConfigError(f"found no state dict in weights={str(path)!r}; expected tensors by name.")
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    sums = StorageSums(path)

    def read(name: str) -> torch.Tensor:
        with unreadable(path, f"{name} in "):
            return sums.check(tensors[name])

    once: dict[tuple[Any, ...], Unread] = {}  # what hangs in several places stays one tensor
    found = {}
    for name, value in tensors.items():
        place = (value.data_ptr() or name, value.shape, value.stride(), value.dtype)
        found[name] = once.setdefault(place, Unread.of(value.shape, value.dtype, partial(read, name)))
    return found


def _of_model(directory: Directory) -> dict[str, Unread]:
    """Return the tensors of the module in a directory: those under `model.`, or all where there are none."""
    prefix = f"{MODEL}."
    named = {name.removeprefix(prefix): directory[name] for name in directory if name.startswith(prefix)}
    return named or dict(directory)


def give(module: nn.Module, path: Path, *, reads: bool) -> None:
    """Let the parameters and buffers of a module have the values of a file or directory.

    Those that have no values yet read them when they are made, by the ranks that hold them. A name fits if it is that
    of the module, or that behind one prefix (`model.` before the names of transformers) and without the `base_layer`
    that adapters put around a layer.

    Args:
        module: the module.
        path: the file or directory.
        reads: whether parameters with values, and buffers, are read on this rank.

    Raises:
        ConfigError: if nothing fits, or a tensor has another shape.
    """
    weights = open_weights(path)
    targets = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    sources = _matched(targets, weights)
    if not sources:
        raise ConfigError(
            f"no tensor of weights={str(path)!r} fits a parameter: it has {', '.join(list(weights)[:3])}, ...; the "
            f"module has {', '.join(list(targets)[:3])}, ... Rename them in the file, or load them in configure_model."
        )
    _tell(targets, weights, sources, path)
    with torch.no_grad():
        for name, source in sources.items():
            target, value = targets[name], weights[source]
            if target.shape != value.shape:
                raise ConfigError(
                    f"{source} of weights={str(path)!r} has the shape {tuple(value.shape)}, and {name} has "
                    f"{tuple(target.shape)}. Build the module with the configuration of the file."
                )
            if isinstance(target, Pending) or reads:
                target.copy_(value)


def _matched(targets: Mapping[str, torch.Tensor], weights: Mapping[str, Unread]) -> dict[str, str]:
    """Return for names of the module those of the file, with the prefix by which most fit."""
    plain = {name: name.replace(".base_layer.", ".") for name in targets}
    fitting: dict[str, dict[str, str]] = {}
    for name, spelled in plain.items():
        parts = spelled.split(".")
        for cut in range(len(parts)):
            source = ".".join(parts[cut:])
            if source in weights:
                fitting.setdefault(".".join(parts[:cut]), {})[name] = source
    return max(fitting.values(), key=len, default={})


def _tell(
    targets: Mapping[str, torch.Tensor], weights: Mapping[str, Unread], sources: Mapping[str, str], path: Path
) -> None:
    """Warn of what is not in the file, and of what of it is not used."""
    given = {id(targets[name]) for name in sources}
    missing = [name for name, tensor in targets.items() if id(tensor) not in given and isinstance(tensor, nn.Parameter)]
    unused = [name for name in weights if name not in set(sources.values())]
    if missing:
        rank_zero_warn(
            f"{len(missing)} parameters are not in weights={str(path)!r}, and keep the values that the module gives "
            f"them: {_some(missing)}."
        )
    if unused:
        rank_zero_warn(f"{len(unused)} tensors of weights={str(path)!r} belong to no parameter: {_some(unused)}.")


def _some(names: list[str]) -> str:
    most = 4
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
