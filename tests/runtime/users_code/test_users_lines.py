import json

import pytest

from lightning_pipeoffload.processes.wrapped_hook import WrappedHook
from lightning_pipeoffload.runtime.users_code.users_lines import (
    calling_line,
    in_brackets,
    users_line,
)


def test_a_line_in_this_package_is_not_the_users():
    with pytest.raises(AttributeError) as raised:
        WrappedHook(object(), "no_such_hook", print)
    assert users_line(raised.value).endswith('WrappedHook(object(), "no_such_hook", print)')


def test_a_line_in_pythons_own_code_is_not_the_users():
    with pytest.raises(TypeError) as raised:
        json.dumps({1, 2})
    assert users_line(raised.value).endswith("json.dumps({1, 2})")


def test_the_line_that_calls_is_the_deepest():
    found = calling_line()
    assert found.endswith("found = calling_line()")
    assert in_brackets(found) == f" ({found})"


def test_no_line_has_no_brackets():
    assert in_brackets("") == ""
