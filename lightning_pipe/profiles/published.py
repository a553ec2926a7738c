"""Published layer profiles read as a graph and a profile, as if their model had been captured.

    graph, profile = load_published("bert-48-pbs-2.txt")
    judge(plan, Problem(graph, profile, cluster, samples=64))

The format is recognised by content: the text of PipeDream (Harlap, Narayanan et al., SOSP 2019) and DAPPLE (Fan et al.,
PPoPP 2021), see `profiles.published_text`, and the JSON of dnn-partitioning (Tarnawski et al., NeurIPS 2020), Piper
(Tarnawski et al., NeurIPS 2021), Sailor (Strati et al., SOSP 2025) and Galvatron (Miao et al., VLDB 2023), see the
module of each. What they become: `profiles.published_graph`.

What the formats leave out, and what is taken instead:

    most               times of the optimizer (none); times for other numbers of samples (in proportion)
    everywhere         which part of backward makes the gradients of parameters (all is one operation); tied parameters
                       (each layer has its own); batch statistics (no node is coupled); time of a call or message (none)
    PipeDream, DAPPLE  what a layer keeps inside (its inputs only, or `saved_bytes_per_sample`); that an operation in
                       place keeps nothing (it is counted like others); the device
    PipeDream, Piper,  the samples of the profile (`batch`); DAPPLE has them in the file's name
    dnn-partitioning
    dnn-partitioning   parameters and outputs apart (from the sizes of edges); what a layer keeps inside; the unit
    Piper              forward and backward apart (from the variant with recomputation); the unit of times
    Galvatron          the number of layers (`layers`); backward (twice forward); which end the rest of the time is at

Sailor and Galvatron have times for several numbers of samples, between which they are read along straight lines, and
Sailor has the seconds of the optimizer.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.errors import ProfileError
from lightning_pipe.profiles.published_dnn_partitioning import is_dnn_partitioning, layers_from_dnn_partitioning
from lightning_pipe.profiles.published_galvatron import is_galvatron, layers_from_galvatron
from lightning_pipe.profiles.published_graph import graph_of, profile_of
from lightning_pipe.profiles.published_layers import Layers, with_saved
from lightning_pipe.profiles.published_piper import is_piper, layers_from_piper
from lightning_pipe.profiles.published_sailor import is_sailor, layers_from_sailor
from lightning_pipe.profiles.published_text import is_graph_text, layers_from_text

ADAM_STATE = 2.0  # two moments in the parameters' own type


def load_published(
    path: str | Path,
    *,
    batch: int | None = None,
    saved_bytes_per_sample: float | None = None,
    optimizer_state: float = ADAM_STATE,
    layers: int | None = None,
) -> tuple[Graph, Profile]:
    """Read a published profile of layers.

    Args:
        path: file of PipeDream, DAPPLE, dnn-partitioning, Piper, Sailor (`profile.json`) or Galvatron
            (`computation_profiling_*.json`).
        batch: samples that the file was measured with; by default `N` of `pbs-N` in its name, otherwise 1, so that a
            sample stands for all samples that it was measured with.
        saved_bytes_per_sample: bytes that the whole model keeps per sample from forward to backward, for files that do
            not say what layers keep.
        optimizer_state: bytes of optimizer state per byte of parameters; 2.0 for Adam.
        layers: number of layers of the model, for Galvatron's files.

    Returns:
        The graph and its profile, for `planner.evaluation.evaluate.Problem`.

    Raises:
        ProfileError: if the file is no such profile, something in it is missing or cannot be, or an argument does not
            fit.
    """
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read {source}: {error}") from None
    read = _layers(text, Path(path), batch=batch, depth=layers)
    if saved_bytes_per_sample is not None:
        if any(layer.stash_per_sample for layer in read.layers):
            raise ProfileError(
                f"{source}: found saved_bytes_per_sample={saved_bytes_per_sample:g} for a file that says what layers "
                "keep; expected none. Leave it out."
            )
        read = with_saved(read, saved_bytes_per_sample, source=source)
    content = f"{read.samples} {saved_bytes_per_sample} {layers}\n{text}"
    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
    profile = profile_of(
        read, fingerprint=fingerprint, device=f"that of {Path(path).name}", optimizer_state=optimizer_state
    )
    return graph_of(read, fingerprint=fingerprint), profile


def _samples(stem: str) -> int:
    """Return the samples that the name of a DAPPLE file states, e.g. 32 of `vgg-19-pbs-32`; 1 if it states none."""
    found = re.search(r"pbs-(\d+)", stem)
    return int(found[1]) if found else 1


def _layers(text: str, path: Path, *, batch: int | None, depth: int | None) -> Layers:
    """Read the layers of a file by the reader of its format."""
    source = str(path)
    content = _json(text, source=source) if text.lstrip().startswith("{") else None
    if depth is not None and not is_galvatron(content):
        raise ProfileError(
            f"{source}: found layers={depth} for a file that lists its layers; expected none. Leave it out."
        )
    if is_sailor(content) or is_galvatron(content):
        if batch is not None:
            raise ProfileError(
                f"{source}: found batch={batch} for a file that says how many samples it was measured with; expected "
                "none. Leave it out."
            )
        own = is_sailor(content)
        return layers_from_sailor(content, path=path) if own else layers_from_galvatron(content, path=path, depth=depth)
    samples = _samples(path.stem) if batch is None else batch
    if samples < 1:
        raise ProfileError(f"{source}: found a profile of {samples} samples; expected at least 1. Pass `batch`.")
    if is_graph_text(text):
        return layers_from_text(text, samples=samples, source=source)
    if is_dnn_partitioning(content):
        return layers_from_dnn_partitioning(content, samples=samples, source=source)
    if is_piper(content):
        return layers_from_piper(content, samples=samples, source=source)
    start = next((line.strip() for line in text.splitlines() if line.strip()), "")
    raise ProfileError(
        f"{source}, line 1: found {start[:60]!r}, no profile of layers; expected lines with `forward_compute_time=...` "
        "(PipeDream, DAPPLE), or JSON of Piper, dnn-partitioning (`nodes` and `edges`), Sailor or Galvatron."
    )


def _json(text: str, *, source: str) -> object:
    try:
        content: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileError(
            f"{source}, line {error.lineno}: found no JSON ({error.msg}); expected a whole file."
        ) from None
    except (ValueError, RecursionError) as error:  # of a number or a depth that Python does not read
        raise ProfileError(f"{source}: found no JSON ({error}); expected numbers and lists that can be read.") from None
    return content
