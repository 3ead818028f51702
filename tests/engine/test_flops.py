"""FLOPs a token against a table worked by hand, and MFU from it."""

import pytest

from engine.planning.config import ModelConfig
from engine.planning.flops import flops_per_token, mfu
from engine.planning.presets import preset


def _model(**settings):
    return ModelConfig(
        **{
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "ffn_hidden_size": 256,
            "vocab_size": 1000,
            "max_sequence_length": 16384,
            "position": "learned",
            "activation": "gelu",
            **settings,
        }
    )


MHA = _model()
GQA = _model(num_key_value_heads=2)
SWIGLU = _model(activation="swiglu", ffn_hidden_size=192)

# N by hand, hidden 64, 4 heads of 16:
#   MHA     4 layers x (q, k, v, o: 4 x 64 x 64 = 16,384; mlp: 2 x 64 x 256 = 32,768) + head 64 x 1000 = 260,608
#   GQA     k and v are 64 x 32:       4 x (2 x 4,096 + 2 x 2,048 + 32,768)           + 64,000         = 244,224
#   SwiGLU  three matrices of 64 x 192: 4 x (16,384 + 36,864)                         + 64,000         = 276,992
# Attention by hand: 12 x 4 layers x 64 x S = 3,072 S; S 128: 393,216; S 16,384: 50,331,648.
TABLE = [
    (MHA, 128, 6 * 260_608 + 393_216, 6 * 260_608 + 196_608),
    (MHA, 16384, 6 * 260_608 + 50_331_648, 6 * 260_608 + 25_165_824),
    (GQA, 128, 6 * 244_224 + 393_216, 6 * 244_224 + 196_608),
    (GQA, 16384, 6 * 244_224 + 50_331_648, 6 * 244_224 + 25_165_824),
    (SWIGLU, 128, 6 * 276_992 + 393_216, 6 * 276_992 + 196_608),
    (SWIGLU, 16384, 6 * 276_992 + 50_331_648, 6 * 276_992 + 25_165_824),
]


@pytest.mark.parametrize(("model", "sequence_length", "full", "causal"), TABLE)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_flops_equal_the_table(model, sequence_length, full, causal, tied):
    model = model.model_copy(update={"tie_embeddings": tied})  # the head multiplies either way
    assert flops_per_token(model, sequence_length, causal=False) == full
    assert flops_per_token(model, sequence_length, causal=True) == causal


def test_look_ups_biases_and_norms_multiply_nothing():
    more = MHA.model_copy(update={"bias": True, "norm": "layernorm", "max_sequence_length": 32768})
    assert flops_per_token(more, 128, causal=False) == flops_per_token(MHA, 128, causal=False)


def test_head_dim_apart_from_hidden_size():
    wide = MHA.model_copy(update={"head_dim": 32})  # q, k, v, o are 64 x 128 each
    assert flops_per_token(wide, 128, causal=False) == 6 * (260_608 + 4 * 16_384) + 2 * 393_216


def test_the_two_conventions_for_a_real_model():
    # llama-1.3b: N = 24 x (4 x 2048^2 + 3 x 2048 x 5632) + 2048 x 32768 = 1,300,234,240; 12 L H S = 2,415,919,104.
    model = preset("llama-1.3b")
    assert flops_per_token(model, 4096, causal=False) == 7_801_405_440 + 2_415_919_104
    figures = {"tokens_per_s": 58_900.0, "num_devices": 1, "peak_flops": 989e12}
    assert mfu(model, 4096, **figures) == pytest.approx(0.6085, abs=1e-4)
    assert mfu(model, 4096, causal=True, **figures) == pytest.approx(0.5366, abs=1e-4)


def test_mfu_is_a_device_and_needs_a_peak():
    one = mfu(MHA, 128, tokens_per_s=1000.0, num_devices=1, peak_flops=1e12)
    assert mfu(MHA, 128, tokens_per_s=8000.0, num_devices=8, peak_flops=1e12) == pytest.approx(one)
    with pytest.raises(ValueError, match="peak_flops"):
        mfu(MHA, 128, tokens_per_s=1.0, num_devices=1, peak_flops=0.0)
