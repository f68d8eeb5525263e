from collections import OrderedDict, UserDict, defaultdict, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate
from transformers import BatchEncoding

from lightning_pipeoffload.runtime.batch import (
    BatchStructure,
    Collation,
    batch_size,
    compute_microbatch_shares,
    map_batch,
    merge_outputs,
    possible_sample_counts,
    refuse_unclear_list,
    start_checksum,
)
from tests.support.small_modules import split_batch

Pair = namedtuple("Pair", ["x", "names"])


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    names: list[str]


@dataclass
class Derived:
    """Counts what it is made of, which a microbatch made of its parts would count anew."""

    x: Tensor
    names: list[str]
    doubled: Tensor = field(init=False)

    def __post_init__(self):
        self.doubled = 2 * self.x


@attrs.frozen
class ByAttrs:
    x: Tensor
    names: list[str]


class OwnConstructor(dict):
    def __init__(self, x, names):
        super().__init__(x=x, names=names)


class OwnList(list):
    pass


X = torch.arange(5.0)
NAMES = list("abcde")
CONTAINERS = {
    "tuple": lambda x, names: (x, names),
    "list": lambda x, names: [x, names],
    "namedtuple": Pair,
    "dict": lambda x, names: {"x": x, "names": names},
    "ordered dict": lambda x, names: OrderedDict(x=x, names=names),
    "frozen dataclass": Frozen,
    "dataclass with a derived field": Derived,
    "attrs": ByAttrs,
    "default dict": lambda x, names: defaultdict(list, x=x, names=names),
    "user dict": lambda x, names: UserDict(x=x, names=names),
    "read-only dict": lambda x, names: MappingProxyType({"x": x, "names": names}),
    "batch encoding": lambda x, names: BatchEncoding({"x": x, "names": names}),
    "dict with a constructor of its own": OwnConstructor,
    "list of its own class": lambda x, names: OwnList([x, names]),
    "collated": lambda x, names: default_collate(list(zip(x, names, strict=True))),
    "array": lambda x, names: (x, x.numpy()),
    "nested": lambda x, names: {"a": [x, (names, None)], "b": "text"},
}


def same(left, right):
    """Compare trees of tensors, which have no equality of their own."""
    return type(left) is type(right) and repr(left) == repr(right)


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_batches_of_any_kind_are_cut(make):
    batch = make(X, NAMES)
    parts = split_batch(batch, 2)
    assert batch_size(batch) == 5
    expected = [make(X[k : k + 2], NAMES[k : k + 2]) for k in (0, 2, 4)]
    assert all(map(same, parts, expected))
    assert len(parts) == len(expected)
    assert checksum(batch) == checksum(make(X.clone(), list(NAMES)))


SHARED = {
    "mask": torch.ones(1, 3),
    "scale": torch.tensor(2.0),
    "classes": ["cat", "dog"],
    "five": (1.0, 2.0, 3.0, 4.0, 5.0),
    "four": [1.0, 2.0, 3.0, 4.0],
    "one": 1.0,
}


def test_what_all_samples_share_goes_to_each():
    for part in split_batch(defaultdict(list, x=X, **SHARED), 2):
        assert all(same(part[name], value) for name, value in SHARED.items())
        assert part["others"] == []


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"x": X, "weights": [0.1, 0.2, 0.3, 0.4, 0.5]}, "batch['weights']"),
        ((X, {"lengths": [1, 2, 3, 4, 5]}), "batch[1]['lengths']"),
        (Frozen(X, [True] * 5), "batch['names']"),
        ([X, [np.float32(1)] * 5], "batch[1]"),
    ],
)
def test_a_list_of_numbers_as_long_as_the_batch_is_refused(batch, name):
    with pytest.raises(ValueError, match="list of 5 numbers") as raised:
        split_batch(batch, 2)
    assert str(raised.value) == (
        f"{name} is a list of 5 numbers, and the batch has as many samples: there is no telling "
        f"whether it has one for each; let collate_fn make it a tensor if so, and a tuple if not"
    )
    assert same(split_batch(batch, 5), [batch])


NO_DIMENSION = "holds no tensor with a dimension to cut"
SPARSE = "the batch holds a {} tensor, .* return a dense"
REFUSED = [
    (lambda: {}, NO_DIMENSION),
    (lambda: "text", NO_DIMENSION),
    (lambda: (torch.tensor(1.0), [1, 2]), NO_DIMENSION),
    (lambda: {"names": ["a", "b"], "classes": ["c"]}, NO_DIMENSION),
    (lambda: (torch.ones(4), torch.ones(6)), r"different lengths \[4, 6\] along dimension 0"),
    (lambda: {"x": X, "y": torch.eye(4).to_sparse()}, SPARSE.format("sparse_coo")),
    (lambda: {"x": X, "y": torch.eye(4).to_sparse_csr()}, SPARSE.format("sparse_csr")),
    (lambda: [torch.nested.nested_tensor([X, X[:2]])], SPARSE.format("nested")),
    (lambda: [torch.nested.nested_tensor([X, X], layout=torch.jagged)], SPARSE.format("nested")),
]


@pytest.mark.filterwarnings("ignore")  # torch calls sparse and nested tensors prototypes
@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_batch_that_cannot_be_cut_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        batch_size(make())


@pytest.mark.parametrize("weight", [0, -1, None, "many", float("nan"), float("inf")])
def test_weights_that_give_no_mean_are_refused(weight):
    with pytest.raises(ValueError, match=r"microbatch_weight returned .*numbers from 0 up"):
        compute_microbatch_shares(lambda part: weight, [1, 2])


def test_a_microbatch_may_weigh_nothing():
    shares, total, check = compute_microbatch_shares(torch.tensor, [0, 3])
    check()
    assert (shares, total) == ([0.0, 1.0], 3.0)


OUTPUTS = [
    (torch.tensor(1.0), torch.tensor(3.0), torch.tensor(2.5)),
    (1.0, 3.0, 2.5),
    (1, 3, 2.5),
    (3, 3, 3),
    (True, True, True),
    (True, False, 0.25),
    (np.float32(1), np.float32(3), np.float32(2.5)),
    (np.int64(1), np.int64(3), np.float64(2.5)),
    (np.array([1.0]), np.array([2.0, 3.0]), np.array([1.0, 2.0, 3.0])),
    (defaultdict(list, n=1), defaultdict(list, n=3), defaultdict(list, n=2.5)),
    (torch.tensor([1.0]), torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])),
    (["a"], ["b", "c"], ["a", "b", "c"]),
    (("a",), ("b", "c"), ("a", "b", "c")),
    (None, None, None),
    (
        {"loss": torch.tensor(1.0), "out": (torch.ones(1), None)},
        {"loss": torch.tensor(3.0), "out": (torch.zeros(2), None)},
        {"loss": torch.tensor(2.5), "out": (torch.tensor([1.0, 0.0, 0.0]), None)},
    ),
    (Pair(1.0, ["a"]), Pair(3.0, ["b"]), Pair(2.5, ["a", "b"])),
]


@pytest.mark.parametrize(("first", "second", "merged"), OUTPUTS)
def test_results_are_put_together(first, second, merged):
    assert same(merge_outputs([first, second], [0.25, 0.75]), merged)


BY_SAMPLE = [torch.ones(3, 2), np.ones(3), ["a", "b", "c"], {"x": torch.ones(3), "y": None}]
NOT_BY_SAMPLE = [3, "a", torch.tensor(1.0), torch.ones(2, 3), (torch.ones(3), 3), [1.0], object()]


def test_what_has_a_row_for_each_sample():
    assert all(3 in possible_sample_counts(output) for output in BY_SAMPLE)
    assert not any(3 in possible_sample_counts(output) for output in NOT_BY_SAMPLE)
    assert possible_sample_counts({"x": None}) is None


CHANGED = [
    torch.tensor([0.0, 1.0, 2.0, 3.0, 5.0]),
    X.flip(0),
    X.double() + 1e-9,
    (X, ["a", "b", "c", "d", "f"]),
    (X, X),
]


def checksum(batch):
    return start_checksum(batch)()


@pytest.mark.parametrize("other", CHANGED)
def test_checksums_tell_batches_apart(other):
    like = (X, NAMES) if isinstance(other, tuple) else X
    assert checksum(other) != checksum(like)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64])
def test_checksums_of_any_dtype(dtype):
    assert checksum(torch.ones(3, 2, dtype=dtype)) != checksum(torch.zeros(3, 2, dtype=dtype))


def test_a_checksum_of_a_large_tensor_looks_at_all_parts_of_it():
    large = torch.zeros(100_000)
    seen = {checksum(large)}
    for start in range(0, 100_000, 25_000):
        changed = large.clone()
        changed[start : start + 100] = 1
        seen.add(checksum(changed))
    assert len(seen) == 5


def boxes(*counts):
    """Targets of detection: a dict for each image, with so many boxes."""
    return [{"boxes": torch.full((n, 4), n), "id": i} for i, n in enumerate(counts)]


LISTS = {
    "dicts": boxes(2, 0, 4, 4, 1),
    "one row each": [{"id": torch.tensor([i])} for i in range(5)],
    "dataclasses": [Frozen(torch.ones(i, 2), ["a"]) for i in range(5)],
    "captions": [["a", "b"], ["c"], [], ["d"], ["e", "f", "g"]],
    "tuples": [(i, "name") for i in range(5)],
    "tensors without dimensions": [torch.tensor(i) for i in range(5)],
    "tensors of other lengths": [torch.ones(i, 3) for i in range(1, 6)],
    "some are None": [None, {"x": 1}, None, {"x": torch.ones(2)}, {}],
    "objects": [object() for _ in range(5)],
    "a tuple": tuple(boxes(1, 2, 3, 4, 5)),
}


@pytest.mark.parametrize("entries", LISTS.values(), ids=LISTS)
def test_a_list_with_an_entry_for_each_sample_is_cut(entries):
    batch = {"x": X, "targets": entries}
    assert batch_size(batch) == 5
    expected = [{"x": X[k : k + 2], "targets": entries[k : k + 2]} for k in (0, 2, 4)]
    assert all(map(same, split_batch(batch, 2), expected))


ROWS = [torch.ones(3, i, 7) for i in range(1, 5)]
OF_SAMPLES = {
    "a list of dicts": [{"image": row[0], "id": i} for i, row in enumerate(ROWS)],
    "a list of tensors": [torch.ones(i) for i in range(1, 5)],
    "columns of samples": (tuple(ROWS), tuple(boxes(1, 2, 3, 4))),
    "columns of samples and numbers": (tuple(ROWS), (1, 2, 3, 4), [5, 6, 7, 8]),
    "columns of samples and labels": (tuple(ROWS), tuple(map(torch.tensor, range(4)))),
    "texts": {"text": list("abcd"), "label": (0, 1, 1, 0)},
}


@pytest.mark.parametrize("batch", OF_SAMPLES.values(), ids=OF_SAMPLES)
def test_a_batch_may_be_lists_of_samples(batch):
    assert batch_size(batch) == 4
    first, second = split_batch(batch, 2)
    if isinstance(batch, list):
        assert same(first + second, batch)
        return
    columns = [b.values() if isinstance(b, dict) else b for b in (batch, first, second)]
    for whole, one, other in zip(*columns, strict=True):
        assert same(one + other, whole)
        assert len(one) == 2


TWO = torch.ones(2, 3)
COLUMNS = [(TWO, TWO), [TWO, TWO], [(TWO, TWO[:, 0]), {"x": TWO}], [{"x": TWO}, {"x": TWO}]]


@pytest.mark.parametrize("batch", COLUMNS)
def test_the_outermost_list_holds_columns(batch):
    assert batch_size(batch) == 2
    assert [len(part) for part in split_batch(batch, 1)] == [2, 2]


Y = torch.ones(2)
NESTED_COLUMNS = [
    ({"inputs": (TWO, TWO.bool()), "y": Y}, 2),
    ((Y, {"inputs": [TWO, TWO.numpy()]}), 2),
    ({"inputs": [X, X], "y": X}, 5),
    ({"inputs": [X, X], "names": NAMES}, 5),
]


@pytest.mark.parametrize(("batch", "count"), NESTED_COLUMNS)
def test_a_nested_list_holds_columns_of_unlike_dtypes_or_if_it_has_another_length(batch, count):
    parts = split_batch(batch, 1)
    expected = [map_batch(lambda leaf, k=k: leaf[k : k + 1], batch) for k in range(count)]
    assert len(parts) == count
    assert all(map(same, parts, expected))


def test_lists_may_have_a_row_for_all():
    structure, batch = BatchStructure(Collation(by_torch=True)), {"a": [TWO], "b": [TWO[:1]]}
    assert structure.count(batch) == 2
    assert [len(part["a"][0]) for part in structure.split(batch, 1).parts] == [1, 1]


def test_a_nested_tuple_of_as_many_rows_holds_columns():
    batch = {"inputs": (TWO, {"mask": TWO}), "y": TWO[:, 0]}
    assert batch_size(batch) == 2
    for part in split_batch(batch, 1):
        assert [len(part["inputs"][0]), len(part["inputs"][1]["mask"]), len(part["y"])] == [1] * 3


UNCLEAR = [
    ({"x": TWO, "views": [TWO, TWO]}, r"batch\['views'\] has 2 entries of as many rows.*stack it"),
    ((TWO, [{"x": TWO}, {"x": TWO}]), r"batch\[1\] has 2 entries of as many rows"),
    ({"images": (TWO, TWO), "y": Y}, r"batch\['images'\] has 2 entries of as many rows.*stack it"),
    ({"x": TWO, "y": (TWO, TWO[:1])}, r"batch\['y'\] has 2 entries of as many rows.*stack it"),
    (([TWO, TWO], (1, 2)), r"batch\[0\] has 2 entries of as many rows"),
    (((TWO, TWO), (1, 2)), r"batch\[0\] has 2 entries of as many rows"),
    ({"views": [TWO, TWO, TWO]}, r"batch\['views'\] has 3 entries with 2 rows"),
    ({"x": TWO, "y": TWO.numpy()[:1].repeat(3, 0)}, r"different lengths \[2, 3\]"),
    ({"x": TWO, "all": [torch.ones(5), torch.ones(6), "a"]}, r"batch\['all'\]\[0\] has 5 rows"),
    ((TWO, Object := type("Object", (), {"__init__": lambda self: vars(self).update(x=TWO)})()),
     r"batch\[1\] is a Object, whose tensors cannot be cut"),
    ((TWO, pack_sequence([TWO])), r"holds a PackedSequence, batch\[1\]"),
]  # fmt: skip


def test_columns_of_unlike_lengths_are_no_samples():
    """Those of two loaders, which torch collates: not two samples with a list each."""
    batch = {"labelled": [torch.ones(4, 2), torch.ones(4)], "rest": [torch.ones(8, 2)] * 2}
    with pytest.raises(ValueError, match=r"different lengths \[4, 8\].*batch\['labelled'\] has 4"):
        BatchStructure(Collation(by_torch=True)).count(batch)


@pytest.mark.parametrize(("batch", "message"), UNCLEAR)
def test_what_is_unclear_is_refused(batch, message):
    with pytest.raises(ValueError, match=message + ".*make_microbatches"):
        split_batch(batch, 1)


def test_later_batches_follow_the_first_one():
    structure = BatchStructure()

    def cut(num, classes=("a", "b")):
        batch = {"x": torch.ones(num), "targets": boxes(*range(num)), "classes": list(classes)}
        return [[len(part[n]) for n in batch] for part in structure.split(batch, 1).parts]

    assert cut(3) == [[1, 1, 2]] * 3
    assert cut(2) == [[1, 1, 2]] * 2
    with pytest.raises(ValueError, match=r"batch\['targets'\] 2;"):
        structure.count({"x": torch.ones(4), "targets": boxes(1, 2)})
    assert structure.count({"x": torch.ones(1), "targets": boxes(3)}) == 1


LIKE = [
    ([TWO, TWO], None, True),
    ([TWO, TWO], 2, True),
    ([TWO, TWO, TWO], 3, False),
    ([{"x": TWO}, {"x": TWO}, {"x": TWO}], 2, False),
    ([{"x": TWO}, {"x": TWO}, {"x": TWO}], 5, True),
    ((TWO, TWO), None, False),
    ([TWO, TWO[0]], None, False),
    ([TWO, TWO.int()], None, False),
    ([torch.tensor(1), torch.tensor(2)], None, False),
    ([{"x": TWO}], None, False),
    ([TWO[:1], TWO[:1]], 2, True),
]


@pytest.mark.parametrize(("batch", "size", "is_unclear"), LIKE)
def test_a_list_of_a_collate_fn_may_be_unclear(batch, size, is_unclear):
    with pytest.raises(ValueError, match="samples or") if is_unclear else nullcontext():
        refuse_unclear_list(batch, size)


@pytest.mark.parametrize(
    "batch", [[TWO] * 5, [{"x": TWO}] * 5, {"views": [TWO] * 5}, (([TWO] * 5), [{"x": TWO}] * 5)]
)
def test_the_loaders_batch_size_decides_where_two_numbers_may_be(batch):
    for sizes, count in (({5}, 5), ({7, 5}, 5), ({2}, 2), ({3}, 2)):
        assert BatchStructure(Collation(sizes=sizes)).count(batch) == count
    assert BatchStructure(Collation(by_torch=True)).count(batch) == 2


@pytest.mark.parametrize("collation", [Collation(by_torch=True), Collation(sizes={2}), None])
def test_as_many_columns_as_samples_stay_columns(collation):
    batch = [torch.zeros(2, 8), torch.ones(2, 8)]
    for part in BatchStructure(collation).split(batch, 1).parts:
        assert [*map(torch.unique, part)] == [torch.zeros(1), torch.ones(1)]


def test_results_with_an_entry_for_each_sample_are_put_together():
    whole = boxes(3, 1, 2)
    assert same(merge_outputs([whole[:2], whole[2:]], [0.5, 0.5], [2, 1]), whole)
    assert 3 in possible_sample_counts(whole)
    columns = [torch.ones(2, 1), torch.ones(2, 1)]
    joined = [torch.ones(4, 1), torch.ones(4, 1)]
    assert same(merge_outputs([columns, columns], [0.5, 0.5], [2, 2]), joined)
