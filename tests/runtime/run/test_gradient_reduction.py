"""Gradients become their mean over replicas, bucket by bucket, as soon as they are final."""

from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.run import GradientReduction
from lightning_pipeoffload.runtime.shapes import RemoteGradient
from lightning_pipeoffload.runtime.step import stage_gradients

ANY = frozenset({0})


class Exchange:
    """What two replicas, which are threads, have sent; each takes what the other sent as n-th."""

    def __init__(self):
        self.sent = [[], []]
        self.changed = Condition()

    def put(self, own, value):
        with self.changed:
            self.sent[own].append(value)
            self.changed.notify_all()

    def get(self, own, place):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.sent[own]) > place, timeout=1000)
            return self.sent[own][place]


class OneOfTwo:
    """Counterparts, as GradientReduction sees them."""

    num = 2

    def __init__(self, own, sums, unions, orders):
        self.replica, self.sums, self.unions, self.orders = own, sums, unions, orders
        self.num_orders = 0

    def start_sum(self, tensor):
        return self._start(self.sums, tensor, torch.add)

    def sums_to_owners(self):
        self.lengths = []
        return self

    def start(self, flat, lengths):
        self.lengths.append(lengths)
        return self.start_sum(flat)

    def start_logical_or(self, tensor):
        return self._start(self.unions, tensor, torch.maximum)

    def _start(self, exchange, tensor, combine):
        place = len(exchange.sent[self.replica])
        exchange.put(self.replica, tensor.clone())
        return lambda: tensor.copy_(combine(tensor, exchange.get(1 - self.replica, place)))

    def broadcast_object(self, order):
        self.num_orders += 1
        self.orders.put(self.replica, order)
        return self.orders.get(0, self.num_orders - 1)


def on_both(train):
    """Run one function as two replicas; return what each sent to be summed, and its result."""
    sums, *others = Exchange(), Exchange(), Exchange()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda own: train(own, OneOfTwo(own, sums, *others)), range(2)))
    return sums.sent, results


def parameters(**sizes):
    return {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}


def reduction_of(replicas, tensors, stages=ANY):
    return GradientReduction(replicas, {name: (t, stages) for name, t in tensors.items()}, {})


def test_sums_start_in_the_order_of_the_first_step():
    large = 1 << 18  # elements: 1 MiB

    def train(own, replicas):
        tensors = parameters(a=large, b=large, small=3, c=large, other=2)
        reduction = reduction_of(replicas, tensors)
        started = []
        for step in range(2):
            for tensor in tensors.values():
                tensor.grad = torch.full_like(tensor, step + own + 1.0)
            kept = tensors["c"].grad
            reduction.mark_gradients_final(0, [tensors[name] for name in "cba"])
            # Replica 1 has another order: that of replica 0 counts.
            for name in "cba" if own == 0 else "cab":
                started.append(len(replicas.sums.sent[own]))
                reduction.mark_parameter_final(tensors[name])
            reduction.wait()
            assert tensors["c"].grad is kept
            for tensor in tensors.values():
                assert tensor.grad.eq(step + 1.5).all()
        return started

    sent, (first, second) = on_both(train)
    assert [len(tensor) for tensor in sent[0]] == 2 * [5, large, large, large]
    assert first == [0, 0, 0, 5, 6, 7]
    assert second == [0, 0, 0, 5, 6, 6]


def test_absent_gradients_count_as_zeros_unless_nobody_has_one():
    def train(own, replicas):
        tensors = parameters(one=2, none=2, both=2)
        reduction = reduction_of(replicas, tensors)
        for _ in range(2):
            tensors["both"].grad = torch.full((2,), 2.0 * own)
            tensors["one"].grad = torch.full((2,), 4.0) if own else None
            tensors["none"].grad = None
            reduction.mark_gradients_final(0)
            reduction.wait()
            assert tensors["none"].grad is None
            assert tensors["one"].grad.tolist() == [2, 2]
            assert tensors["both"].grad.tolist() == [1, 1]

    on_both(train)


def test_frozen_parameters_are_left_out_from_then_on():
    def train(own, replicas):
        tensors = parameters(a=2, b=3)
        reduction = reduction_of(replicas, tensors)
        for is_trained in (True, False, True):
            tensors["a"].requires_grad_(is_trained)
            for tensor in tensors.values():
                tensor.grad = torch.full_like(tensor, own)
            reduction.mark_gradients_final(0, [tensors["a"]])
            reduction.mark_parameter_final(tensors["a"])
            reduction.wait()
            assert tensors["a"].grad.eq(0.5 if is_trained else own).all()
            assert tensors["b"].grad.eq(0.5).all()

    sent, _ = on_both(train)
    assert [len(tensor) for tensor in sent[0]] == [5, 3, 5]


def test_other_parameters_on_replica_0_are_refused():
    replicas = OneOfTwo(1, Exchange(), Exchange(), Exchange())
    replicas.orders.put(0, ["a"])
    tensors = parameters(a=2, b=2)
    reduction = reduction_of(replicas, tensors)
    reduction.mark_gradients_final(0)
    with pytest.raises(RuntimeError, match="b is trained by some replicas of the pipeline and not"):
        reduction.wait()


def test_a_gradient_keeps_its_strides_and_dtypes_are_not_mixed():
    def train(own, replicas):
        tensors = {
            "turned": nn.Parameter(torch.zeros(2, 3)),
            "double": nn.Parameter(torch.zeros(2, dtype=torch.float64)),
            "complex": nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
        }
        reduction = reduction_of(replicas, tensors)
        turned = (torch.arange(6.0) * (1 + own)).view(3, 2).T
        tensors["turned"].grad = turned
        tensors["double"].grad = torch.full((2,), own, dtype=torch.float64)
        tensors["complex"].grad = torch.full((2,), own + 1j)
        reduction.mark_gradients_final(0)
        reduction.wait()
        assert tensors["turned"].grad is turned
        assert turned.stride() == (1, 2)
        assert turned.tolist() == [[0, 3, 6], [1.5, 4.5, 7.5]]
        assert tensors["double"].grad.tolist() == [0.5, 0.5]
        assert tensors["complex"].grad.tolist() == [0.5 + 1j] * 2

    sent, _ = on_both(train)
    assert [tuple(tensor.shape) for tensor in sent[0]] == [(6,), (2,), (2, 2)]


def test_a_sparse_gradient_is_refused_by_name():
    tensors = parameters(table=(2, 3))
    replicas = OneOfTwo(0, Exchange(), Exchange(), Exchange())
    tensors["table"].grad = torch.ones(2, 3).to_sparse()
    reduction = reduction_of(replicas, tensors)
    reduction.mark_gradients_final(0)
    with pytest.raises(ValueError, match=r"table has a gradient of layout torch.sparse_coo"):
        reduction.wait()


def test_what_two_stages_use_is_summed_at_the_end_apart():
    def train(own, replicas):
        uses = {"tied": (nn.Parameter(torch.zeros(2)), frozenset({0, 3}))}
        (weight, _), apart = uses["tied"], stage_gradients(uses)
        reduction = GradientReduction(replicas, uses, apart)
        for _ in range(2):
            weight.grad = torch.full((2,), 1.0 + own)
            apart["tied of stage 3"].grad = torch.full((2,), 10.0) if own else None
            before = len(replicas.sums.sent[own])
            for stage in (3, 0):
                reduction.mark_gradients_final(stage, [weight])
                reduction.mark_parameter_final(weight)
            assert len(replicas.sums.sent[own]) == before
            reduction.wait()
            assert weight.grad.eq(1.5).all()
            for gradient in apart.values():
                gradient.add()
            assert weight.grad.eq(6.5).all()

    on_both(train)


def test_the_owner_has_the_mean_and_the_other_replica_a_remote_gradient():
    owners = {"b": 1, "large": 0, "a": 0, "none": 1, "one": 1}

    def train(own, replicas):
        tensors = parameters(b=3, large=1 << 18, a=2, none=4, one=1)
        names = {id(tensor): name for name, tensor in tensors.items()}
        uses = {name: (tensor, ANY) for name, tensor in tensors.items()}
        reduction = GradientReduction(replicas, uses, {}, lambda p: owners[names[id(p)]])
        remote = []
        for step in range(2):
            for name in ("b", "large", "a"):
                tensors[name].grad = torch.full_like(tensors[name], step + own)
            tensors["one"].grad = torch.full((1,), 4.0) if own else None
            tensors["none"].grad = None
            kept, before = tensors["large"].grad, len(replicas.sums.sent[own])
            reduction.mark_gradients_final(0, [tensors["large"]])
            assert len(replicas.sums.sent[own]) - before == step  # by the first step's order
            reduction.wait()
            assert replicas.lengths == [[2, 8], [1 << 18, 0]]
            assert tensors["none"].grad is None
            for name in ("b", "large", "a", "one"):
                gradient = tensors[name].grad
                assert isinstance(gradient, RemoteGradient) == (owners[name] != own)
                if owners[name] == own:
                    assert gradient.eq(2 if name == "one" else step + 0.5).all()
            assert own or tensors["large"].grad is kept
            remote.append(tensors["large" if own else "b"].grad)
        assert remote[0] is remote[1]

    on_both(train)
