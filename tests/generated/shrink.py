"""Makes a failing program small: features become plain one by one, while it fails the same way."""

from tests.generated.choices import FEATURES, consistent


def shrink(chosen, judge):
    """Return the smallest choices that fail as these do, and their verdict.

    Args:
        chosen: The choices of a program that fails.
        judge: Returns the verdict of choices.
    """
    chosen = consistent(chosen)
    verdict = judge(chosen)
    if verdict.is_right:
        return chosen, verdict
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for tried in _smaller(chosen):
            again = judge(tried)
            if again.kind == verdict.kind:
                chosen, verdict, is_smaller = tried, again, True
                break
    return chosen, verdict


def _smaller(chosen):
    """Return choices with more plain values: halves of the features first, then single ones."""
    different = [n for n, (_, values) in FEATURES.items() if chosen[n] != values[0]]
    half = len(different) // 2
    groups = [different[:half], different[half:]] if half > 1 else []
    groups += [[name] for name in different]
    for group in groups:
        tried = consistent({**chosen, **{name: FEATURES[name][1][0] for name in group}})
        left = [n for n, (_, values) in FEATURES.items() if tried[n] != values[0]]
        if len(left) < len(different):
            yield tried
