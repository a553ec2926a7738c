"""Published layer profiles read as a graph and a profile, as if their model had been captured.

    graph, profile = load_published("bert-48-pbs-2.txt")
    judge(plan, Problem(graph, profile, cluster, samples=64))

The format is recognised by content: the text of PipeDream (Harlap, Narayanan et al., SOSP 2019) and DAPPLE (Fan et al.,
PPoPP 2021), see `profiles.published_text`, and the JSON of Piper (Tarnawski et al., NeurIPS 2021), see
`profiles.published_piper`. What they become: `profiles.published_graph`.

What the formats leave out, and what is taken instead:

    everywhere         times of the optimizer (none); times for other numbers of samples (in proportion); which part of
                       backward makes the gradients of parameters (all is one operation); tied parameters (each layer
                       has its own); batch statistics (no node is coupled); time of a call or a message (none)
    PipeDream, DAPPLE  what a layer keeps inside (its inputs only, or `saved_bytes_per_sample`); that an operation in
                       place keeps nothing (it is counted like others); the device
    PipeDream, Piper   the samples of the profile (`batch`); DAPPLE has them in the file's name
    Piper              forward and backward apart (from the variant with recomputation); the unit of times
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.errors import ProfileError
from lightning_pipe.profiles.published_graph import graph_of, profile_of
from lightning_pipe.profiles.published_layers import Layers, with_saved
from lightning_pipe.profiles.published_piper import is_piper, layers_from_piper
from lightning_pipe.profiles.published_text import is_graph_text, layers_from_text

ADAM_STATE = 2.0  # two moments in the parameters' own type


def load_published(
    path: str | Path,
    *,
    batch: int | None = None,
    saved_bytes_per_sample: float | None = None,
    optimizer_state: float = ADAM_STATE,
) -> tuple[Graph, Profile]:
    """Read a published profile of layers.

    Args:
        path: file of PipeDream, DAPPLE or Piper.
        batch: samples that the file was measured with; by default `N` of `pbs-N` in its name, otherwise 1, so that a
            sample stands for all samples that it was measured with.
        saved_bytes_per_sample: bytes that the whole model keeps per sample from forward to backward, for files that do
            not say what layers keep.
        optimizer_state: bytes of optimizer state per byte of parameters; 2.0 for Adam.

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
    samples = _samples(Path(path).stem) if batch is None else batch
    if samples < 1:
        raise ProfileError(f"{source}: found a profile of {samples} samples; expected at least 1. Pass `batch`.")
    layers = _layers(text, samples=samples, source=source)
    if saved_bytes_per_sample is not None:
        if any(layer.stash_per_sample for layer in layers.layers):
            raise ProfileError(
                f"{source}: found saved_bytes_per_sample={saved_bytes_per_sample:g} for a file that says what layers "
                "keep; expected none. Leave it out."
            )
        layers = with_saved(layers, saved_bytes_per_sample, source=source)
    content = f"{samples} {saved_bytes_per_sample}\n{text}"
    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
    profile = profile_of(
        layers, fingerprint=fingerprint, device=f"that of {Path(path).name}", optimizer_state=optimizer_state
    )
    return graph_of(layers, fingerprint=fingerprint), profile


def _samples(stem: str) -> int:
    """Return the samples that the name of a DAPPLE file states, e.g. 32 of `vgg-19-pbs-32`; 1 if it states none."""
    found = re.search(r"pbs-(\d+)", stem)
    return int(found[1]) if found else 1


def _layers(text: str, *, samples: int, source: str) -> Layers:
    if is_graph_text(text):
        return layers_from_text(text, samples=samples, source=source)
    if text.lstrip().startswith("{"):
        content = _json(text, source=source)
        if is_piper(content):
            return layers_from_piper(content, samples=samples, source=source)
    start = next((line.strip() for line in text.splitlines() if line.strip()), "")
    raise ProfileError(
        f"{source}, line 1: found {start[:60]!r}, no profile of layers; expected lines with `forward_compute_time=...` "
        "(PipeDream, DAPPLE), or JSON with `nodes` and `edges` (Piper)."
    )


def _json(text: str, *, source: str) -> object:
    try:
        content: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileError(
            f"{source}, line {error.lineno}: found no JSON ({error.msg}); expected a whole file."
        ) from None
    return content
