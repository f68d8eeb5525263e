import pytest

from tests.generated.verdict import Pools


@pytest.fixture(scope="session")
def pools():
    """Give the warm processes of so many ranks, which a program that hangs ends soon."""
    made = Pools()
    yield made.get
    made.close()
