"""Models of transformers with attn_implementation="flashgen" beside eager, on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tiny_models import MODELS, SIZES, WINDOW, batch, cache_argument, generated, logits, make_model

import flashgen
from flashgen.errors import InvalidArgument

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import masking_utils as hf  # noqa: E402

from flashgen.integrations import transformers as integration  # noqa: E402

integration.register()


@pytest.fixture
def masks_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the layers of the models in a test were given to see."""
    seen: list[Any] = []
    original = integration.attention_forward

    def spy(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        seen.append(attention_mask)
        return original(module, query, key, value, attention_mask, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flashgen", spy)
    return seen


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager(name: str, side: str, masks_made: list[Any]) -> None:
    model = make_model(name)
    ids, mask = batch(side)
    ours, eager = (logits(model, each, ids, mask) for each in ("flashgen", "eager"))
    assert (eager[0, 1:] - eager[0, :-1]).abs().max() > 0.1, "a model that says the same everywhere"
    real = mask.bool()  # what a padding token computes has no meaning and differs
    torch.testing.assert_close(ours[real], eager[real], atol=1e-4, rtol=1e-4)
    assert masks_made and all(isinstance(each, integration.ForwardMask) for each in masks_made)
    told = {each.mask.rule.name for each in masks_made}
    alternating = {"causal", "sliding_window"}
    kinds = {"gemma2": alternating, "gpt-oss": alternating, "mistral": {"sliding_window"}}.get(
        name, {"causal"}
    )
    assert told == {kind if side == "none" else f"{kind}_and_key_keep" for kind in kinds}


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_those_of_eager(name: str, side: str, cache: str | None) -> None:
    model = make_model(name)
    ids, mask = batch(side)
    ours, eager = (
        generated(model, each, ids, mask, cache_implementation=cache) for each in ("flashgen", "eager")
    )
    assert torch.equal(ours, eager)
    assert len(set(eager[0, ids.shape[1] :].tolist())) > 1


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(name: str, static: bool, side: str) -> None:
    """Several queries on top of a cache: 5 tokens, then 6, then one at a time."""
    model = make_model(name, attn_implementation="eager")
    ids, mask = batch(side)
    whole = logits(model, "eager", ids, mask)
    model.set_attn_implementation("flashgen")
    cache = (
        transformers.StaticCache(config=model.config, max_cache_len=32)
        if static
        else transformers.DynamicCache(config=model.config)
    )
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    eager = logits(model, "eager", ids, mask, position_ids=positions)
    model.set_attn_implementation("flashgen")
    pieces = []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 11), (11, 12), (12, 13), (13, 14)):
            found = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                use_cache=True,
                **cache_argument(model, cache),
            )
            pieces.append(found.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, 1)[real], eager[real], atol=1e-4, rtol=1e-4)
    assert whole.shape == eager.shape


@pytest.mark.parametrize("name", ["mistral", "gpt-oss"])
def test_gradients_are_those_of_eager(name: str) -> None:
    model = make_model(name)
    ids, mask = batch("right")
    found = []
    for each in ("flashgen", "eager"):
        model.set_attn_implementation(each)
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_a_model_under_autocast_is_that_of_eager(name: str, gradient: bool) -> None:
    model = make_model(name)
    ids, mask = batch("left")
    found = []
    for each in ("flashgen", "eager"):
        model.set_attn_implementation(each)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradient):
            found.append(model(ids, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*found, atol=3e-2, rtol=3e-2)
    assert (found[0].grad_fn is not None) == gradient
    q, k, v = (torch.randn(2, 4, 5, 16) for _ in range(3))  # rotary positions leave all but v in float32
    with torch.autocast("cpu", torch.bfloat16):
        for option in ({}, {"softcap": 2.0}, {"softcap": 2.0, "attention_mask": torch.zeros(2, 1, 5, 5)}):
            given = {"attention_mask": None} | option
            out, _ = integration.attention_forward(torch.nn.Module(), q, k, v.bfloat16(), **given)
            assert out.dtype == torch.bfloat16


def test_a_model_without_causality_sees_both_sides() -> None:
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    ids, mask = batch("right")
    found = []
    for each in ("flashgen", "eager"):
        model.set_attn_implementation(each)
        with torch.no_grad():
            found.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_packed_sequences_do_not_see_each_other(masks_made: list[Any]) -> None:
    model = make_model("llama")
    ids, _ = batch("none")
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5]]).expand(3, -1)
    ours, eager = (
        logits(model, each, ids, None, position_ids=positions, use_cache=False)
        for each in ("flashgen", "eager")
    )
    torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-4)
    assert all(isinstance(each, torch.Tensor) for each in masks_made), "written out for torch"
    alone = logits(model, "flashgen", ids[:, 5:8], None)
    torch.testing.assert_close(ours[:, 5:8], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_a_prepared_mask_of_four_dimensions_is_used_as_it_is(
    name: str, dtype: torch.dtype, heads: int
) -> None:
    model = make_model(name)
    ids, _ = batch("none")
    keep = torch.ones(14, 14).tril().bool() & (torch.rand(3, heads, 14, 14) < 0.7) | torch.eye(14).bool()
    additive = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    mask = keep if dtype == torch.bool else additive
    ours, eager = logits(model, "flashgen", ids, mask), logits(model, "eager", ids, additive)
    torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "llama"])
def test_packed_sequences_with_and_without_capped_scores(name: str) -> None:
    model = make_model(name)
    ids, _ = batch("none")
    positions = torch.arange(14).remainder(5).expand(3, -1)
    ours, eager = (
        logits(model, each, ids, None, position_ids=positions, use_cache=False)
        for each in ("flashgen", "eager")
    )
    torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "changes"), [("llama", {"hidden_size": 48}), ("gpt-oss", {"head_dim": 12})])
def test_head_dims_without_a_kernel_run_in_torch(name: str, changes: dict[str, int]) -> None:
    model = make_model(name, **changes)  # head_dim 12
    ids, mask = batch("left")
    ours, eager = (logits(model, each, ids, mask) for each in ("flashgen", "eager"))
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_dropout_in_training(name: str) -> None:
    """Of gemma2 with a soft cap, of gpt-oss with sinks."""
    model = make_model(name, attention_dropout=0.5, attn_implementation="flashgen").train()
    ids, mask = batch("left")
    torch.manual_seed(0)
    one = model(ids, attention_mask=mask).logits
    two = model(ids, attention_mask=mask).logits
    assert one.grad_fn is not None and torch.isfinite(one).all() and (one - two).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_a_model_compiles_without_a_graph_break(name: str, side: str) -> None:
    torch._dynamo.reset()
    model = make_model(name, attn_implementation="flashgen")
    ids, mask = batch(side)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        ours = compiled(ids, attention_mask=mask, use_cache=False).logits
        eager = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()], atol=1e-4, rtol=1e-4)


def test_compiled_decoding_with_a_static_cache_gives_the_tokens_of_eager() -> None:
    torch._dynamo.reset()
    model = make_model("llama")
    ids, mask = batch("left")
    compiling = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiling._compile_all_devices = True
    ours = generated(model, "flashgen", ids, mask, cache_implementation="static", compile_config=compiling)
    assert torch.equal(ours, generated(model, "eager", ids, mask))


# The mask


def made(**changes: Any) -> Any:
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 5, "device": "cpu"} | changes
    return integration.make_mask(**arguments)


WINDOWED = hf.sliding_window_causal_mask_function(3)
PADDED = torch.tensor([[False, True, True, True, True], [True] * 5])


@pytest.mark.parametrize(
    ("changes", "told", "k_len"),
    [
        ({}, "causal", 5),
        ({"mask_function": WINDOWED}, "sliding_window(2, 0)", 5),
        ({"mask_function": hf.sliding_window_causal_mask_function(5)}, "causal", 5),
        ({"attention_mask": PADDED}, 'causal & key_padding("keep")', 5),
        ({"attention_mask": torch.ones(2, 5, dtype=torch.bool)}, "causal", 5),
        ({"q_length": 1, "q_offset": 4}, "causal", 5),
        ({"kv_length": 32, "q_offset": 3}, "causal", 8),  # a static cache, of which 8 are written
        ({"kv_length": 32, "q_offset": torch.tensor(3)}, "causal", 8),
        ({"q_length": 2, "q_offset": 9, "kv_offset": 6, "kv_length": 5, "mask_function": WINDOWED},
         "sliding_window(2, 0)", 5),
        ({"kv_length": 32, "q_offset": 3, "attention_mask": PADDED}, 'causal & key_padding("keep")', 8),
        ({"mask_function": hf.bidirectional_mask_function, "kv_length": 9}, "full", 9),
        ({"mask_function": hf.sliding_window_bidirectional_mask_function(2)}, "sliding_window(2, 2)", 5),
    ],
)  # fmt: skip
def test_what_transformers_asks_for_is_recognised(changes: dict[str, Any], told: str, k_len: int) -> None:
    allowed = {"allow_is_bidirectional_skip": True}
    mask = made(**(allowed | changes))
    assert isinstance(mask, integration.ForwardMask)
    assert (mask.mask.describe(), mask.k_len) == (told, k_len)
    # It keeps exactly what transformers' own mask keeps, of the keys that exist.
    q_length, kv_length = changes.get("q_length", 5), changes.get("kv_length", 5)
    q, k = torch.zeros(2, 1, q_length, 16), torch.zeros(2, 1, k_len, 16)
    given = {"batch_size": 2, "q_length": q_length, "kv_length": kv_length, "device": "cpu"} | changes
    dense = hf.sdpa_mask(**(given | {"allow_is_causal_skip": False}))
    assert torch.equal(integration._as_tensor(mask.mask, q, k).expand(2, 1, -1, -1), dense[..., :k_len])
    assert not dense[..., k_len:].any()


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_function": lambda b, h, q, k: q >= k},
        {"mask_function": hf.and_masks(hf.causal_mask_function, hf.causal_mask_function)},
        {"mask_function": hf.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int64))},
        {"mask_function": hf.or_masks(hf.causal_mask_function, hf.bidirectional_mask_function)},
        {"allow_is_causal_skip": False},
        {"q_offset": 7},  # a query beyond all keys
        {"mask_function": hf.sliding_window_bidirectional_mask_function(2), "kv_length": 9},
    ],
)
def test_what_is_not_recognised_is_written_out(changes: dict[str, Any]) -> None:
    mask = made(**changes)
    expected = hf.sdpa_mask(
        **(
            {"batch_size": 2, "q_length": 5, "kv_length": 5, "device": "cpu"}
            | changes
            | {"allow_is_causal_skip": False}
        )
    )
    assert isinstance(mask, torch.Tensor) and torch.equal(mask, expected)


# What is not served


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": torch.zeros(2, 4, 5, 1)}, "sinks was given: sinks that each query has of its own"),
        ({"s_aux": torch.zeros(3)}, r"sinks has shape \(3,\); q has 4 heads"),
        ({"dropout": 1.5}, "dropout_p=1.5 must be a number from 0 to 1"),
        ({"s_aux": torch.zeros(3), "attention_mask": torch.zeros(2, 1, 5, 5)}, "sinks has shape"),
        ({"position_bias": torch.zeros(1, 4, 5, 5)}, "position_bias was given: an additive bias"),
        ({"output_attentions": True}, "output_attentions was given: the weights .*eager"),
        ({"alibi": torch.zeros(4)}, "does not know the tensor alibi"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask has shape \(2, 5\)"),
        ({"k_len": 9}, "5 queries, 9 keys and no mask"),
        ({"is_causal": False, "sliding_window": 3}, "sliding_window=3 without a mask"),
    ],
)
def test_what_is_not_served_is_an_error(options: dict[str, Any], message: str) -> None:
    k_len = options.pop("k_len", 5)
    q, k = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, k_len, 16)
    arguments = {"attention_mask": None} | options
    with pytest.raises(InvalidArgument, match=message):
        integration.attention_forward(torch.nn.Module(), q, k, k, **arguments)


def test_keywords_that_change_nothing_pass() -> None:
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    plain, weights = integration.attention_forward(torch.nn.Module(), q, k, k, None)
    more = dict.fromkeys(integration.IGNORED, torch.zeros(1)) | {
        "s_aux": None,
        "output_attentions": False,
        "x": 3,
    }
    again, _ = integration.attention_forward(torch.nn.Module(), q, k, k, None, **more)
    assert weights is None and torch.equal(plain, again) and plain.is_contiguous()
    expected = flashgen.attention(q, k, k, mask="causal").transpose(1, 2)
    assert torch.equal(plain, expected)


def test_a_layer_without_a_mask_follows_its_own_settings() -> None:
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    windowed, _ = integration.attention_forward(torch.nn.Module(), q, k, k, None, sliding_window=3)
    expected = flashgen.attention(q, k, k, mask=flashgen.masks.sliding_window(2, 0))
    assert torch.equal(windowed, expected.transpose(1, 2))
    everything, _ = integration.attention_forward(torch.nn.Module(), q, k, k, None, is_causal=False)
    assert torch.equal(everything, flashgen.attention(q, k, k).transpose(1, 2))


# Registration


def test_registering_twice_is_fine_and_flashgen_is_no_flash_attention_package() -> None:
    from transformers.utils import generic

    asked = generic.is_flash_attention_requested
    flashgen.integrations.transformers.register()
    assert generic.is_flash_attention_requested is asked
    assert transformers.modeling_utils.is_flash_attention_requested is asked
    assert not asked(requested_attention_implementation="flashgen")
    assert not asked(make_model("llama", attn_implementation="flashgen").config)
    assert asked(requested_attention_implementation="flash_attention_2")
    assert asked(requested_attention_implementation="flash_attention_2", version=2)
    assert not asked(requested_attention_implementation="sdpa")


def test_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(ImportError, match=r"4.57.1 is too old.*5.0"):
        integration.register()


def test_a_model_can_be_made_with_it_at_once() -> None:
    model = make_model("mistral", attn_implementation="flashgen")
    assert (
        model.config._attn_implementation == "flashgen" and SIZES["num_key_value_heads"] == 2 and WINDOW == 6
    )
