"""Checks of loaders and of the batches that replicas read.

Replicas read different batches. Lightning's sampler shares out what has an index. A stream, or data
with a sampler of the user's own, is read by each replica as it is, and all might read the same,
which no error would show. So the first batches of these are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import Any

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    default_collate,
    default_convert,
)

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.batch import refuse_unclear_list, start_checksum
from lightning_pipeoffload.runtime.comm import RankMesh, Replicas
from lightning_pipeoffload.runtime.users_code import subclass_like
from lightning_pipeoffload.texts.index_groups import GroupSampler
from lightning_pipeoffload.texts.minibatch import MinibatchSampler
from lightning_pipeoffload.texts.packed_rows import PackedRows, PackedRowsSampler

NUM_CHECKED = 2  # one batch alone may be like another's where all are alike
_TORCHS = default_collate, default_convert
_ARRIVED = "arrived/"
_NUM_ARRIVALS = 8  # more milestones than ranks can be apart: they meet at every third


def loader_size(loader: Any) -> int | None:
    """Return how many samples a loader puts in a batch; None if it does not say."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if type(size) is int:
            return size
    return None


def group_sampler_of(loader: Any) -> GroupSampler | None:
    """Return the loader's PackedRowsSampler or MinibatchSampler; None if it has neither."""
    # Not the batch_sampler itself, which Lightning wraps where it predicts.
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return sampler if isinstance(sampler, GroupSampler) else None


def check_rows(loader: Any, settings: PipelineSettings, is_training: bool, predicts: bool) -> bool:
    """Return whether a loader makes batches of packed rows, of which each is a microbatch.

    Args:
        loader: The loader.
        settings: What batches are cut by.
        is_training: Whether it is a loader of training.
        predicts: Whether it is one of predictions, which are no means.

    Raises:
        ValueError: Its sampler and its collate function do not go together, or the settings do not
            go with packed rows.
    """
    sampler, collate = group_sampler_of(loader), getattr(loader, "collate_fn", None)
    if isinstance(sampler, MinibatchSampler):
        raise ValueError(
            'MinibatchSampler makes minibatches for strategy="odc"; for a pipeline pack the texts '
            "into rows: batch_sampler=PackedRowsSampler(...), collate_fn=PackedRows(...)"
        )
    if isinstance(sampler, PackedRowsSampler) != isinstance(collate, PackedRows):
        sampler = getattr(loader, "batch_sampler", None)
        raise ValueError(
            f"batch_sampler={type(sampler).__name__} and collate_fn={_name_of(collate)} do not go "
            f"together: texts are packed by batch_sampler=PackedRowsSampler(...) with "
            f"collate_fn=PackedRows(...)"
        )
    if not isinstance(sampler, PackedRowsSampler) or not isinstance(collate, PackedRows):
        return False
    _check_sizes(loader, sampler, collate)
    _check_packing(collate, settings, is_training, predicts)
    return True


def _check_sizes(loader: Any, sampler: PackedRowsSampler, collate: PackedRows) -> None:
    for name in ("num_rows", "max_tokens"):
        sizes = getattr(sampler, name), getattr(collate, name)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"PackedRowsSampler has {name}={sizes[0]}, and PackedRows {sizes[1]}; give both "
                f"the same"
            )
    dataset = getattr(loader, "dataset", None)
    num_texts = len(dataset) if isinstance(dataset, Sized) else sampler.num_texts
    if num_texts != sampler.num_texts:
        raise ValueError(
            f"PackedRowsSampler has the lengths of {sampler.num_texts} texts, and the loader's "
            f"dataset has {num_texts}; give it the length of each, or the loader a Subset"
        )


def _name_of(collate: Any) -> str:
    return getattr(collate, "__name__", type(collate).__name__)


def _check_packing(
    collate: PackedRows, settings: PipelineSettings, is_training: bool, predicts: bool
) -> None:
    if settings.make_microbatches is not None:
        raise ValueError(
            "PackedRows makes rows that are a microbatch each; leave out make_microbatches"
        )
    if settings.microbatch_weight == "samples" and not predicts:
        raise ValueError(
            "the rows of PackedRows count unlike numbers of labels; give the strategy "
            'microbatch_weight="tokens", or a callable of the microbatch'
        )
    if is_training and settings.num_microbatches not in ("auto", collate.num_rows):
        raise ValueError(
            f"num_microbatches={settings.num_microbatches} with PackedRows(num_rows="
            f"{collate.num_rows}): each row is a microbatch, since attention tells texts apart in "
            f"a batch of one row; leave num_microbatches out, or set num_rows to it"
        )


def is_collated_by_torch(loader: Any) -> bool:
    """Whether torch's own function makes a loader's batches."""
    return isinstance(loader, DataLoader) and loader.collate_fn in _TORCHS


def epoch_to_read(trainer: Trainer) -> int:
    """Return the epoch of the training batches that are read next."""
    # A fit that was saved in an epoch's last batch, or at its end, goes on with the next epoch, but
    # Lightning begins to read before it counts that one.
    batches = _resumed_batches(trainer)
    if batches is not None:
        return trainer.current_epoch + int(batches.is_last_batch)
    if trainer.max_steps != -1:  # Lightning goes on within the epoch that has ended, and reads anew
        return trainer.current_epoch
    loop: Any = trainer.fit_loop  # its counters have no declared types
    return max(trainer.current_epoch, int(loop.epoch_progress.current.processed))


def count_resumed_batches(trainer: Trainer) -> int:
    """Return how many batches of its epoch a fit that resumes has done."""
    batches = _resumed_batches(trainer)
    is_within = batches is not None and not batches.is_last_batch
    return int(batches.current.processed) if is_within else 0


def _resumed_batches(trainer: Trainer) -> Any:
    """Return the progress in an epoch that was saved before it ended, of a fit that resumes.

    None for other fits. An epoch that max_steps has cut short is over too: Lightning goes on with
    the next one.
    """
    loop: Any = trainer.fit_loop  # its counters have no declared types
    epochs = loop.epoch_progress.current
    is_cut = loop.restarting and epochs.processed < epochs.ready
    return loop.epoch_loop.batch_progress if is_cut else None


@contextmanager
def silenced(message: str) -> Iterator[None]:
    """Silence a warning of Lightning inside; filters that others add stay."""
    warnings.filterwarnings("ignore", message, PossibleUserWarning)
    added = warnings.filters[0]
    try:
        yield
    finally:
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined] # a list


def make_loader_skip_seen(loader: object, num_seen: int, at_end: ExitStack) -> None:
    """Start the next iteration over a training loader after the batches that were seen.

    They are read and dropped, so that workers draw for the rest what they would have drawn.
    Lightning itself starts anew, unless the loader saves its state; then this does nothing. Until
    ``at_end`` is closed its warning is silenced.
    """
    if not num_seen or not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
        return
    plain = type(loader)

    def iterate(self: Any) -> Iterator[Any]:
        self.__class__ = plain
        return _iterate_after(self, num_seen)

    loader.__class__ = subclass_like(plain, {"__iter__": iterate})
    at_end.enter_context(silenced(".*dataloader is not resumable"))


def _iterate_after(loader: DataLoader[Any], num_seen: int) -> Iterator[Any]:
    batches = iter(loader)
    for _ in range(num_seen):
        try:
            next(batches)
        except StopIteration:  # the shorter one of several, which starts again
            batches = iter(loader)
            next(batches)
    yield from batches


class FirstBatches:
    """Checks the first batches of loaders, and compares some of training over the replicas.

    Args:
        replicas: The counterparts of this rank.
        checks_lists: Whether batches are cut by what they hold: a list that a ``collate_fn`` of
            the user's returns may be of samples or of columns.
    """

    def __init__(self, replicas: Replicas, checks_lists: bool) -> None:
        self._replicas, self._checks_lists = replicas, checks_lists
        self._of_loaders: dict[int, tuple[str, list[int]]] = {}
        self._num_steps = 0

    def check(self, loader: Any, batch: Any, number: int, is_training: bool) -> None:
        """Check one of the first batches of a loader's pass, where it is read.

        Args:
            loader: The loader.
            batch: Its batch.
            number: How many were read before, fewer than ``NUM_CHECKED``.
            is_training: Whether it is a loader of training.

        Raises:
            ValueError: The first batch is a list that may be cut in two ways.
        """
        if is_training:
            self._record_batch(loader, batch, number)
        is_by_user = isinstance(loader, DataLoader) and not is_collated_by_torch(loader)
        if self._checks_lists and is_by_user and not number:
            refuse_unclear_list(batch, loader_size(loader))

    def _record_batch(self, loader: Any, batch: Any, number: int) -> None:
        if (
            self._replicas.num == 1
            or self._num_steps >= NUM_CHECKED
            or _has_replica_sampler(loader)
        ):
            return
        name = type(getattr(loader, "dataset", loader)).__name__
        _, checksums = self._of_loaders.setdefault(id(loader), (name, []))
        if number == len(checksums) < NUM_CHECKED:
            checksums.append(start_checksum(batch)())

    def compare_if_due(self) -> None:
        """Compare in the last of the first steps; in the others no rank waits.

        Raises:
            ValueError: Two replicas read the same.
        """
        self._num_steps += 1
        if self._num_steps != NUM_CHECKED or not self._of_loaders:
            return
        names, checksums = zip(*self._of_loaders.values(), strict=True)
        of_replicas = self._replicas.gather([*checksums])
        for name, by_replica in zip(names, zip(*of_replicas, strict=True), strict=True):
            for (one, mine), (other, theirs) in combinations(enumerate(by_replica), 2):
                if mine == theirs and len({*mine}) == NUM_CHECKED:
                    raise ValueError(_explain(name, one, other))


def _explain(name: str, one: int, other: int) -> str:
    return (
        f"replicas {one} and {other} read the same batches of {name}, which nothing shares out "
        f"among them; let it, or a sampler of your own, give each replica its part, by "
        f"lightning_pipeoffload.data_parallel_rank() and data_parallel_size(); for data with "
        f"indices Lightning's sampler does it, without use_distributed_sampler=False"
    )


def _has_replica_sampler(loader: Any) -> bool:
    if not isinstance(loader, DataLoader):
        return False
    if group_sampler_of(loader) is not None:
        return True
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


class ReplicaBatchCounts:
    """Compares how many batches the replicas have from one milestone to the next.

    A milestone is reached by all of them, such as a validation or an epoch's end: where a replica
    has fewer batches, another waits for it in vain. The thread that watches for failures compares
    with the fewest.
    """

    def __init__(self, store: Store, mesh: RankMesh) -> None:
        self._store, self._mesh = store, mesh
        self._global_rank = mesh.global_rank
        self._position = 0, 0  # milestones, batches since; one object, as two threads use it

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Count a batch; an error because another rank has no more is explained."""
        milestone, num_batches = self._position
        self._position = milestone, num_batches + 1
        try:
            yield
        except RuntimeError as error:  # the other's next batch came in place of this one's, say
            cause = self.poll(self._store)
            if cause is not None:
                raise RuntimeError(f"this rank waits for {cause}") from error
            raise

    def reach_milestone(self) -> None:
        """Publish that this rank has reached a milestone, unless one with fewer batches has."""
        milestone, num_batches = self._position
        # One key for all: each rank polls it, and global rank 0 answers all of them.
        arrival = f"{self._global_rank} {num_batches}"
        first = self._store.compare_set(f"{_ARRIVED}{milestone}", "", arrival)
        if num_batches < int(first.split()[1]):  # in an evaluation ranks may run a batch ahead
            self._store.set(f"{_ARRIVED}{milestone}", arrival)
        if milestone >= _NUM_ARRIVALS and not self._global_rank:
            self._store.delete_key(f"{_ARRIVED}{milestone - _NUM_ARRIVALS}")
        self._position = milestone + 1, 0

    def poll(self, store: Store) -> str | None:
        """Describe a rank that has read fewer batches; None if there is none. Thread-safe."""
        milestone, num_batches = self._position
        key = f"{_ARRIVED}{milestone}"
        if not num_batches or not store.check([key]):
            return None
        rank, theirs = map(int, store.get(key).split())
        return self._explain(rank, theirs) if theirs < num_batches else None

    def _explain(self, rank: int, num_batches: int) -> str:
        other, replica = self._mesh.replica_of(rank), self._mesh.replica
        return (
            f"replica {other}, whose data has ended after {num_batches} batches where replica "
            f"{replica} has more; give every replica as many: by Lightning's sampler, or with "
            f"limit_train_batches where an IterableDataset shares its data out"
        )
