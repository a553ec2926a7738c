"""Models of libraries, as projects wrap them: tiny configurations with random weights, by the package they need."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from zoo.entry import Entry, Trained, images, tokens

VOCABULARY, LENGTH, WIDTH = 29, 6, 32
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}


def transformers(model: str, configuration: str, **options: Any) -> torch.nn.Module:
    """Build a model of that package; in eager mode its models begin in, so training is asked for."""
    library = importlib.import_module("transformers")
    return getattr(library, model)(getattr(library, configuration)(vocab_size=VOCABULARY, **options)).train()


class FineTuned(Trained):
    """A model that finds its own loss, called with the batch as keywords."""

    def __init__(self):
        super().__init__()
        self.model = self.build()

    def training_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.log("train_loss", outputs.loss, prog_bar=True)
        return outputs.loss


class Bert(FineTuned):
    def build(self):
        return transformers("BertForMaskedLM", "BertConfig", max_position_embeddings=LENGTH, **SMALL)


class GPT2(FineTuned):
    def build(self):
        return transformers("GPT2LMHeadModel", "GPT2Config", n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2)


class Llama(FineTuned):
    def build(self):
        return transformers("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1, **SMALL)


class CheckpointedLlama(Llama):
    """Gradient checkpointing, and no cache of keys."""

    def build(self):
        model = super().build()
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


class T5(FineTuned):
    def build(self):
        small = {"d_model": WIDTH, "d_kv": 16, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 2}
        return transformers("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0, **small)


class Mixtral(FineTuned):
    """A mixture of experts with the loss that balances them, of what hooks keep that the first call installs."""

    def build(self):
        experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True}
        return transformers("MixtralForCausalLM", "MixtralConfig", num_key_value_heads=1, **experts, **SMALL)


class Whisper(FineTuned):
    def build(self):
        small = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        small |= {"encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH, "d_model": WIDTH, "num_mel_bins": 8}
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        lengths = {"max_source_positions": 8, "max_target_positions": LENGTH}
        return transformers("WhisperForConditionalGeneration", "WhisperConfig", **small, **ends, **lengths)


class Wav2Vec2(FineTuned):
    """Spans of the sound hidden at places that NumPy draws; an alignment loss with lengths found from data."""

    def build(self):
        convolutions = {
            "conv_dim": (16, 16),
            "conv_stride": (2, 2),
            "conv_kernel": (3, 3),
            "num_feat_extract_layers": 2,
        }
        positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        hidden = {"mask_time_prob": 0.2, "mask_time_length": 2, "layerdrop": 0.0, "ctc_zero_infinity": True}
        return transformers("Wav2Vec2ForCTC", "Wav2Vec2Config", **convolutions, **positions, **hidden, **SMALL)


class ViT(Trained):
    """An image classifier whose loss is found by the project."""

    def __init__(self):
        super().__init__()
        library = importlib.import_module("transformers")
        config = library.ViTConfig(image_size=8, patch_size=4, num_labels=5, hidden_dropout_prob=0.1, **SMALL)
        self.model = library.ViTForImageClassification(config).train()

    def training_step(self, batch, batch_idx):
        pixels, labels = batch
        loss = F.cross_entropy(self.model(pixel_values=pixels).logits, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class LoRA(GPT2):
    """A frozen model with adapters; only those go to the optimizer."""

    def build(self):
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(super().build(), config)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Diffusion(Trained):
    """A U-Net and a noise schedule, which is no module and moves its tables when it is called."""

    def __init__(self):
        super().__init__()
        diffusers = importlib.import_module("diffusers")
        self.model = diffusers.UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=8,
        )
        self.scheduler = diffusers.DDPMScheduler(num_train_timesteps=50)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        noise = torch.randn_like(x)
        steps = torch.randint(0, self.scheduler.config.num_train_timesteps, (x.size(0),), device=self.device)
        loss = F.mse_loss(self.model(self.scheduler.add_noise(x, noise, steps), steps).sample, noise)
        self.log("train_loss", loss)
        return loss


class Timm(Trained):
    """A model of timm by name, with smoothed labels."""

    def __init__(self):
        super().__init__()
        self.model = self.build(importlib.import_module("timm"))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.log_dict({"loss": loss, "accuracy": (logits.argmax(-1) == y).float().mean()})
        return loss


class TimmViT(Timm):
    def build(self, timm):
        small = {"img_size": 16, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
        return timm.create_model("vit_tiny_patch16_224", num_classes=5, drop_path_rate=0.1, **small)


class TimmConvNeXt(Timm):
    def build(self, timm):
        small = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
        return timm.create_model("convnext_tiny", num_classes=5, drop_path_rate=0.1, **small)


class TimmEfficientNet(Timm):
    """Squeeze and excitation, batch statistics, drop path; three of the stages."""

    def build(self, timm):
        parts = importlib.import_module("timm.models.efficientnet")
        stages = [["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r2_k3_s2_e2_c8_se0.25"], ["ir_r1_k5_s2_e2_c16_se0.25"]]
        blocks = parts.decode_arch_def(stages)
        return parts.EfficientNet(blocks, num_classes=5, num_features=32, stem_size=8, drop_path_rate=0.1)


class TimmSwin(Timm):
    def build(self, timm):
        small = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2)}
        return timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, drop_path_rate=0.1, **small)


def masked(samples):
    ids = torch.randint(3, VOCABULARY, (samples, LENGTH))
    attended = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (samples, 1))).long()
    chosen = torch.rand(samples, LENGTH) < 0.3
    chosen[:, 0] = True
    return {"input_ids": ids * attended, "attention_mask": attended, "labels": ids.masked_fill(~chosen, -100)}


def text(samples):
    ids = tokens(samples, length=LENGTH, vocabulary=VOCABULARY)[0]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def translation(samples):
    source = torch.randint(1, VOCABULARY, (samples, LENGTH))
    return {"input_ids": source, "attention_mask": source.ne(3).long(), "labels": source.flip(1)[:, :4].contiguous()}


def sound(samples):
    return {"input_features": torch.randn(samples, 8, 16), "labels": torch.randint(3, VOCABULARY, (samples, 4))}


def speech(samples):
    heard = (torch.arange(64) < torch.randint(40, 65, (samples, 1))).long()
    return {
        "input_values": torch.randn(samples, 64),
        "attention_mask": heard,
        "labels": torch.randint(1, VOCABULARY, (samples, 3)),
    }


def large_images(samples):
    return images(samples, size=32)


def small_images(samples):
    return images(samples, size=16)


def pictures(samples):
    return (torch.randn(samples, 1, 8, 8),)


LIBRARIES: dict[str, dict[str, Entry]] = {
    "transformers": {
        "hf_bert_mlm": Entry(Bert, masked),
        "hf_gpt2_lm": Entry(GPT2, text),
        "hf_llama": Entry(Llama, text),
        "hf_llama_gradckpt": Entry(CheckpointedLlama, text),
        "hf_t5": Entry(T5, translation),
        "hf_vit": Entry(ViT, images),
        "hf_mixtral_moe": Entry(Mixtral, text, expected="state"),
        "hf_whisper": Entry(Whisper, sound),
        "hf_wav2vec2_ctc": Entry(Wav2Vec2, speech, expected="NumPy random numbers"),
    },
    "timm": {
        "timm_vit_tiny": Entry(TimmViT, small_images),
        "timm_convnext": Entry(TimmConvNeXt, large_images),
        "timm_efficientnet_b0": Entry(TimmEfficientNet, large_images),
        "timm_swin_tiny": Entry(TimmSwin, large_images),
    },
    "peft": {"hf_lora_peft": Entry(LoRA, text)},
    "diffusers": {"ddpm_diffusers_unet": Entry(Diffusion, pictures)},
}
