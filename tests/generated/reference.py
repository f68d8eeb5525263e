"""One device that calls the step for each microbatch in turn, as docs/contract.md promises.

Nothing of it is the package's own code, which it is to be compared with.
"""

import copy
import dataclasses
from itertools import islice

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn


class CutSteps(SingleDeviceStrategy):
    """Trains on each batch in so many slices as the first one was cut into.

    Args:
        num_microbatches: Slices of the first batch.
        sizes: Keeps a slice's number of samples, over trainers too.
    """

    def __init__(self, num_microbatches, sizes):
        super().__init__(torch.device("cpu"))
        self.num_microbatches, self.sizes = num_microbatches, sizes

    def training_step(self, *args):
        module = self.lightning_module
        step, log = module.training_step, module.log
        logged = _Logged(log)
        module.training_step = lambda batch, *rest: self._run(logged, step, batch, rest)
        module.log = logged.take
        try:
            output = super().training_step(*args)
        finally:
            del module.training_step, module.log
        return output

    def _run(self, logged, step, batch, rest):
        total = samples_in(batch)
        outputs, shares, measured = [], [], []
        measure = getattr(self.lightning_module, "measure", None)
        self.lightning_module.measure = lambda *values: measured.append(values)
        parts, copies = cut(batch, self._size(total))
        for part in parts:
            logged.begin(samples_in(part) / total)
            outputs.append(step(part, *rest))
            shares.append(samples_in(part) / total)
        del self.lightning_module.measure
        for column, copied in copies:  # what steps write stays in the loader's own batch
            column.copy_(copied)
        if measured:  # metrics get the whole batch
            losses, *columns = zip(*measured, strict=True)
            logged.begin(1.0)
            measure(_mean(losses, shares), *map(torch.cat, columns))
        logged.end(total)
        return _mean(outputs, shares)

    def _size(self, total):
        size = self.sizes.setdefault("size", total // self.num_microbatches)
        size = max(size, -(-total // self.num_microbatches))
        if total % size == 1 < total and _has_statistics(self.lightning_module):
            size = next(more for more in range(size, total + 1) if total % more != 1)
        return size


def _has_statistics(module):
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


class _Logged:
    """What a batch's steps log, as one number of each name."""

    def __init__(self, log):
        self._log, self._values, self._share = log, {}, 0.0

    def begin(self, share):
        self._share = share

    def take(self, name, value, batch_size=None, **options):
        found = self._values.setdefault(name, ([], [], options))
        found[0].append((value, self._share))
        found[1].append(batch_size)

    def end(self, total):
        for name, (values, sizes, options) in self._values.items():
            value = values[-1][0]
            if not hasattr(value, "compute"):
                is_sum = options.get("reduce_fx") == "sum"
                value = sum(value * (1 if is_sum else share) for value, share in values)
            self._log(name, value, batch_size=sum(sizes) if all(sizes) else total, **options)


def _mean(outputs, shares):
    if isinstance(outputs[0], dict):
        return {name: _mean([each[name] for each in outputs], shares) for name in outputs[0]}
    return sum(output * share for output, share in zip(outputs, shares, strict=True))


def fit_from_the_next_batch(fit, module, loader, *loaders, ckpt_path=None):
    """Fit; resumed within an epoch from the next batch, where Lightning reads its first again."""
    if ckpt_path is not None:
        loops = torch.load(ckpt_path, weights_only=False)["loops"]["fit_loop"]
        num_read = loops["epoch_loop.batch_progress"]["current"]["ready"]
        loader = _Rest(loader, num_read % len(loader))
    return fit(module, loader, *loaders, ckpt_path=ckpt_path)


class _Rest:
    """A loader whose first pass begins later."""

    def __init__(self, loader, start):
        self._loader, self._start = loader, start

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        start, self._start = self._start, 0  # at its first batch: it may be asked for twice
        yield from islice(self._loader, start, None)


def samples_in(batch):
    """Return a generated batch's number of samples: it has a class for each, in its field ``y``."""
    if isinstance(batch, dict):
        return len(batch["y"])
    return len(batch.y if dataclasses.is_dataclass(batch) else batch[-1])


def cut(batch, size):
    """Cut a generated batch: its fields are tensors, or lists with an entry for each sample.

    Returns:
        The parts, whose tensors are copies, since each backward has a part of its own; and for each
        copy of some rows those rows of the batch.
    """
    starts, copies = range(0, samples_in(batch), size), []
    return [_part(batch, slice(start, start + size), copies) for start in starts], copies


def _part(batch, rows, copies):
    if isinstance(batch, dict):
        parts = {name: _field(field, rows, copies) for name, field in batch.items()}
        if "inputs" in batch:  # columns, in a list where torch has converted their tuple
            parts["inputs"] = [_field(each, rows, copies) for each in batch["inputs"]]
        return parts
    if dataclasses.is_dataclass(batch):
        part = copy.copy(batch)
        vars(part).update({name: _field(each, rows, copies) for name, each in vars(batch).items()})
        return part
    fields = [_field(field, rows, copies) for field in batch]
    return type(batch)(*fields) if hasattr(batch, "_fields") else type(batch)(fields)


def _field(field, rows, copies):
    is_tensor = isinstance(field, torch.Tensor)
    if not is_tensor or not field.ndim:
        return field.clone() if is_tensor else field[rows] if isinstance(field, list) else field
    copies.append((field[rows], field[rows].clone()))
    return copies[-1][1]
