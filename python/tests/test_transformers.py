"""Models of transformers have the same outputs as with PyTorch's attention, or raise an error."""

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


def test_padded_batches(model):
    ids, mask = torch.arange(30).reshape(3, 10) % 64, torch.ones(3, 10, dtype=torch.long)
    mask[0, :3], mask[1, 6:] = 0, 0
    got = {}
    for name in ("sdpa", "candle_sage"):
        model.set_attn_implementation(name)
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        out.loss.backward()
        gradient = model.model.layers[0].self_attn.k_proj.weight.grad
        got[name] = out.logits[mask.bool()].detach(), gradient
    for ours, theirs in zip(got["candle_sage"], got["sdpa"], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    tokens = {}
    for name in got:
        model.set_attn_implementation(name)
        tokens[name] = model.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens["sdpa"], tokens["candle_sage"])


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_bidirectional_models(kind):
    candle_sage.register_transformers()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes, **dropout))
    inputs, left = {"pixel_values": torch.randn(2, 3, 224, 224)}, torch.ones(2, 197, dtype=torch.bool)
    if kind == "bert":
        left = torch.arange(40)[None] < torch.tensor([[40], [23]])
        inputs = {"input_ids": torch.arange(80).reshape(2, 40), "attention_mask": left.long()}
    got = {}
    for name in ("sdpa", "candle_sage"):
        model.set_attn_implementation(name)
        model.zero_grad()
        hidden = model(**inputs).last_hidden_state[left]
        hidden.square().mean().backward()
        got[name] = hidden.detach(), torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
    for ours, theirs in zip(got["candle_sage"], got["sdpa"], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_wrong_settings_are_errors_at_once():
    with pytest.raises(ValueError, match="no such setting"):
        candle_sage.register_transformers(mine={"scheme": "sagebwd", "produts": "scores"})
