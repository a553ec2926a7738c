"""The kinds of training steps that are found in projects: which route takes each, as the tests of the zoo show it.

test_zoo_pipelines shows that "joint" has the gradients of the plain module, test_zoo_replay the same for what that
refuses, and test_zoo_libraries both for models of other libraries.
"""

from __future__ import annotations

import re
from pathlib import Path

from zoo import ZOO
from zoo.libraries import LIBRARIES
from zoo.test_zoo_replay import OTHERWISE

DOCUMENT = Path(__file__).parents[2] / "docs" / "capture.md"
KINDS = {
    "vision": "mlp_classifier resnet_batchnorm unet_skips unet_resnet_encoder unet_residual_volumes detr_hungarian",
    "text": "nanogpt_tied seq2seq_transformer demo_transformer demo_lstm_tbptt lstm_dropout packed_sequences "
    "moe_nonzero moe_capacity",
    "generation": "vae vae_distributions mae vqvae_ema deepar",
    "representation": "simclr byol_parameters distillation_frozen_teacher",
    "structure": "tabular_mixed embedding_bag_offsets gcn_index_add gcn_self_loops",
    "sound": "specaugment_numpy ctc",
    "habits": "demo_boring item_logging nan_guard curriculum_global_step layerdrop_python_random autocast_inside "
    "gradient_penalty spectral_and_weight_norm custom_autograd_function checkpoint_nonreentrant hook_prints "
    "mixup_numpy masked_select_loss manual_gan",
    "libraries": "hf_bert_mlm hf_gpt2_lm hf_llama hf_llama_gradckpt hf_t5 hf_vit hf_mixtral_moe hf_lora_peft "
    "hf_whisper hf_wav2vec2_ctc timm_vit_tiny timm_convnext timm_efficientnet_b0 timm_swin_tiny ddpm_diffusers_unet",
}
ENTRIES = {**ZOO, **{name: entry for entries in LIBRARIES.values() for name, entry in entries.items()}}


def routes() -> dict[str, set[str]]:
    """Return the kinds by the first route that takes them."""
    found: dict[str, set[str]] = {"joint": set(), "replay": set(), "refused": set()}
    for name in (name for names in KINDS.values() for name in names.split()):
        expected = ENTRIES[name].expected
        refused = expected == "manual optimization" or name in OTHERWISE
        found["joint" if expected == "joint" else "refused" if refused else "replay"].add(name)
    return found


def test_the_two_routes_take_every_kind_of_step_but_one():
    """Manual optimization is none of a pipeline's steps; so this is 56 of 56."""
    found = routes()
    assert sum(map(len, found.values())) == 57
    assert found["refused"] == {"manual_gan"}, found


def test_the_document_says_what_the_tests_show():
    section = DOCUMENT.read_text().partition("## What was tried")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (joint|replay|refused) \|(.*)\|$", section, flags=re.MULTILINE)
    said = {
        route: {name for row, text in rows if row == route for name in re.findall(r"`(\w+)`", text)}
        for route, _ in rows
    }
    assert said == routes()
