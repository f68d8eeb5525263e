"""Models of Hugging Face on texts of many lengths, whose records are derived."""

import pytest
import torch

from tests.support.families import FAMILIES, VOCABULARY, Task
from tests.support.pairs import first
from tests.support.small_modules import compare_with_plain

LENGTHS = (8, 20, 9, 13, 17, 11, 18, 15, 10, 14)


class Stepping(Task):
    def step(self, batch):
        return self.loss(self.model, batch)


def texts(*shape):
    return torch.randint(1, VOCABULARY, shape)


def padded(index, length):
    """Each third batch has no padding."""
    mask = torch.ones(4, length, dtype=torch.long)
    mask[:, 5 if index % 3 else length :] = 0
    return {"input_ids": texts(4, length), "attention_mask": mask}


def pairs_of_texts(index, length):
    return {"x": texts(4, length), "y": texts(4, LENGTHS[(7 * index + 3) % 10])}


# How to make a batch, and the number of derived records at least.
BATCHES = {
    "llama_padding_mask": (padded, 2),
    "t5": (pairs_of_texts, 2),
    "bert": (lambda index, length: texts(4, length), 4),
}


@pytest.mark.parametrize("name", first(0, [*BATCHES]))
def test_training_is_the_plain_modules_at_each_length(name):
    family, (make, least) = FAMILIES[name], BATCHES[name]
    torch.manual_seed(0)
    module = Stepping(family.make(), family.loss).double()
    batches = [make(i, n) for i, n in enumerate((*LENGTHS, *LENGTHS[::-1]))]
    options = {"blocks": family.blocks} if family.blocks else {}
    pipeline, _ = compare_with_plain(module, "zb_h1", 2, batches, 2, **options)
    derived = [
        sum(record.is_derived for record in rank.records.by_key.values()) for rank in pipeline.ranks
    ]
    assert min(derived) == max(derived) >= least
