"""The mixers of the models, which `shard_model` can split. A new mixer is a file in this folder and a line here."""

from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.gated_delta_net import GatedDeltaNet
from mamba_align_jax.layers.kimi_delta_attention import KimiDeltaAttention
from mamba_align_jax.layers.mamba1 import Mamba1Mixer
from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.layers.mixer import SplitMixer
from mamba_align_jax.layers.mla import MultiHeadLatentAttention
from mamba_align_jax.layers.shared_block import AdaptedAttention
from mamba_align_jax.layers.short_conv import ShortConv

MIXERS: tuple[type[SplitMixer], ...] = (
    AdaptedAttention,
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba1Mixer,
    Mamba2Mixer,
    MultiHeadLatentAttention,
    ShortConv,
)
