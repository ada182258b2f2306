"""Masks and rules: text, identity, combination."""

import pickle

import pytest
import torch

from flashgen.build.reference import evaluate_rule
from flashgen.codegen.families import find_family
from flashgen.errors import InvalidArgument, UnknownName
from flashgen.spec import expr as ex
from flashgen.spec import masks
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.expr import Apply, Symbol
from flashgen.spec.masks import (
    MASKS,
    Mask,
    block_sparse,
    causal,
    dilated,
    document,
    full,
    global_tokens,
    key_padding,
    neighborhood,
    parse_mask,
    prefix_lm,
    sliding_window,
)
from flashgen.spec.rule import MAX_NAME, Operand, Rule, join
from flashgen.spec.score_mods import parse_score_mod
from flashgen.spec.target import find_target
from flashgen.tune.suites import suite_workloads

LENGTHS = torch.tensor([3, 4], dtype=torch.int32)
SAMPLES = [mask for entry in MASKS.values() for mask in entry.examples()]
COMBINED = [
    "causal & sliding_window(1023, 0)",
    "~causal",
    "causal & key_padding",
    "(causal | sliding_window(5, 5)) & ~key_padding",
    "sliding_window(1, 2) | sliding_window(3, 4) | sliding_window(5, None)",
    'causal(align="top_left") & key_padding("keep")',
    "~(causal & key_padding) | ~full",
    "~full",
]
TEXTS = [mask.describe() for mask in SAMPLES] + COMBINED


@pytest.mark.parametrize("text", TEXTS)
def test_a_mask_is_read_back_from_its_description_and_its_rule_from_its_text(text):
    mask = parse_mask(text)
    assert parse_mask(mask.describe()) == mask
    again = Rule.parse("mask", mask.rule.text)
    assert again == mask.rule and hash(again) == hash(mask.rule)
    for part in ("params", "operands", "expr"):
        assert getattr(again, part) == getattr(mask.rule, part)


@pytest.mark.parametrize(
    ("text", "rule", "name"),
    [
        ("full", "True", "full"),
        ("causal", "q_pos >= k_idx", "causal"),
        ('causal("top_left")', "q_idx >= k_idx", "causal_top_left"),
        (
            "sliding_window(4, 2)",
            "(q_pos - k_idx <= left) & (k_idx - q_pos <= right) where left: i32, right: i32",
            "sliding_window",
        ),
        ("sliding_window(4, None)", "q_pos - k_idx <= left where left: i32", "sliding_window_left"),
        ("sliding_window(None, 0)", "k_idx - q_pos <= right where right: i32", "sliding_window_right"),
        ("sliding_window(None, None)", "True", "full"),
        ("key_padding", "k_idx < key_lengths[batch] where key_lengths: i32", "key_padding"),
        ("key_padding('keep')", "key_keep[batch, k_idx] where key_keep: i1", "key_keep"),
        (
            "document",
            "(q_pos >= 0) & (doc_ids[batch, max(q_pos, 0)] == doc_ids[batch, k_idx]) where doc_ids: i32",
            "document",
        ),
        (
            "document('ordered')",
            "(k_idx >= doc_ends[batch, 0, max(q_pos + 1, 0)]) & "
            "(k_idx < doc_ends[batch, 1, max(q_pos + 1, 0)]) where doc_ends: i32 ascending",
            "document_ordered",
        ),
        (
            "causal & sliding_window(4, 2)",
            "(q_pos >= k_idx) & (q_pos - k_idx <= left) & (k_idx - q_pos <= right) "
            "where left: i32, right: i32",
            "causal_and_sliding_window",
        ),
        (
            "sliding_window(1, None) | sliding_window(2, None) | sliding_window(3, None)",
            "(q_pos - k_idx <= left) | (q_pos - k_idx <= left_1) | (q_pos - k_idx <= left_2) "
            "where left: i32, left_1: i32, left_2: i32",
            "sliding_window_left_or_sliding_window_left_or_sliding_w",
        ),
        (
            "prefix_lm",
            "(k_idx < prefix_lens[batch]) | (q_pos >= k_idx) where prefix_lens: i32",
            "prefix_lm",
        ),
        (
            "dilated(8, 2)",
            "(q_pos - k_idx <= window) & (k_idx - q_pos <= window) & (q_pos % dilation == k_idx % dilation) "
            "where window: i32, dilation: i32",
            "dilated",
        ),
        (
            "block_sparse('heads', 64)",
            "kept[0, head, q_idx // 64, k_idx // 64] where kept: i1",
            "block_sparse_heads",
        ),
        ("~(causal & key_padding)", None, "not_causal_and_key_padding"),
    ],
)
def test_canonical_rules(text, rule, name):
    mask = parse_mask(text)
    assert rule is None or mask.rule.text == rule
    assert mask.rule.name == name or mask.rule.name.startswith(name + "_")
    assert len(mask.rule.name) <= MAX_NAME and mask.rule.name.isidentifier()


def kept(mask, q_len, k_len, **symbols):
    """What a mask keeps, as a list of the keys of each query."""
    rows, keys = torch.arange(q_len)[:, None], torch.arange(k_len)
    found = evaluate_rule(mask, {"q_idx": rows, "k_idx": keys, "q_len": q_len, "k_len": k_len, **symbols})
    return [row.nonzero().flatten().tolist() for row in found.expand(q_len, k_len)]


@pytest.mark.parametrize("lengths", [(9, 9), (4, 11), (11, 4)], ids=str)
def test_masks_keep_what_their_definitions_say(lengths):
    q_len, k_len = lengths
    positions = [i + k_len - q_len for i in range(q_len)]

    def are(mask, sees, **symbols):
        expected = [[j for j in range(k_len) if sees(i, j)] for i in positions]
        assert kept(mask, q_len, k_len, **symbols) == expected, mask.describe()

    are(prefix_lm(LENGTHS), lambda i, j: j < 4 or j <= i, batch=torch.tensor(1))
    for window, step in ((4, 2), (3, 3), (0, 1), (7, 1)):
        are(dilated(window, step), lambda i, j, w=window, d=step: abs(i - j) <= w and (i - j) % d == 0)
    for count in (0, 2, 30):
        are(global_tokens(count), lambda i, j, n=count: j < n or i < n)
    for window in range(1, k_len + 1):
        starts = {i: max(0, min(i - window // 2, k_len - window)) for i in positions}
        are(neighborhood(window), lambda i, j, w=window, s=starts: s[i] <= j < s[i] + w)
    are(neighborhood(k_len + 1), lambda i, j: True)


@pytest.mark.parametrize("grid", [(4, 6), (5, 3), (1, 7)], ids=str)
def test_neighbourhoods_of_a_grid_are_rectangles_that_stay_within_it(grid):
    height, width = grid
    for kernel in ((1, 1), (min(3, height), 3), (height, 2), (min(4, height), width)):
        expected = []
        for y in range(height):
            for x in range(width):
                top = min(max(y - kernel[0] // 2, 0), height - kernel[0])
                left = min(max(x - kernel[1] // 2, 0), width - kernel[1])
                rows, columns = range(top, top + kernel[0]), range(left, left + kernel[1])
                expected.append([row * width + column for row in rows for column in columns])
        found = kept(neighborhood(grid, kernel), height * width, height * width)
        assert found == expected, f"{grid=} {kernel=}"
        assert {len(keys) for keys in found} == {kernel[0] * kernel[1]}, "as many keys at a border"


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 3)], ids=str)
def test_block_tables_broadcast_over_sequences_and_heads(shape):
    table = torch.rand((*shape, 3, 2), generator=torch.Generator().manual_seed(5)) < 0.5
    mask = block_sparse(table, (4, 8))
    for batch, head in ((0, 0), (1, 2)):
        where = {"batch": torch.tensor(batch), "head": torch.tensor(head)}
        blocks = table[batch % shape[0], head % shape[1]]
        expected = [[j for j in range(13) if blocks[i // 4, j // 8]] for i in range(10)]
        assert kept(mask, 10, 13, **where) == expected
    words = {(1, 1): "shared", (2, 1): "batch", (1, 3): "heads", (2, 3): "batch_heads"}
    assert mask.describe() == f'block_sparse("{words[shape]}", (4, 8))'
    assert block_sparse(words[shape], [4, 8]).rule == mask.rule
    assert block_sparse(table, 8).rule.text.endswith("q_idx // 8, k_idx // 8] where kept: i1")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_documents_of_a_packed_row_are_told_by_their_edges(dtype):
    edges = torch.tensor([0, 0, 3, 3, 7], dtype=dtype)
    mask = document(cu_seqlens=edges, length=9)
    (table,) = mask.tensors
    assert table.dtype is torch.int32 and mask.rule == document("ordered").rule
    assert table.tolist() == [[[0, 0, 0, 0, 3, 3, 3, 3, 7, 7], [0, 3, 3, 3, 7, 7, 7, 7, 9, 9]]]
    groups = [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    expected = [group for group in groups for _ in group]
    assert kept(mask, 9, 9, batch=torch.tensor(0)) == expected
    assert kept(mask, 4, 9, batch=torch.tensor(0)) == expected[-4:]
    assert kept(mask, 11, 9, batch=torch.tensor(0)) == [[], [], *expected], "rows before the first key"
    with pytest.raises(InvalidArgument, match="begins with 1, and must begin with 0"):
        document(cu_seqlens=edges + 1, length=9)
    with pytest.raises(InvalidArgument, match="falls from 3 to 2 at index 2, and must never fall"):
        document(cu_seqlens=torch.tensor([0, 3, 2, 7], dtype=dtype), length=9)
    with pytest.raises(InvalidArgument, match="ends at 7, and must end within length=6"):
        document(cu_seqlens=edges, length=6)
    with pytest.raises(InvalidArgument, match=r"needs length, .*: length=k.shape\[2\]"):
        document(cu_seqlens=edges)
    with pytest.raises(InvalidArgument, match="ids or cu_seqlens, not both"):
        document(torch.zeros(1, 9), cu_seqlens=edges, length=9)
    with pytest.raises(InvalidArgument, match="goes with cu_seqlens alone"):
        document(torch.zeros(1, 9), length=9)
    for wrong in (edges.short(), edges.float(), edges[None], edges[:1], [0, 3]):
        with pytest.raises(InvalidArgument, match=r"^cu_seqlens of document is an int32 or int64 tensor"):
            document(cu_seqlens=wrong, length=9)
    with pytest.raises(InvalidArgument, match=r"cu_seqlens of document is torch\.sparse_coo; only dense"):
        document(cu_seqlens=edges.to_sparse(), length=9)


def test_edges_never_fall_whatever_a_device_holds(monkeypatch):
    """The host looks at no tensor of a GPU: kernels skip by what is declared ascending."""
    monkeypatch.setattr("flashgen.spec.masks._check_edges", lambda *_: None)
    for edges in ([0, 5, 2, 40, 7], [4, 4], [-9, -3, 6], [3, 0]):
        (table,) = document(cu_seqlens=torch.tensor(edges), length=8).tensors
        begins, ends = table[0].tolist()
        assert begins == sorted(begins) and ends == sorted(ends) and (begins[0], ends[0]) == (0, 0), edges
        assert all(0 <= a <= i < b <= 8 for i, (a, b) in enumerate(zip(begins[1:], ends[1:], strict=True)))


def test_edges_on_a_device_are_not_read_by_the_host(monkeypatch):
    edges = torch.tensor([0, 3, 50], dtype=torch.int32, device="meta")
    for read in ("tolist", "item", "__bool__", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, read, lambda *_: pytest.fail("read on the host"))
    (table,) = document(cu_seqlens=edges, length=9).tensors
    assert table.shape == (1, 2, 10) and table.device.type == "meta"


def test_values_and_tensors_follow_the_rule():
    combined = sliding_window(1, 2) & key_padding(LENGTHS) & sliding_window(3, None)
    assert combined.rule.params == (("left", "i32"), ("right", "i32"), ("left_1", "i32"))
    assert combined.values == (1, 2, 3)
    assert combined.rule.operands == (Operand("key_lengths", "i32", 1),)
    assert combined.tensors == (LENGTHS,) and combined.missing == ()
    renamed = join("|", sliding_window(1, 2).rule, sliding_window(3, 4).rule).renamed
    assert renamed == (("left", "left_1"), ("right", "right_1"))


def test_equality_is_of_rule_values_and_the_very_tensors():
    assert causal() == causal() != causal("top_left")
    assert sliding_window(1, 2) == sliding_window(1, 2) != sliding_window(1, 3)
    assert hash(sliding_window(1, 2)) == hash(sliding_window(1, 2))
    assert sliding_window(1, 2).rule is sliding_window(3, 4).rule
    assert key_padding(LENGTHS) == key_padding(LENGTHS) != key_padding(LENGTHS.clone())
    assert (causal() & sliding_window(1, 2)) & sliding_window(3, 4) == causal() & (
        sliding_window(1, 2) & sliding_window(3, 4)
    )
    assert causal() != "causal"


def test_names_are_no_part_of_identity():
    text = "q_pos >= k_idx"
    assert Rule.parse("mask", text, name="something") == causal().rule
    assert Rule.parse("mask", text).name.startswith("rule_")
    assert causal().rule.with_name("mine").name == "mine"


def test_combinations_that_say_nothing_new_are_dropped():
    nothing = ~full()
    window = sliding_window(1, 2)
    assert full() & window == window & full() == window
    assert full() | window == window | full() == full()
    assert nothing | window == window | nothing == window
    assert nothing & window == window & nothing == nothing
    assert causal() & causal() == causal() | causal() == ~~causal() == causal()
    assert ~~(causal() & window) == causal() & window


def test_combining_is_remembered():
    assert (causal() & sliding_window(1, 2)).rule is (causal() & sliding_window(3, 4)).rule
    assert (~causal()).rule is (~causal()).rule


def test_a_rule_survives_pickling_with_a_hash_that_fits_the_process():
    for mask in SAMPLES:
        again = pickle.loads(pickle.dumps(mask))
        assert again.rule == mask.rule and again.rule.name == mask.rule.name and again.values == mask.values
        assert again.rule in {mask.rule: None}


def test_padding_reads_dtype_and_shape():
    assert key_padding(LENGTHS.long()).rule.operands == (Operand("key_lengths", "i64", 1),)
    assert key_padding(torch.ones(2, 5, dtype=torch.bool)).rule.operands == (Operand("key_keep", "i1", 2),)
    keep = torch.ones(2, dtype=torch.bool)
    for wrong in (torch.ones(2), LENGTHS[None], keep, LENGTHS.short(), [3, 4], "keys"):
        with pytest.raises(InvalidArgument):
            key_padding(wrong)


def test_documents_read_dtype_and_shape():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert document(ids).rule.operands == (Operand("doc_ids", "i64", 2),) == document("i64").rule.operands
    assert document(ids.int()).rule == document().rule
    for wrong in (ids[0], ids.short(), ids.float(), [[1, 2]], None, "keep"):
        with pytest.raises(InvalidArgument, match=r"^document takes|^ids='keep' must be 'i32' or 'i64'"):
            document(wrong)


def test_prefixes_and_block_tables_read_dtype_and_shape():
    assert prefix_lm(LENGTHS.long()).rule == prefix_lm("i64").rule
    for wrong in (LENGTHS[None], LENGTHS.short(), LENGTHS.float(), [3, 4], None):
        with pytest.raises(InvalidArgument, match=r"^prefix_lm takes an int32 or int64 tensor .* not "):
            prefix_lm(wrong)
    table = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    for wrong in (table[0], table.int(), [[True]], None):
        with pytest.raises(InvalidArgument, match=r"^block_sparse takes a bool tensor .* not "):
            block_sparse(wrong, 64)


def test_tensors_can_be_bound_later():
    mask = parse_mask("causal & key_padding")
    assert [operand.name for operand in mask.missing] == ["key_lengths"]
    assert mask.bind(LENGTHS) == causal() & key_padding(LENGTHS)
    for wrong in ((), (LENGTHS, LENGTHS), (LENGTHS.long(),), (LENGTHS[None],)):
        with pytest.raises(InvalidArgument):
            mask.bind(*wrong)


def test_windows_are_checked():
    assert sliding_window(masks.UNLIMITED, 3) == sliding_window(None, 3)
    assert sliding_window(masks.UNLIMITED - 1, None).values == (masks.UNLIMITED - 1,)
    assert sliding_window(torch.tensor(3), 0).values == (3, 0)
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(InvalidArgument, match="right="):
            sliding_window(0, wrong)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("cusal", "known: " + ", ".join(sorted(MASKS))),
        ("causal(1, 2)", "causal(align='bottom_right')"),
        ("causal('left')", "'bottom_right' or 'top_left': write causal() or causal('top_left')"),
        ("causal(left)", "align='left' must be 'bottom_right' or 'top_left'"),
        ("sliding_window(1)", "sliding_window(left, right), such as sliding_window(1023, 0)"),
        ("sliding_window", "sliding_window(left, right), such as sliding_window(1023, 0)"),
        ("neighborhood", "neighborhood(window, kernel=None), such as neighborhood(7)"),
        ("global_tokens", "global_tokens(count), such as global_tokens(3)"),
        ("block_sparse(64)", "a block's size follows it: block_sparse('shared', 64)"),
        ("sliding_window(-1, 0)", "0 or more"),
        ("sliding_window(x, 0)", "'x'"),
        ("sliding_window(**{'left': 1})", "{'left': 1}"),
        ("causal + causal", "causal & sliding_window(1023, 0)"),
        ("causal.rule", "causal & sliding_window(1023, 0)"),
        ("key_padding([3, 4])", "[3, 4]"),
        ("prefix_lm('u8')", "prefix_lens='u8' must be 'i32' or 'i64', or a tensor"),
        ("dilated(4, 0)", "dilation=0 must be a whole number from 1 to"),
        ("dilated(-4, 1)", "window=-4 must be a whole number from 0 to"),
        ("dilated(4)", "dilated(window, dilation), such as dilated(12, 3)"),
        ("global_tokens(2.0)", "count=2.0 must be a whole number"),
        ("neighborhood(0)", "window=0 must be a whole number from 1 to"),
        ("neighborhood((8, 8))", "needs its kernel, such as (7, 7)"),
        ("neighborhood((8, 8), 3)", "kernel=3 must be a pair of whole numbers"),
        ("neighborhood((8, 8), (3, 9))", "kernel=(3, 9) must not be larger than the grid, (8, 8)"),
        ("neighborhood((8, 2.5), (3, 3))", "(8, 2.5)"),
        ("neighborhood((70000, 70000), (65000, 3))", "has 4900000000 positions, which stand in one sequence"),
        ("block_sparse('each')", "must be one of 'shared', 'batch', 'heads', 'batch_heads', or a tensor"),
        ("block_sparse('heads', (64, 0))", "block_size[1]=0 must be a whole number from 1 to"),
        ("", "causal & sliding_window(1023, 0)"),
        ("(causal", "causal & sliding_window(1023, 0)"),
        ("~" * 2000 + "causal", "nested too deeply"),
        ("causal" + ".x" * 1500, "nested too deeply"),
        ("causal & " * 2000 + "causal", "18006 characters; at most 4096"),
        ("~" * 100_000 + "causal", "100006 characters; at most 4096"),
    ],
)
def test_refused_mask_text_says_what_is_allowed(text, hint):
    with pytest.raises(InvalidArgument) as refusal:
        parse_mask(text)
    assert hint in str(refusal.value)


@pytest.mark.parametrize(
    ("bare", "quoted"),
    [
        ("causal(top_left)", 'causal("top_left")'),
        ("causal(align=top_left) & document(ordered)", 'causal("top_left") & document("ordered")'),
        ("block_sparse(heads, 64) | key_padding(keep)", 'block_sparse("heads", 64) | key_padding("keep")'),
    ],
)
def test_a_word_needs_no_quotes(bare, quoted):
    assert parse_mask(bare) == parse_mask(quoted)


@pytest.mark.parametrize(
    ("kind", "text", "hint"),
    [
        ("masks", "True", "known: mask, score"),
        ("mask", "score > 3", "score rules only"),
        ("mask", "q_idx", "a mask rule gives a bool"),
        ("score", "score > 1", "a score rule gives a number"),
        ("mask", "k_idx < a", "unknown name"),
        ("mask", "k_idx < a where a: f64", "known: f32, i32"),
        ("mask", "k_idx < 3 & q_idx < 3", "(a <= b) & (b < c)"),
        ("mask", "k_idx & q_idx < 3", "in parentheses"),
        ("mask", "k_idx < a[batch] where a: fp64", "known: bf16"),
        ("mask", "k_idx < a where a: i32, b: i32", "declared but not used"),
        ("mask", "k_idx < a[batch] + a where a: i32", "'a'"),
        ("mask", "k_idx < a[batch] + a[batch, head] where a: i32", "one index per dimension"),
        ("mask", "k_idx < a where a: i32, a: i32", "declared twice"),
        ("mask", "k_idx < a where a", "write one like left: i32"),
        ("mask", "k_idx < a where a: i32 where a: i32", "more than one"),
        ("mask", "k_idx < batch where batch: i32", "no symbol"),
        ("mask", "k_idx < first where first: i32", "no symbol"),
        ("mask", "k_idx < A where A: i32", "lower-case"),
        ("mask", "k_idx < a where a: i32 ascending", "only an operand is declared so"),
        ("mask", "a[k_idx] where a: i1 ascending", "write a: i1"),
        ("mask", "k_idx < a[batch] where a: i32 falling", "write one like left: i32"),
    ],
)
def test_refused_rule_text_says_what_is_wrong(kind, text, hint):
    with pytest.raises(InvalidArgument) as refusal:
        Rule.parse(kind, text)
    assert hint in str(refusal.value)


def test_a_mask_checks_that_it_is_complete():
    with pytest.raises(UnknownName, match="first"):
        Rule("mask", Apply("<", (Symbol("first"), Symbol("k_idx"))))
    with pytest.raises(InvalidArgument, match="takes 2 values"):
        Mask(sliding_window(1, 2).rule, (1,))
    with pytest.raises(InvalidArgument, match="score rule"):
        Mask(Rule.parse("score", "score * 2"))
    with pytest.raises(InvalidArgument, match="lower-case"):
        causal().rule.with_name("Not an identifier")
    with pytest.raises(TypeError):
        causal() & "causal"


def test_rules_without_a_form_describe_themselves_by_text():
    rule = Rule.parse("mask", "k_idx < prefix where prefix: i32", name="prefix")
    assert Mask(rule, (5,)).describe() == "k_idx < prefix with prefix=5"
    assert str(Mask(rule, (5,)) | causal()) == "(k_idx < prefix) | (q_pos >= k_idx) with prefix=5"


@pytest.mark.parametrize("by", ["0", "-0", "(3 - 3)"])
@pytest.mark.parametrize("op", ["//", "%"])
def test_whole_numbers_are_not_divided_by_0(op, by):
    """A GPU would give what it likes, and torch an error without a name."""
    with pytest.raises(InvalidArgument, match=r"divides a whole number by 0, .*; divide by another number"):
        Rule.parse("mask", f"k_idx {op} {by} > 1")
    Rule.parse("mask", f"k_idx {op} 0.0 > 1.0")
    rule = Rule.parse(
        "mask", f"(k_idx {op} step > left) & (k_idx {op} 2.5 < cap) where left: i32, step: i32, cap: f32"
    )
    assert Mask(rule, (0, -2, 0.0)).values == (0, -2, 0.0)
    with pytest.raises(InvalidArgument, match=r"step=0 divides whole numbers in .*; give another number"):
        Mask(rule, (5, 0, 1.0))


def test_very_deep_combinations_are_refused():
    mask = sliding_window(1, 2)
    with pytest.raises(InvalidArgument, match="combine fewer"):
        for _ in range(100):
            mask = mask & sliding_window(1, 2) if len(mask.values) % 4 else mask | sliding_window(1, 2)


def test_unknown_names_have_their_own_error():
    with pytest.raises(UnknownName):
        parse_mask("windows(3)")


LONG = "x" * 3000


@pytest.mark.parametrize(
    "refused",
    [
        lambda: parse_mask(LONG),
        lambda: parse_mask(f"causal & {LONG}("),
        lambda: parse_mask(f"causal({LONG})"),
        lambda: parse_mask(f"causal('{LONG}')"),
        lambda: parse_mask(f"causal({LONG}=1)"),
        lambda: parse_mask(f"sliding_window('{LONG}', 0)"),
        lambda: key_padding(LONG),
        lambda: parse_score_mod(f"softcap('{LONG}')"),
        lambda: Rule.parse("mask", f"k_idx < {LONG}"),
        lambda: Rule.parse("mask", f"k_idx + {'1 + ' * 70} 0"),
        lambda: Rule.parse("mask", f"k_idx < 1 where {LONG}: i32"),
        lambda: Rule.parse("mask", f"k_idx < 1 where {LONG}"),
        lambda: Rule.parse("mask", f"k_idx < 1 where a: {LONG}, a: i32"),
        lambda: Rule.parse("mask", f"k_idx < a where a: {LONG}"),
        lambda: Rule.parse("mask", "k_idx < 1", name=LONG),
        lambda: AttentionSpec(64, 64, LONG),
    ],
)
def test_an_error_shows_only_the_beginning_of_what_was_given(refused):
    with pytest.raises(InvalidArgument) as error:
        refused()
    assert len(str(error.value)) < 700


def test_a_rule_is_no_larger_than_its_text_can_be_read_back():
    def balanced(pieces):
        half = len(pieces) // 2
        return f"({balanced(pieces[:half])}&{balanced(pieces[half:])})" if half else f"({pieces[0]})"

    text = balanced(["k_idx>q_idx"] * 1150)
    assert len(text) < ex.MAX_TEXT  # but with the spaces of canonical text it is longer
    with pytest.raises(InvalidArgument, match=r"a rule of \d+ characters; at most 20000"):
        Rule.parse("mask", text)
    names = [f"p{number}" for number in range(33)]
    declared = ", ".join(f"{name}: i32" for name in names)
    with pytest.raises(InvalidArgument, match="a rule declares 33 names; at most 32"):
        Rule.parse("mask", f"{balanced([f'k_idx > {name}' for name in names])} where {declared}")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([10, 0], "not [10, 0]"),
        (None, "not None"),
        (torch.ones(2), "not torch.float32 of shape (2,)"),
        (torch.ones(2, dtype=torch.float64), "not torch.float64 of shape (2,)"),
        (torch.ones(2, 3, dtype=torch.int32), "not torch.int32 of shape (2, 3)"),
    ],
)
def test_key_padding_says_what_it_takes_and_what_it_got(given, told):
    with pytest.raises(InvalidArgument) as error:
        key_padding(given)
    assert str(error.value).startswith("key_padding takes an int32 or int64 tensor (batch,) of key lengths")
    assert str(error.value).endswith(told)


def test_what_is_no_operand_no_alignment_and_no_rule_is_said_to_be_so():
    with pytest.raises(InvalidArgument, match=r"key_lengths of key_padding is i32 with 1 .*, not \[10, 0\];"):
        key_padding().bind([10, 0])
    with pytest.raises(InvalidArgument, match=r"align=\['top_left'\] must be 'bottom_right' or 'top_left'"):
        causal(["top_left"])
    with pytest.raises(InvalidArgument, match=r"'softcap' must be a ScoreMod .*, to follow softcap\(3.0\)"):
        parse_score_mod("softcap(3.0)").then("softcap")


def test_in_a_session_rules_show_themselves_as_a_person_writes_them():
    assert repr(causal() & sliding_window(3, 0)) == "<Mask causal & sliding_window(3, 0)>"
    assert repr(parse_score_mod("softcap(3.0)")) == "<ScoreMod softcap(3.0)>"
    assert repr(causal().rule) == "<Rule causal: q_pos >= k_idx>"
    assert len(repr(AttentionSpec(128, 128, "bf16", causal().rule))) < 300


NESTED = [
    torch.nested.nested_tensor(parts, layout=layout)
    for parts in (
        [torch.tensor([1, 2]), torch.tensor([3])],
        [torch.tensor([True]), torch.tensor([False, True])],
    )
    for layout in (torch.strided, torch.jagged)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", NESTED, ids=lambda t: f"{t.dtype} {t.layout}")
def test_nested_operands_are_refused(nested):
    for use in (key_padding, key_padding().bind, key_padding("keep").bind):
        with pytest.raises(InvalidArgument, match="a dense tensor, not a nested one; pad it"):
            use(nested)


@pytest.mark.parametrize("odd", [[], {}, b"causal", 1, None, 0.5, ("causal",)], ids=repr)
def test_what_is_no_text_is_refused(odd):
    with pytest.raises(InvalidArgument, match="must be 'bottom_right' or 'top_left'"):
        causal(odd)
    with pytest.raises(InvalidArgument, match="is not a mask, which is a text; write one like causal"):
        parse_mask(odd)
    with pytest.raises(InvalidArgument, match="is not a score rule, which is a text; write one like softcap"):
        parse_score_mod(odd)
    for find in (find_target, find_family, suite_workloads):
        with pytest.raises(UnknownName, match="known: "):
            find(odd)
