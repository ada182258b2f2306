"""Tile classification and key and query ranges, against every single pair.

A tile that holds a kept pair must be visited, and what is called full must be full: one mistake here is a
wrong result of every kernel.
"""

import operator
import random
from bisect import bisect_left, bisect_right

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.build.reference import TORCH_FUNCTIONS
from flashgen.codegen.abi import Grid
from flashgen.errors import InvalidArgument
from flashgen.spec import expr as ex
from flashgen.spec import tiles
from flashgen.spec.masks import MASKS, Mask, parse_mask
from flashgen.spec.rule import Rule
from flashgen.spec.spans import SPANS
from flashgen.spec.tiles import TileClass, classify, lists, never_negative, ranges, resolve, visited

BATCH, HEADS = 2, 2
MAX_LEN = 40

RULES = [
    "k_idx < p where p: i32",
    "(k_idx < p) | (q_pos >= k_idx) where p: i32",
    "k_idx == q_idx",
    "k_idx != q_pos",
    "q_idx < p where p: i32",
    "q_idx - k_idx > p where p: i32",
    "p < q_idx where p: i32",
    "q_idx + k_idx <= p where p: i32",
    "2 * q_idx - 3 >= k_idx - p where p: i32",
    "3 * k_idx < 2 * q_idx + p where p: i32",
    "2 * q_idx == p where p: i32",
    "2 * q_idx != p where p: i32",
    "k_idx // 3 == q_idx // 3",
    "k_idx % 4 < 2",
    "abs(q_pos - k_idx) <= p where p: i32",
    "k_idx <= max(p, q_len // 2) where p: i32",
    "k_idx <= 1.5 * q_idx",
    "x < 0.5 where x: f32",
    "flags[head]  where flags: i1",
    "where(flags[head], k_idx <= q_idx, k_idx >= q_idx) where flags: i1",
    "q_pos - k_idx <= sizes[head] where sizes: i32",
    "ids[batch, q_idx] == ids[batch, k_idx] where ids: i32",
    "key_keep[batch, q_idx] where key_keep: i1",
    "ids[batch, q_idx] + p < ids[batch, k_idx] * 2 where p: i32, ids: i32",
    "abs(q_idx // 5 - k_idx // 5) <= 1",
    "abs(q_idx // max(p, 1) - k_idx // max(p, 1)) <= p % 3 where p: i32",
    "(q_pos - k_idx) % 3 == 0",
    "(k_idx % 16 < 9) & (q_idx % (k_idx + 1) >= q_idx // 9) | (q_idx // 2 == k_idx // 2)",
    "blocks[q_idx // 4, k_idx // 8] where blocks: i1",
    "where(blocks[q_idx // 4, k_idx // 8], 1, 0) == 1 where blocks: i1",
    "key_keep[batch, q_idx] == key_keep[batch, k_idx] where key_keep: i1",
    "where(key_keep[batch, k_idx], k_idx, 0 - k_idx) * (q_idx - p) >= p where p: i32, key_keep: i1",
    "where(k_idx < p, key_keep[batch, k_idx], q_idx >= k_idx) where p: i32, key_keep: i1",
    "min(ids[batch, k_idx], 2) != max(ids[batch, q_idx], 1) where ids: i32",
    "(2 * k_idx - 9) * (q_idx - 7) <= p where p: i32",
    "ids[ids[batch, k_idx] % 2, q_idx] < p where p: i32, ids: i32",
    "k_idx < rising[batch, q_idx] where rising: i32 ascending",
    "(k_idx - rising[batch, q_idx // 2] > p) & (rising[0, k_idx] <= q_idx) "
    "where p: i32, rising: i32 ascending",
    "(k_idx + q_idx >= rising[batch, min(q_idx + 3, q_len)]) | (rising[0, q_idx] == 5) "
    "where rising: i32 ascending",
    "k_idx != rising[batch, max(q_idx - 4, 0)] where rising: i32 ascending",
    "q_idx >= 2 * rising[batch, max(k_idx, 3)] - 9 where rising: i32 ascending",
    "k_idx < rising[batch, (q_len - 1) - q_idx] where rising: i32 ascending",
    "k_idx < rising[batch, q_idx % 3] where rising: i32 ascending",
]
"""Forms of masks that the table does not have, solvable and not."""


DISTANCES = ("q_pos - k_idx", "k_idx - q_pos", "q_idx - k_idx", "k_idx - q_idx", "q_pos - k_idx + 1")


def random_mask(rng: random.Random, depth: int) -> Mask:
    """A combination of at most 2 ** depth masks."""
    if depth and rng.random() < 0.75:
        left, right = random_mask(rng, depth - 1), random_mask(rng, depth - 1)
        mask = left & right if rng.random() < 0.5 else left | right
        return ~mask if rng.random() < 0.25 else mask
    if rng.random() < 0.4:
        rule = Rule.parse("mask", rng.choice(RULES))
        values = [rng.randint(-3, 30) if type_ == "i32" else rng.random() for _, type_ in rule.params]
        return Mask(rule, tuple(values), (None,) * len(rule.operands))
    size = rng.choice((0, 1, rng.randint(0, 30)))
    other = rng.choice((0, rng.randint(0, 30), None))
    texts = ["full", "causal", "causal('top_left')", f"sliding_window({size}, {other})"]
    texts += [f"sliding_window({other}, {size})", "key_padding", "key_padding('keep')", "document"]
    texts += ["document('ordered')"]
    texts += ["prefix_lm", f"dilated({size}, {rng.randint(1, 5)})", f"global_tokens({size})"]
    grid = rng.randint(2, 9), rng.randint(2, 9)
    kernel = rng.randint(1, grid[0]), rng.randint(1, grid[1])
    texts += [f"neighborhood({size + 1})", f"neighborhood({grid}, {kernel})"]
    texts += [f"block_sparse('{rng.choice(('shared', 'batch_heads'))}', {rng.choice((4, 8, 16))})"]
    mask = parse_mask(rng.choice(texts))
    return ~mask if rng.random() < 0.25 else mask


def documents(rng: random.Random, length: int) -> list[list[int]]:
    """Of each sequence, one after another or interleaved: few, one for all, or one for each key."""
    many = rng.choice((1, 3, length))
    ids = [[rng.randrange(many) for _ in range(length)] for _ in range(BATCH)]
    return ids if rng.random() < 0.3 else [sorted(each) for each in ids]


def ends_of(ids: list[int]) -> list[list[int]]:
    """Where documents begin and end that follow one another, whatever the order of the ids."""
    ids = sorted(ids)
    begins, ends = [bisect_left(ids, each) for each in ids], [bisect_right(ids, each) for each in ids]
    return [[0, *begins], [0, *ends]]


class Case:
    """A mask with random sizes and operands, and every pair it keeps."""

    def __init__(self, mask: Mask, rng: random.Random, sizes: tuple[int, int] | None = None) -> None:
        self.mask = mask
        self.q_len, self.k_len = sizes or (rng.choice((1, rng.randint(1, MAX_LEN))) for _ in "qk")
        longest = max(self.q_len, self.k_len)
        invented = {
            "key_lengths": lambda: [rng.randint(0, self.k_len) for _ in range(BATCH)],
            "prefix_lens": lambda: [rng.randint(0, self.k_len) for _ in range(BATCH)],
            "sizes": lambda: [rng.randint(-2, 20) for _ in range(HEADS)],
            "flags": lambda: [rng.random() < 0.5 for _ in range(HEADS)],
            "ids": lambda: [sorted(rng.randint(0, 3) for _ in range(longest)) for _ in range(BATCH)],
            "doc_ids": lambda: documents(rng, self.k_len),
            "doc_ends": lambda: [ends_of(each) for each in documents(rng, self.k_len)],
            "rising": lambda: [sorted(rng.choices(range(-3, longest), k=2 * longest + 4)) for _ in "12"],
            "blocks": lambda: [[rng.random() < 0.5 for _ in range(longest)] for _ in range(longest)],
            "kept": lambda: [[invented["blocks"]()] * HEADS] * BATCH,
            "key_keep": lambda: [[rng.random() < 0.7 for _ in range(longest)] for _ in range(BATCH)],
        }
        self.env = {"q_len": self.q_len, "k_len": self.k_len, "batch": rng.randrange(BATCH)}
        self.env |= {"head": rng.randrange(HEADS), "kv_head": 0}
        self.env |= {name: value for (name, _), value in zip(mask.rule.params, mask.values, strict=True)}
        for operand in mask.rule.operands:
            self.env[operand.name] = invented[operand.name.rstrip("_0123456789")]()
        self.see()

    def see(self) -> None:
        """Evaluates the mask of all pairs."""
        on_tensors = {
            name: torch.tensor(value) if isinstance(value, list) else value
            for name, value in self.env.items()
        }
        on_tensors |= {"q_idx": torch.arange(self.q_len)[:, None], "k_idx": torch.arange(self.k_len)}
        keep = torch.as_tensor(ex.evaluate(self.mask.rule.expr, on_tensors, TORCH_FUNCTIONS))
        self.keep = keep.expand(self.q_len, self.k_len)

    def __str__(self) -> str:
        return f"{self.mask} with {self.env}"

    @property
    def told_by_ends(self) -> bool:
        """Whether the ends of a tile tell as much as its numbers: lists know nothing of floats, and of what
        both sides read together single elements alone.
        """
        loads = ex.loads(self.mask.rule.expr)
        both = [load for load in loads if {"q_idx", "k_idx"} <= ex.free_symbols(load)]
        text = self.mask.rule.text
        return not both and "f32" not in text and "1.5" not in text

    def visits(self, axis: str, block_across: int, block: int):
        """For each tile of rows across: what `resolve` says, and the pairs, (rows of the tile, along)."""
        pairs = self.keep if axis == "k" else self.keep.T
        found = ranges(self.mask.rule, axis)
        for first in range(0, len(pairs), block_across):
            last = min(first + block_across, len(pairs)) - 1
            env = {**self.env, "first": first, "last": last}
            yield resolve(found, env, block, pairs.shape[1]), pairs[first : last + 1]

    def check_ranges(self, axis: str, block_across: int, block: int, slack: int | None = None) -> None:
        for resolved, pairs in self.visits(axis, block_across, block):
            told = f"{self}, {axis=} {block_across=} {block=}: {resolved}"
            visited = torch.zeros(pairs.shape[1] + block, dtype=torch.bool)
            for lo, full_lo, full_hi, hi in resolved:
                assert 0 <= lo <= full_lo <= full_hi <= hi, told
                assert not any(side % block for side in (lo, full_lo, full_hi, hi)), told
                assert not visited[lo:hi].any(), f"visited twice: {told}"
                visited[lo:hi] = True
                assert full_lo == full_hi or full_hi <= pairs.shape[1], f"full beyond the end: {told}"
                assert pairs[:, full_lo:full_hi].all(), f"called full but is not: {told}"
            needed = pairs.any(0)
            assert not (needed & ~visited[: len(needed)]).any(), f"visits too few: {told}"
            if slack is not None:
                blocks = [piece.any() for piece in needed.split(block)]
                visited_blocks = sum((hi - lo) // block for lo, _, _, hi in resolved)
                assert visited_blocks <= sum(blocks) + slack * len(resolved), f"visits too many: {told}"

    def check_lists(self, axis: str, block_across: int, block: int) -> None:
        """No needed block is missed, and what counts as full is. Blocks that interval arithmetic over the
        tile's own numbers calls empty are not visited, but for a lone first one.
        """
        found = lists(self.mask.rule, axis)
        if found is None:
            return
        keep = self.keep if axis == "k" else self.keep.T
        for first in range(0, len(keep), block_across):
            last = min(first + block_across, len(keep)) - 1
            partial, full = found.of_tile(self.env, (first, last), block, keep.shape[1])
            told = f"{self}, {axis=}, tile {first} to {last}, {block=}: {partial=} {full=}"
            assert partial == sorted(set(partial)) and full == sorted(set(full)), told
            assert not set(partial) & set(full) and partial + full, told
            for number, start in enumerate(range(0, keep.shape[1], block)):
                pairs = keep[first : last + 1, start : start + block]
                assert not pairs.any() or number in partial + full, f"misses {number=}: {told}"
                assert number not in full or pairs.all(), f"{number=} is not full: {told}"
                assert number not in full or pairs.shape[1] == block, f"{number=} is ragged: {told}"
                ends = ((first, last), (start, start + pairs.shape[1] - 1))
                if not self.told_by_ends:
                    continue
                verdict = classify(self.mask.rule.expr, *(ends if axis == "k" else ends[::-1]), self.env)
                if verdict is TileClass.EMPTY and partial + full != [0]:
                    assert number not in partial, f"{number=} is empty: {told}"
                if verdict is TileClass.FULL and pairs.shape[1] == block:
                    assert number in full, f"{number=} is full: {told}"

    def check_visited(self, block_q: int, block_k: int, exact: bool) -> None:
        """Against every pair: no tile that keeps some is left out, and none is called full that is not; of
        what is `exact`, no other tile is visited and every full one is known.
        """
        tiles = list(visited(self.mask.rule, self.env, block_q, block_k))
        assert len(tiles) == -(-self.q_len // block_q)
        for row, (partial, full) in enumerate(tiles):
            told = f"{self}, {block_q=} {block_k=} {row=}: {partial=} {full=}"
            rows = self.keep[row * block_q : (row + 1) * block_q]
            blocks = list(enumerate(rows.split(block_k, dim=1)))
            kept = {block for block, pairs in blocks if pairs.any()}
            whole = {block for block, pairs in blocks if pairs.all() and pairs.shape[1] == block_k}
            assert not set(partial) & set(full) and kept <= {*partial, *full} and set(full) <= whole, told
            assert len(partial) == len(set(partial)) and len(full) == len(set(full)), told
            if exact:
                assert {*partial, *full} == kept and set(full) == whole, told

    def check_classes(self, block_q: int, block_k: int, exact: bool) -> None:
        for q in range(0, self.q_len, block_q):
            for k in range(0, self.k_len, block_k):
                pairs = self.keep[q : q + block_q, k : k + block_k]
                q_last, k_last = q + pairs.shape[0] - 1, k + pairs.shape[1] - 1
                found = classify(self.mask.rule.expr, (q, q_last), (k, k_last), self.env)
                truth = (
                    TileClass.FULL if pairs.all() else TileClass.PARTIAL if pairs.any() else TileClass.EMPTY
                )
                allowed = {truth} if exact else {truth, TileClass.PARTIAL}
                assert found in allowed, f"{self}: {found} for {q=} {q_last=} {k=} {k_last=}, but {truth}"

    def check_signs(self) -> None:
        """What is never negative is not at any pair kept."""
        for text in DISTANCES:
            if never_negative(self.mask.rule, ex.parse(text)):
                env = {**self.env, "q_idx": torch.arange(self.q_len)[:, None]}
                values = ex.evaluate(ex.parse(text), {**env, "k_idx": torch.arange(self.k_len)})
                assert (values[self.keep] >= 0).all(), f"{text} under {self}"


def check(mask: Mask, rng: random.Random, slack: int | None = None, exact: bool = False) -> None:
    case = Case(mask, rng)
    block_q, block_k = rng.choice((1, 2, 4, 8, 16)), rng.choice((1, 2, 4, 8, 16))
    case.check_ranges("k", block_q, block_k, slack)
    case.check_ranges("q", block_k, block_q, slack)
    case.check_classes(block_q, block_k, exact)
    case.check_lists("k", block_q, block_k)
    case.check_lists("q", block_k, block_q)
    case.check_visited(block_q, block_k, exact=False)
    case.check_signs()


SIMPLE = ["full", "~full", "causal", "~causal", "causal('top_left')", "key_padding", "~key_padding"]
"""Masks of one range; with the windows below, and both."""


def test_table_masks_visit_and_mask_no_more_than_they_must():
    rng = random.Random(1)
    for _ in range(60):
        left, right = rng.randint(0, 30), rng.choice((0, rng.randint(0, 30)))
        windows = [f"sliding_window({a}, {b})" for a in (left, None) for b in (right, None)]
        one_conjunct = [*SIMPLE, *windows, f"causal & {windows[0]}", f"causal & {windows[1]} & key_padding"]
        for text in one_conjunct:
            check(parse_mask(text), rng, slack=2, exact="&" not in text)


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_of_the_table(name):
    rng = random.Random(2)
    for mask in MASKS[name].examples():
        for each in (mask, ~mask):
            for _ in range(10):
                # What ranges cannot solve, such as a remainder, may be called partial where it is full, and
                # so may a tile of which one alternative keeps some pairs and another the rest.
                solved = all(found.has_full for found in ranges(each.rule, "k"))
                check(each, rng, exact=solved and not set("%|") & set(mask.rule.text))


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "causal",
        "sliding_window(9, 2)",
        "causal & sliding_window(12, 0)",
        "document",
        "causal & document",
        "document('ordered')",
        "causal & document('ordered')",
        "prefix_lm",
        "neighborhood((8, 8), (3, 3))",
    ],
)
def test_tiles_are_counted_as_the_pairs_say(text):
    """What a benchmark counts: of few queries and of equal lengths, with sorted documents."""
    rng = random.Random(6)
    for q_len, k_len in ((64, 64), (50, 50), (3, 64)):
        case = Case(parse_mask(text), rng, (q_len, k_len))
        if "doc_ids" in case.env:
            case.env["doc_ids"] = [sorted(rng.randrange(5) for _ in range(k_len)) for _ in range(BATCH)]
        case.see()
        if "neighborhood" not in text or k_len == 64:  # or there is no whole grid
            case.check_visited(4, 8, exact=True)


@pytest.mark.parametrize("text", RULES)
def test_every_form(text):
    rng = random.Random(3)
    rule = Rule.parse("mask", text)
    for _ in range(12):
        values = tuple(rng.randint(-3, 30) if type_ == "i32" else rng.random() for _, type_ in rule.params)
        mask = Mask(rule, values, (None,) * len(rule.operands))
        check(mask, rng)
        check(~mask, rng)


def test_random_combinations():
    rng = random.Random(4)
    for _ in range(700):
        check(random_mask(rng, 3), rng)


LEAVES = st.sampled_from([mask for entry in MASKS.values() for mask in entry.examples()])
COMBINATIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(operator.invert),
        st.builds(operator.and_, inner, inner),
        st.builds(operator.or_, inner, inner),
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=150)
@given(mask=COMBINATIONS, rng=st.randoms(use_true_random=False))
def test_any_combination(mask, rng):
    """As above, of masks of the table alone; what fails is cut down to the smallest mask that does."""
    check(mask, rng)


@pytest.mark.parametrize(
    ("text", "axis", "expected"),
    [
        ("full", "k", ["[ : ) full [ : )"]),
        ("~full", "k", []),
        ("causal", "k", ["[ : last + k_len - q_len + 1) full [ : first + k_len - q_len + 1)"]),
        ("causal", "q", ["[first + q_len - k_len : ) full [last + q_len - k_len : )"]),
        ("causal('top_left')", "k", ["[ : last + 1) full [ : first + 1)"]),
        (
            "sliding_window(8, 3)",
            "k",
            [
                "[first + k_len - q_len - left : last + k_len - q_len + right + 1) "
                "full [last + k_len - q_len - left : first + k_len - q_len + right + 1)"
            ],
        ),
        (
            "causal & key_padding",
            "k",
            [
                "[ : min(last + k_len - q_len + 1, key_lengths[batch])) "
                "full [ : min(first + k_len - q_len + 1, key_lengths[batch]))"
            ],
        ),
        (
            "key_padding",
            "q",
            [
                "[where(first < key_lengths[batch], 0, q_len) : ) "
                "full [where(last < key_lengths[batch], 0, q_len) : )"
            ],
        ),
        ("causal & key_padding('keep')", "k", ["[ : last + k_len - q_len + 1) full none"]),
        (
            "~sliding_window(8, 3)",
            "k",
            [
                "[ : last + k_len - q_len - left) full [ : first + k_len - q_len - left)",
                "[first + k_len - q_len + right + 1 : ) full [last + k_len - q_len + right + 1 : )",
            ],
        ),
        (
            "document('ordered')",
            "k",
            [
                "[doc_ends[batch, 0, max(first + k_len - q_len + 1, 0)] : "
                "doc_ends[batch, 1, max(last + k_len - q_len + 1, 0)]) "
                "full [doc_ends[batch, 0, max(last + k_len - q_len + 1, 0)] : "
                "doc_ends[batch, 1, max(first + k_len - q_len + 1, 0)])"
            ],
        ),
    ],
)
def test_bounds_read_as_written_by_hand(text, axis, expected):
    assert [str(each) for each in ranges(parse_mask(text).rule, axis)] == expected


def test_reads_are_solved_where_they_are_declared_ascending_alone():
    """What is read of unsorted data must stay unsolved, or kept pairs are skipped."""
    rng = random.Random(9)
    read = "k_idx < rising[batch, q_idx]"
    promised, plain = (Rule.parse("mask", f"{read} where rising: i32{word}") for word in (" ascending", ""))
    assert promised != plain and promised.text.endswith(" ascending")
    assert ranges(plain, "k") == (tiles.EVERYTHING,) and lists(plain) is not None and lists(promised) is None
    for _ in range(20):
        case = Case(Mask(plain, (), (None,)), rng)
        case.env["rising"] = [rng.sample(each, len(each)) for each in case.env["rising"]]
        case.see()
        case.check_ranges("k", 8, 4)
        case.check_lists("k", 8, 4)
    # An index that falls, goes round, or differs along the wrong axis reads in no order.
    for index in (
        "batch, -q_idx",
        "batch, q_idx % 3",
        "batch, q_idx * q_idx",
        "q_idx, batch",
        "head, q_idx // p",
    ):
        rule = Rule.parse("mask", f"k_idx + p < rising[{index}] where p: i32, rising: i32 ascending")
        assert ranges(rule, "k") == (tiles.EVERYTHING,), index


def test_alternatives_that_share_a_side_become_one_range():
    rule = Rule.parse("mask", "(k_idx < prefix) | (q_pos >= k_idx) where prefix: i32")
    (one,) = ranges(rule, "k")
    assert str(one) == (
        "[ : max(prefix, last + k_len - q_len + 1)) full [ : max(prefix, first + k_len - q_len + 1))"
    )


def test_an_unsolvable_alternative_leaves_the_full_part_of_another():
    parts = ["(k_idx < prefix)", "(q_pos >= k_idx) & key_keep[batch, k_idx]"]
    for text in (" | ".join(parts), " | ".join(reversed(parts))):
        (one,) = ranges(Rule.parse("mask", f"{text} where prefix: i32, key_keep: i1"), "k")
        assert ex.to_text(one.hi) in {
            "max(prefix, last + k_len - q_len + 1)",
            "max(last + k_len - q_len + 1, prefix)",
        }
        assert one.has_full and one.full_lo is None and ex.to_text(one.full_hi) == "prefix"


def test_more_alternatives_than_ranges_become_their_hull():
    text = " | ".join(f"(k_idx == p_{i})" for i in range(tiles.MAX_RANGES + 1))
    declared = ", ".join(f"p_{i}: i32" for i in range(tiles.MAX_RANGES + 1))
    (hull,) = ranges(Rule.parse("mask", f"{text} where {declared}"), "k")
    assert str(hull) == (
        "[min(min(min(p_0, p_1), p_2), p_3) : max(max(max(p_0 + 1, p_1 + 1), p_2 + 1), p_3 + 1)) full none"
    )


def test_a_mask_of_too_many_alternatives_is_visited_everywhere():
    pairs = " & ".join(f"((k_idx == {i}) | (q_idx == {i}))" for i in range(10))
    assert ranges(Rule.parse("mask", pairs), "k") == (tiles.EVERYTHING,)


def test_bounds_read_nothing_that_changes_within_a_tile():
    rng = random.Random(5)
    for _ in range(200):
        rule = random_mask(rng, 3).rule
        for axis in "qk":
            for each in ranges(rule, axis):
                for bound in (each.lo, each.hi, each.full_lo, each.full_hi):
                    assert bound is None or not ex.free_symbols(bound) & {"q_idx", "k_idx", "q_pos"}


@pytest.mark.parametrize(
    ("mask", "signs"),
    [
        ("causal", "+---+"),
        ("causal('top_left')", "--+--"),
        ("~causal", "-+---"),
        ("causal & document", "+---+"),
        ("prefix_lm & (causal | ~causal & causal)", "+---+"),
        ("sliding_window(8, 0)", "-----"),  # its numbers are a call's
        ("prefix_lm", "-----"),
        ("full", "-----"),
        ("~full", "+++++"),
    ],
)
def test_the_sign_of_a_distance_under_a_mask(mask, signs):
    known = [never_negative(parse_mask(mask).rule, ex.parse(text)) for text in DISTANCES]
    assert "".join("-+"[each] for each in known) == signs
    assert not never_negative(parse_mask(mask).rule, ex.parse("q_pos // 2 - k_idx")) or mask == "~full"


def test_every_operation_on_integers_and_truth_values_has_a_span():
    assert set(SPANS) == {row.key for row in ex.OPERATIONS.values() if row.gives != "float"}


@pytest.mark.parametrize(
    ("text", "some", "every"),
    [
        (
            "document & causal",
            "(q_last + k_len - q_len >= 0) & ((doc_ids__q_least <= doc_ids__k_most) & "
            "(doc_ids__k_least <= doc_ids__q_most)) & (q_last + k_len - q_len >= k_first)",
            "(q_first + k_len - q_len >= 0) & ((doc_ids__q_least == doc_ids__k_most) & "
            "(doc_ids__q_most == doc_ids__k_least)) & (q_first + k_len - q_len >= k_last)",
        ),
        ("causal", None, None),
        ("key_padding('keep')", None, None),
        ("~key_padding | sliding_window(3, 4)", None, None),
    ],
)
def test_lists_read_as_written_by_hand(text, some, every):
    found = lists(parse_mask(text).rule)
    if some is None:
        assert found is None
    else:
        assert (ex.to_text(found.some), ex.to_text(found.every)) == (some, every)
        assert str(found.within) == (
            "[where(last + k_len >= q_len, 0, k_len) : last + k_len - q_len + 1) full none"
        )


def test_documents_visit_their_own_tiles_alone():
    ids = [[key // 96 for key in range(512)]]
    env = {"q_len": 512, "k_len": 512, "batch": 0, "doc_ids": ids}
    found = lists(parse_mask("document & causal").rule)
    assert [found.of_tile(env, (q, q + 63), 32, 512) for q in range(0, 256, 64)] == [
        ([0, 1], []),
        ([0, 1, 2, 3], []),
        ([4, 5], [3]),
        ([6, 7], []),
    ]


@pytest.mark.parametrize("tile", [(16, 16), (8, 4), (24, 16), (12, 16), (4, 16)], ids=str)
def test_blocks_as_large_as_tiles_visit_what_the_table_keeps_alone(tile):
    """Tiles within a block, and tiles that reach into a second one."""
    rng = random.Random(6)
    table = [[rng.random() < 0.4 for _ in range(6)] for _ in range(6)]
    env = {"q_len": 96, "k_len": 96, "batch": 0, "head": 0, "kept": [[table]]}
    found = lists(parse_mask("block_sparse('shared', 16)").rule)
    block_m, block_n = tile
    for first in range(0, 96, block_m):
        last = min(first + block_m, 96) - 1
        rows = {first // 16, last // 16}
        partial, full = [], []
        for block in range(96 // block_n):
            seen = [table[row][block * block_n // 16] for row in rows]
            (full if all(seen) else partial if any(seen) else []).append(block)
        assert found.of_tile(env, (first, last), block_n, 96) == (partial if partial or full else [0], full)


def test_a_grid_s_rows_that_no_query_of_a_tile_is_near_are_not_visited():
    env = {"q_len": 256, "k_len": 256, "height": 16, "kernel_h": 3, "kernel_w": 3}
    found = lists(parse_mask("neighborhood((16, 16), (3, 3))").rule)
    assert [found.of_tile(env, (q, q + 31), 16, 256)[0] for q in (0, 96, 224)] == [
        [0, 1, 2],
        [5, 6, 7, 8],
        [13, 14, 15],
    ]


def test_only_two_axes():
    with pytest.raises(InvalidArgument, match="axis="):
        ranges(parse_mask("causal").rule, "batch")


MANY = 2**22

SMS = 132  # multiprocessors; a grid of row tiles does not ask
SCHEDULES = {
    # mask, its parameters, (q_len, k_len): (full_hi, hi) of the keys of the first and of the last query tile
    "causal, square": ("causal", (MANY, MANY), (0, 128), (MANY - 128, MANY)),
    "causal, one row": ("causal", (1, MANY), (MANY, MANY), (MANY, MANY)),
    "causal, few keys": ("causal", (MANY, 64), (0, 0), (0, 64)),
    "full": ("full", (MANY, MANY), (MANY, MANY), (MANY, MANY)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_c10_millions_of_queries_and_keys_have_a_schedule_within_31_bits(name):
    mask, (q_len, k_len), first_tile, last_tile = SCHEDULES[name]
    block_m, block_n = 128, 64
    grid = Grid("row_tiles", block_m)
    assert grid.blocks(1, 1, MANY, SMS) == 32_768 and grid.blocks(4, 128, MANY, SMS) == 2**24
    assert grid.blocks(2**16, 2, 1, SMS) == 2**17 and grid.blocks(1, 1, MANY + 1, SMS) == 32_769
    found = ranges(parse_mask(mask).rule, "k")
    tile_count = grid.blocks(1, 1, q_len, SMS)
    for tile, (full_hi, hi) in ((0, first_tile), (tile_count - 1, last_tile)):
        env = {"first": tile * block_m, "last": tile * block_m + block_m - 1, "q_len": q_len, "k_len": k_len}
        ((lo, full_lo, found_full_hi, found_hi),) = resolve(found, env, block_n, k_len)
        assert (lo, full_lo, found_full_hi, found_hi) == (0, 0, full_hi, hi)
        for bound in (found[0].lo, found[0].hi, found[0].full_lo, found[0].full_hi):
            assert bound is None or abs(ex.evaluate(bound, env)) < 2**31


def test_c10_a_window_over_millions_of_keys_visits_its_own_tiles_alone():
    window = parse_mask("causal & sliding_window(1023, 0)")
    env = {"first": MANY - 128, "last": MANY - 1, "q_len": MANY, "k_len": MANY}
    env |= dict(zip((name for name, _ in window.rule.params), window.values, strict=True))
    ((lo, full_lo, full_hi, hi),) = resolve(ranges(window.rule, "k"), env, 64, MANY)
    assert (lo, full_lo, full_hi, hi) == (MANY - 1152, MANY - 1024, MANY - 128, MANY)
