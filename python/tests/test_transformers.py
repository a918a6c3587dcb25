"""Models of transformers: the same outputs as with PyTorch's attention, or an error."""

import pytest
import torch

import candle_sage

transformers = pytest.importorskip("transformers")


def mistral(sliding_window):
    candle_sage.register_transformers()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model("mistral", vocab_size=64, head_dim=16, sliding_window=sliding_window, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model():
    return mistral(8)


def logits(model, name, **inputs):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(**inputs).logits


def test_a_model_with_a_window(model):
    ids = torch.arange(40)[None] % 64
    assert torch.allclose(logits(model, "candle_sage", input_ids=ids), logits(model, "sdpa", input_ids=ids), atol=1e-5)


def test_decoding(model):
    ids, tokens = torch.arange(10)[None] % 64, {}
    for name in ("sdpa", "candle_sage"):
        model.set_attn_implementation(name)
        tokens[name] = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(tokens["sdpa"], tokens["candle_sage"])
    dense = mistral(None)
    dense.set_attn_implementation("candle_sage")
    with pytest.raises(ValueError, match="static cache"):
        dense.generate(ids, max_new_tokens=4, cache_implementation="static", disable_compile=True)


def test_packed_documents_attend_to_themselves(model):
    ids, ends = torch.arange(40)[None] % 64, [0, 15, 40]
    positions = torch.cat([torch.arange(b - a) for a, b in zip(ends, ends[1:], strict=False)])[None]
    lengths = torch.tensor(ends, dtype=torch.int32)
    packed = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 25, "max_length_k": 25}
    got = logits(model, "candle_sage", input_ids=ids, position_ids=positions, use_cache=False, **packed)
    alone = [logits(model, "sdpa", input_ids=ids[:, a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    assert torch.allclose(got, torch.cat(alone, dim=1), atol=1e-5)
    with pytest.raises(ValueError, match="mask is not supported"):
        logits(model, "candle_sage", input_ids=ids, position_ids=positions, use_cache=False)


def test_padding_is_an_error(model):
    ids, mask = torch.arange(20).reshape(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="padded"):
        logits(model, "candle_sage", input_ids=ids, attention_mask=mask)


def test_wrong_settings_are_errors_at_once():
    with pytest.raises(ValueError, match="no such setting"):
        candle_sage.register_transformers(mine={"scheme": "sagebwd", "produts": "scores"})
