import pytest

from lightning_pipeoffload.schedule import Schedule, ScheduleError, lower, validate
from tests.support.plans import plan

ERRORS = {
    "a stage on two ranks": (
        "0F0 0BW0\n0F1 0BW1",
        r"rank 1, 0F1: stage 0 is on rank 0 as well; a stage belongs to one rank",
    ),
    "a stage on no rank": ("0F0 0BW0\n2F0 2BW0", r"no rank has stages \[1\]; number the stages"),
    "a rank without actions": ("0F0 0BW0\n\n1F0 1BW0", r"rank 1 of .* has no action"),
    "two forwards": ("0F0 0F0 0BW0", "rank 0, 0F0: stage 0 has F F BW .* F BW or F B W"),
    "two backwards": ("0F0 0BW0 0BW0", "rank 0, 0BW0: stage 0 has F BW BW"),
    "both forms of backward": ("0F0 0B0 0BW0", "rank 0, 0BW0: stage 0 has F B BW"),
    "backward before forward": ("0BW0 0F0", "rank 0, 0BW0: stage 0 has BW F"),
    "W before B": ("0F0 0W0 0B0", "rank 0, 0W0: stage 0 has F W B"),
    "no W": ("0F0 0B0", "rank 0, 0B0: stage 0 has F B for microbatch 0"),
    "no backward on one rank": ("0F0\n1F0 1BW0", "rank 0, 0F0: stage 0 has F for microbatch 0"),
    "no action at all": ("0F0 0F1\n1F0", "rank 1: stage 1 has nothing for microbatch 1"),
    "a REDUCE before the last W": (
        "0F0 0F1 0B0 0B1 0W0 0REDUCE0 0W1",
        "rank 0, 0REDUCE0: the gradients are complete after 0W1; put 0REDUCE1 after it",
    ),
    "a REDUCE before the last BW": (
        "0F0 0BW0\n1F0 1REDUCE0 1BW0",
        "rank 1, 1REDUCE0: the gradients are complete after 1BW0; put 1REDUCE0 after it",
    ),
    "a REDUCE named after another microbatch": (
        "0F0 0F1 0BW0 0BW1 0REDUCE0",
        "rank 0, 0REDUCE0: it stands after 0BW1; call it 0REDUCE1",
    ),
    "two REDUCEs": (
        "0F0 0BW0 0REDUCE0 0REDUCE0",
        "rank 0, 0REDUCE0: stage 0 has one REDUCE; take it out",
    ),
    "a stage without REDUCE": (
        "0F0 3F0 3BW0 3REDUCE0 0BW0 0REDUCE0\n1F0 2F0 2BW0 1BW0 1REDUCE0",
        "rank 1, 2BW0: other stages have REDUCE, stage [0-9]+ has none; add 2REDUCE0",
    ),
    "a REDUCE without gradients": (
        "0F0 0REDUCE0",
        "rank 0, 0REDUCE0: there are no gradients without a backward; take it out",
    ),
    "a REDUCE of a microbatch that there is not": (
        "0F0 0BW0 0REDUCE1",
        "rank 0: stage 0 has nothing for microbatch 1",
    ),
    "a REDUCE on another rank": (
        "0F0 0BW0\n1F0 1BW0 0REDUCE0 1REDUCE0",
        "rank 1, 0REDUCE0: stage 0 is on rank 0 as well",
    ),
    "a deadlock": (
        "0F0 0BW0 0F1 0BW1\n1F0 1F1 1BW0 1BW1",
        "deadlock: rank 0 is at 0BW0 and waits for 1B0; rank 1 is at 1F1 and waits for 0F1",
    ),
    "a circle on one rank": ("1F0 0F0 0BW0 1BW0", "rank 0 is at 1F0 and waits for 0F0"),
    "no SEND": ("0F0\n1RECV_F0 1F0", "rank 0, 0F0: another rank needs its result; add 0SEND_F0"),
    "no RECV": ("0F0 0SEND_F0\n1F0", "rank 0, 0F0: another rank needs .* add 1RECV_F0"),
    "a SEND too many": (
        "0F0 0SEND_F0 0SEND_F0\n1RECV_F0 1F0",
        "rank 0, 0SEND_F0: nothing waits for this transfer; take it out",
    ),
    "a SEND to the rank itself": (
        "0F0 0SEND_F0 1F0 1SEND_F0\n2RECV_F0 2F0",
        "rank 0, 0SEND_F0: nothing waits for this transfer",
    ),
    "a SEND by the last stage": (
        "0F0 0SEND_F0\n1RECV_F0 1F0 1SEND_F0",
        "rank 1, 1SEND_F0: nothing waits for this transfer",
    ),
    "a SEND on the wrong rank": (
        "0F0 1SEND_F0\n1RECV_F0 1F0",
        "rank 1, 1RECV_F0: stage 1 is on rank 0 as well",
    ),
    "a message that overtakes": (
        "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F1 1RECV_F0 1F0 1F1",
        "rank 1, 1RECV_F1: rank 0 sends first what 1RECV_F0 waits for; receive in that order",
    ),
    "a SEND before its result": (
        "0SEND_F0 0F0\n1RECV_F0 1F0",
        "deadlock: rank 0 is at 0SEND_F0 and waits for 0F0",
    ),
    "a RECV after its use": (
        "0F0 0SEND_F0\n1F0 1RECV_F0",
        "deadlock: rank 1 is at 1F0 and waits for 1RECV_F0",
    ),
    "copies, 1": ("0F0 0FREE0 0BW0", "0FREE0: FREE drops what OFFLOAD has copied"),
    "copies, 2": (
        "0F0 0OFFLOAD0 0BW0",
        "0BW0: BW needs what is on the host; put FREE and RELOAD before",
    ),
    "copies, 3": ("0F0 0OFFLOAD0 0FREE0 0B0 0W0", "0B0: B needs what is on the host"),
    "copies, 4": ("0F0 0OFFLOAD0 0FREE0 0RELOAD_B0 0B0 0W0", "0W0: W needs what is on the host"),
    "copies, 5": ("0F0 0RELOAD0 0BW0", "0RELOAD0: RELOAD brings back what FREE has dropped"),
    "copies, 6": (
        "0F0 0OFFLOAD0 0OFFLOAD0 0FREE0 0RELOAD0 0BW0",
        "OFFLOAD copies what F saved, once",
    ),
    "copies, 7": ("0F0 0BW0 0OFFLOAD0", "0OFFLOAD0: OFFLOAD copies what F saved"),
    "copies, 8": ("0F0 0OFFLOAD_W0 0B0 0W0", "OFFLOAD_W copies what waits for W; put it after B"),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_fault_is_named(fault):
    text, message = ERRORS[fault]
    with pytest.raises(ScheduleError, match=message):
        validate(plan(text))


def test_no_ranks_at_all():
    with pytest.raises(ScheduleError, match="has no ranks"):
        validate(Schedule.of([]))


def test_the_place_is_marked_in_the_grid():
    with pytest.raises(ScheduleError) as error:
        validate(plan("0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1"))
    assert str(error.value).splitlines()[1:] == [
        "step  rank 0  rank 1",
        "0     0F0     1F0",
        "1     0F1     1BW0",
        "2     0BW0    1F1     <-- ERROR HERE (rank 1)",
        "3     0BW1",
    ]
    # What is missing is marked where it belongs.
    with pytest.raises(ScheduleError) as error:
        validate(plan("0F0 0BW0 0REDUCE0\n1F0 1B0 1W0"))
    assert str(error.value).splitlines()[-1] == "2     0REDUCE0  1W0     <-- ERROR HERE (rank 1)"
    # Of a long plan only the neighbourhood is shown.
    with pytest.raises(ScheduleError) as error:
        validate(plan(" ".join(f"0F{m}" for m in range(50)) + " 0BW25"))
    assert len(str(error.value).splitlines()) <= 11


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F1\n1F0 1F1",
        "0F0 1F0 1B0 0B0 1W0 0W0 0REDUCE0 1REDUCE0",  # a reduction may come later
        "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1F1",
    ],
)
def test_what_is_valid(text):
    validate(plan(text))


def test_ranks_that_wait_for_each_other_before_they_send():
    """As compute actions alone nothing is wrong."""
    lowered = lower(plan("0F0 2F0\n1F0 3F0"))
    validate(lowered)
    late = [lowered[0], sorted(lowered[1], key=lambda action: action.kind.value != "RECV_F")]
    with pytest.raises(ScheduleError, match="rank 0 is at 2RECV_F0 and waits for 1SEND_F0"):
        validate(Schedule.of(late))
