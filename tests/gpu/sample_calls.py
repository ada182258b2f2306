"""Small calls of every kind, compared with the reference: what the memory checkers watch.

usage: sample_calls.py [FAMILY]     (a process of its own, under compute-sanitizer or a plain allocator)
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import flashgen
from flashgen import masks, score_mods
from flashgen.build.reference import attention_reference, packed_reference
from flashgen.codegen.families import FAMILIES

CALLS: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (64, 100, 133, {"mask": masks.causal()}),
    (72, 65, 190, {"mask": masks.sliding_window(31, 0), "return_lse": True}),
    (128, 1, 77, {"score_mod": score_mods.softcap(5.0)}),
)
"""head_dim, q_len, k_len and what is asked; no length is a multiple of a tile."""


def draw(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def documents() -> None:
    """A mask whose tiles are listed by a kernel of their own."""
    q, k, v = draw(2, 4, 130, 64), draw(2, 2, 130, 64), draw(2, 2, 130, 64)
    mask = masks.causal() & masks.document(torch.arange(130, device="cuda").repeat(2, 1) // 50)
    exact, _ = attention_reference(q, k, v, mask=mask)
    torch.testing.assert_close(flashgen.attention(q, k, v, mask=mask).float(), exact, atol=3e-2, rtol=3e-2)


def gradients() -> None:
    """Of output and LSE; of what a score rule reads, by rows and by pairs, and of sinks; along lists."""
    slopes, sinks = (torch.rand(4, device="cuda").requires_grad_() for _ in range(2))
    bias = torch.randn(2, 4, 100, 133, device="cuda").requires_grad_()
    ids = torch.arange(133, device="cuda").repeat(2, 1) // 50
    kinds: tuple[dict[str, Any], ...] = (
        {"mask": masks.causal()},
        {"mask": masks.sliding_window(31, 0), "sinks": sinks},
        {"score_mod": score_mods.compose([score_mods.alibi(slopes), score_mods.bias(bias)])},
        {"mask": masks.document(ids)},
    )
    for rules in kinds:
        q, k, v = draw(2, 4, 100, 64), draw(2, 2, 133, 64), draw(2, 2, 133, 64)
        wanted = [each.requires_grad_() for each in (q, k, v)]
        wanted += [sinks] if "sinks" in rules else []
        wanted += [slopes, bias] if "score_mod" in rules else []
        results = flashgen.attention(q, k, v, return_lse=True, **rules)
        douts = [torch.randn_like(each) for each in results]
        found = torch.autograd.grad(results, wanted, douts)
        exact = attention_reference(q, k, v, **rules)
        expected = torch.autograd.grad(exact, wanted, [each.float() for each in douts])
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).float().norm() <= 2e-2 * theirs.float().norm(), rules


def packed_sequences() -> None:
    """Without queries, without keys and without either; the first tensors of their memory too."""
    starts_q, starts_k = [0, 1, 1, 66, 196], [0, 0, 70, 70, 130]
    places = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in (starts_q, starts_k)]
    for head_dim in (64, 96):
        q, k, v = draw(196, 4, head_dim), draw(130, 2, head_dim), draw(130, 2, head_dim)
        found = flashgen.attention_varlen(q, k, v, *places, 130, 70, mask="causal")
        exact, _ = packed_reference(q, k, v, starts_q, starts_k, mask=masks.causal())
        torch.testing.assert_close(found.float(), exact, atol=3e-2, rtol=3e-2)


def of_8_bits() -> None:
    q, k, v = (each.to(torch.float8_e4m3fn) for each in (draw(2, 4, 100, 64), *draw(2, 2, 2, 133, 64)))
    exact, _ = attention_reference(q.float(), k.float(), v.float(), mask=masks.causal())
    found = flashgen.attention(q, k, v, mask="causal", out_dtype=torch.bfloat16)
    torch.testing.assert_close(found.float(), exact, atol=0.15, rtol=0.1)


def main() -> None:
    for family in set(FAMILIES) - set(sys.argv[1:] or FAMILIES):
        del FAMILIES[family]
    torch.manual_seed(0)
    for head_dim, q_len, k_len, options in CALLS:
        for aligned in (True, False):
            q, k, v = draw(2, 4, q_len, head_dim), draw(2, 2, k_len, head_dim), draw(2, 2, k_len, head_dim)
            if not aligned:  # descriptors want 16 bytes
                q = draw(q.numel() + 1)[1:].view(q.shape)
            found = flashgen.attention(q, k, v, **options)
            out, lse = found if options.get("return_lse") else (found, None)
            rules = {name: rule for name, rule in options.items() if name != "return_lse"}
            exact, exact_lse = attention_reference(q, k, v, **rules)
            torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=3e-2)
            if lse is not None:
                torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-3)
    documents()
    if any(family.op == "bwd" for family in FAMILIES.values()):
        gradients()
    packed_sequences()
    if "attention_fwd_sm90" in FAMILIES and torch.cuda.get_device_capability()[0] == 9:
        of_8_bits()
    torch.cuda.synchronize()
    print("right")


if __name__ == "__main__":
    main()
