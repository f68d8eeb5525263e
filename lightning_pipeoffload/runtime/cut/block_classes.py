"""Classes of blocks that are alike: a measurement of one block holds for all of its class.

Blocks are alike where the trace saw the same work in their segments (operations with the shapes,
types and numbers of their arguments), and where their modules have the same types, parameters,
hooks and attributes. A number that counts the blocks, such as ``layer_idx``, does not tell them
apart. A block is alone in its class where its work depends on values.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import BlockOutput
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.cut.segment_work import tensor_options
from lightning_pipeoffload.runtime.shapes import is_4bit, params4bit_arguments
from lightning_pipeoffload.runtime.weight_grad import has_hooks

aten = torch.ops.aten

_DEPTH = 3  # of containers and objects in an attribute
_PLAIN = (bool, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = {dict, OrderedDict, list, tuple, set}
_SLOTS = ("_parameters", "_buffers", "_modules")


def _describe_tensor(tensor: Tensor) -> tuple[Any, ...]:
    return *tensor.shape, *tensor_options(tensor)


def classify_blocks(chain: BlockChain, record: StepRecord) -> list[int]:
    """Return the class of each block of the chain; classes are numbered from 0.

    The code after the last block counts as work of the last block.
    """
    signatures = _signatures_of(chain)
    keys = []
    for index, each in enumerate(signatures):
        segments = {index, index + 1} if index == len(chain) - 1 else {index}
        keys.append((_work_of(index, segments, record), each.form))
    return _classes(signatures, keys)


def _classes(signatures: Sequence[_Signature], keys: Sequence[Any]) -> list[int]:
    """Number the blocks that have the same key, and the same numbers but for counters."""
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        alike[key].append(index)
    classes: dict[Any, int] = {}
    class_of_block = [0] * len(signatures)
    for key, members in sorted(alike.items(), key=lambda item: item[1]):
        for index, numbers in zip(
            members, _distinguishing_numbers(members, signatures), strict=True
        ):
            class_of_block[index] = classes.setdefault((key, numbers), len(classes))
    return class_of_block


def classify_by_structure(chain: BlockChain) -> list[int]:
    """Return the class of each block by how it is made alone, before any step has run."""
    signatures = _signatures_of(chain)
    return _classes(signatures, [each.form for each in signatures])


def find_skippable_blocks(chain: BlockChain, record: StepRecord) -> dict[int, BlockOutput]:
    """Return, by index, the outputs of blocks that another run without values can skip.

    An earlier block of the same class runs. A skipped block has no side effect, and only the shapes
    of its output are needed.
    """
    return _repeated(chain, record, classify_blocks(chain, record))


def _with_other_weights(chain: BlockChain, record: StepRecord) -> set[int]:
    """Return the segments in which other weights are used than their blocks'."""
    return {
        segment
        for name, segments in record.segments.items()
        for segment in segments
        if segment != chain.enclosing_block(name)
    }


def find_alike_blocks(
    chain: BlockChain, record: StepRecord, stages: Iterable[range]
) -> dict[int, int]:
    """Map each block that a memory measurement may skip to an earlier one of its stage.

    Autograd saves as many bytes for both. The earlier one is not the first of its class on the
    stage, which also saves shared tensors, such as a mask. A block runs if its segment uses weights
    other than its own.
    """
    classes = classify_blocks(chain, record)
    repeated = _repeated(chain, record, classes).keys() - _with_other_weights(chain, record)
    alike: dict[int, int] = {}
    for blocks in stages:
        for index in blocks[2:]:
            is_alike = classes[index - 2] == classes[index - 1] == classes[index]
            if is_alike and index in repeated:
                alike[index] = alike.get(index - 1, index - 1)
    return alike


def _repeated(
    chain: BlockChain, record: StepRecord, classes: Sequence[int]
) -> dict[int, BlockOutput]:
    outputs = outputs_without_side_effects(record)
    return {i: output for i, output in outputs.items() if classes.index(classes[i]) < i}


def outputs_without_side_effects(record: StepRecord) -> dict[int, BlockOutput]:
    """Return, by index, the outputs of blocks without side effects, if only shapes are needed."""
    if record.writes.arguments or record.backwards.are_any or not record.calls.is_sequential:
        return {}
    alone = record.writes.attribute_writing_blocks | record.draws.segments
    return {
        index: output
        for index, output in enumerate(record.outputs)
        if record.output_shapes_suffice(index) and index not in alone
    }


def digest_blocks(chain: BlockChain) -> str:
    """Return a digest of the blocks' classes and attributes, the same in all processes."""
    signatures = [(each.form, each.numbers) for each in _signatures_of(chain)]
    return sha256(repr(signatures).encode()).hexdigest()


def _work_of(index: int, segments: set[int], record: StepRecord) -> Any:
    is_alone = bool(segments & (record.assumed.keys() | record.draws.by_chance))
    if is_alone or record.draws.outside_torch:
        return index
    return *(record.work.digests[segment] for segment in sorted(segments)), index in record.opened


def _distinguishing_numbers(
    members: Sequence[int], signatures: Sequence[_Signature]
) -> Iterator[tuple[int, ...]]:
    """Yield the numbers in each member's attributes without those that count the blocks."""
    columns = zip(*(signatures[index].numbers for index in members), strict=True)
    telling = [column for column in columns if not _is_block_counter(column, members)]
    for place in range(len(members)):
        yield tuple(column[place] for column in telling)


def _is_block_counter(numbers: Sequence[int], members: Sequence[int]) -> bool:
    """Return whether a number in the blocks' attributes is only a counter, such as a layer's index.

    It is one if it grows by 1 with each block of the chain, or with each of ``members`` (where
    blocks of two kinds alternate, and each kind has its own counter).

    Args:
        numbers: The attribute's value in each member.
        members: The members' indices in the chain.
    """
    places = range(len(members))
    return any(
        len({number - index for number, index in zip(numbers, counted, strict=True)}) == 1
        for counted in (members, places)
    )


def _signatures_of(chain: BlockChain) -> list[_Signature]:
    described: _Described = {}  # blocks share objects, such as a configuration
    return [_Signature(block, described) for block in chain.blocks]


_Described = dict[int, tuple[str, list[int]]]
"""The form of an object, and the whole numbers in it, by its id."""


class _Signature:
    """How a block is made.

    Attributes:
        form: A description of its modules, without whole numbers.
        numbers: The whole numbers in its attributes, in their order.
    """

    def __init__(self, block: nn.Module, described: _Described) -> None:
        self.numbers: list[int] = []
        self._described = described
        modules = block.named_modules()
        self.form = tuple(
            (name, _name_of(type(child)), self._describe_module(child)) for name, child in modules
        )

    def _describe_module(self, module: nn.Module) -> Any:
        space = vars(module)
        tensors = {
            name: None if tensor is None else self._describe_weight(tensor)
            for kind in _SLOTS[:2]
            for name, tensor in space[kind].items()
        }
        others = {
            name: self._describe(value, _DEPTH)
            for name, value in space.items()
            if name not in _SLOTS
        }
        return *tensors.items(), *others.items()

    def _describe_weight(self, tensor: Tensor) -> Any:
        options = params4bit_arguments(tensor) if is_4bit(tensor) else {}
        packed = [self._describe(value, 1) for value in options.values()]
        return _name_of(type(tensor)), _describe_tensor(tensor), has_hooks(tensor), tuple(packed)

    def _describe(self, value: Any, depth: int) -> Any:
        if type(value) is int:
            self.numbers.append(value)
            return "int"
        if isinstance(value, (int, *_PLAIN)):
            return repr(value)
        if isinstance(value, Tensor):
            return _describe_tensor(value)
        if isinstance(value, type):
            return _name_of(value)
        is_empty = type(value) in _CONTAINERS and not value  # as most registries of hooks
        if is_empty or not depth or isinstance(value, nn.Module):
            return _name_of(type(value))
        return self._describe_parts(value, depth - 1)

    def _describe_parts(self, value: Any, depth: int) -> Any:
        """Describe the contents of a container, object or function; each object once."""
        if id(value) not in self._described:
            self._described[id(value)] = "", []  # it may hold itself
            before, self.numbers = self.numbers, []
            parts = [(name, self._describe(part, depth)) for name, part in _parts_of(value)]
            form = repr((_name_of(type(value)), _code_of(value), parts))
            self._described[id(value)] = sha256(form.encode()).hexdigest(), self.numbers
            self.numbers = before
        form, numbers = self._described[id(value)]
        self.numbers += numbers
        return form


def _parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):  # hooks have numbers for keys, each another one
        yield from ((key if isinstance(key, str) else "", v) for key, v in value.items())
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, (set, frozenset)):
        yield from enumerate(sorted(map(repr, value)))
    elif isinstance(value, FunctionType):
        yield from enumerate(cell.cell_contents for cell in value.__closure__ or ())
    elif isinstance(value, partial):
        yield from enumerate((value.func, value.args, value.keywords))
    elif hasattr(value, "__func__"):
        yield "", value.__func__
    else:
        yield from getattr(value, "__dict__", {}).items()


def _code_of(value: Any) -> tuple[str, bytes] | None:
    is_function = isinstance(value, FunctionType)
    return (_name_of(value), value.__code__.co_code) if is_function else None


def _name_of(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
