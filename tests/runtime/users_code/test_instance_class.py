from abc import ABC

import pytest

from lightning_pipeoffload.runtime.users_code.instance_class import own_class, subclass_like


@pytest.mark.parametrize("base", [object, ABC])
def test_what_is_given_to_the_type_goes_to_the_class_it_stands_for(base):
    class Plain(base):
        count = 0

    first, second = Plain(), Plain()
    for instance in (first, second):
        instance.__class__ = subclass_like(Plain, {"__len__": lambda self: 3})
    type(first).count += 1
    type(second).count += 1
    type(first).word = "kept"
    assert (Plain.count, first.count, second.word, len(first)) == (2, 2, "kept", 3)
    del type(second).word
    assert not hasattr(Plain, "word")
    assert isinstance(first, Plain)
    assert own_class(first) is Plain
